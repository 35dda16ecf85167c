"""When the manager warms up, and what it does on a machine that turns out to be too small."""

import gc
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from torch.distributed.checkpoint import _async_process_executor as torch_executor
from torchtitan.components.checkpointer import AsyncMode, dcp, dcp_pinned, waiting
from torchtitan.components.checkpointer.dcp_pinned import PinnedSession
from torchtitan.components.checkpointer.dcp_writer import DurableFileSystemWriter
from torchtitan.components.checkpointer.endings import Verdict
from torchtitan.components.checkpointer.errors import (
    CheckpointSaveError,
    CheckpointSaveTimeoutError,
)
from torchtitan.components.checkpointer.pinned import memory, stager
from torchtitan.components.checkpointer.state import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
)

from tests.unit_tests.components.checkpointer.fakes import UnkillableProcess
from tests.unit_tests.components.checkpointer.runs import build_run, message_of, names

pytestmark = pytest.mark.usefixtures("one_rank")

PINNED = "async_with_pinned_mem"


@pytest.fixture
def made() -> Iterator[MagicMock]:
    """The stager that is built, with a save that is never called for."""
    with (
        patch.object(dcp, "DefaultStager") as built,
        patch.object(dcp.CheckpointManager, "_dispatch"),
    ):
        yield built.return_value


def test_the_first_step_without_a_save_warms_up_once(made: MagicMock, tmp_path: Path) -> None:
    run = build_run(tmp_path, async_mode=PINNED, interval=3)
    run.train(7)
    made.prewarm.assert_called_once()
    (state,) = made.prewarm.call_args.args
    assert {"tok_embeddings.weight", "optimizer", "train_state"} <= set(state)
    run.manager.close()


def test_a_step_with_a_save_never_warms_up(made: MagicMock, tmp_path: Path) -> None:
    run = build_run(tmp_path, async_mode=PINNED, interval=1)
    run.train(1)
    run.manager.interval = 10
    run.train(3)
    made.prewarm.assert_not_called()
    run.manager.close()


def test_each_save_but_the_last_looks_first_whether_it_can_be_staged(
    made: MagicMock, tmp_path: Path
) -> None:
    run = build_run(tmp_path, async_mode=PINNED, interval=1)
    run.train(3, last_step=3)
    assert made.prepare.call_count == 2
    (state,) = made.prepare.call_args.args
    assert {"tok_embeddings.weight", "optimizer", "train_state"} <= set(state)
    run.manager.close()


def test_each_object_is_asked_once_for_each_save_and_nothing_of_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build_run(tmp_path, async_mode=PINNED, interval=1)
    asked: dict[str, MagicMock] = {}
    for key, value in run.manager.states.items():
        asked[key] = MagicMock(wraps=value.state_dict)
        monkeypatch.setattr(value, "state_dict", asked[key])
    with patch.object(dcp_pinned.dcp, "async_save", wraps=dcp_pinned.dcp.async_save) as saved:
        run.train(2)
    # torch would ask each tensor at length whether it has a state of its own.
    assert [call.args for call in saved.call_args_list] == [({},), ({},)]
    assert {key: state_dict.call_count for key, state_dict in asked.items()} == dict.fromkeys(
        (MODEL, OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE), 2
    )
    session = run.manager._pinned
    assert session is not None and not session.prepared
    run.manager.close()


def test_what_fails_ahead_of_the_first_save_ends_no_run_that_goes_on(
    made: MagicMock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made.prewarm.side_effect = OSError(12, "Cannot allocate memory")
    run = build_run(tmp_path, async_mode=PINNED, interval=3, on_save_failure="warn")
    run.train(3)
    assert caplog.text.count("It is tried again with the first save.") == 1
    made.prepare.assert_called_once()
    run.manager.close()


def test_torch_hands_its_saves_over_while_there_is_a_stager(
    made: MagicMock, tmp_path: Path
) -> None:
    runs = [build_run(tmp_path / name, async_mode=PINNED, interval=9) for name in ("a", "b")]
    assert torch_executor._CHECKPOINT_PROCESS is None
    for run in runs:
        run.train(1)
    for run in runs:
        assert torch_executor._CHECKPOINT_PROCESS is not None
        run.manager.close()
        run.manager.close()
    assert torch_executor._CHECKPOINT_PROCESS is None


class ForgettingStager:
    """Keeps what it is built with, as the real one does; a mock would keep it for ever."""

    num_closed = 0
    losses_in_a_row = 0
    has_usable_writer, lacks_room = True, False

    def __init__(self, options: Any, **given: Any) -> None:
        self.given = given
        self.shortages: list[str] = []

    def prewarm(self, state_dict: dict[str, Any]) -> None: ...

    def close(self) -> None:
        type(self).num_closed += 1


def test_a_manager_that_an_exception_drops_does_not_wait_for_its_writer_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp, "DefaultStager", ForgettingStager)
    run = build_run(tmp_path, async_mode=PINNED, interval=9)
    run.train(1)
    gc.disable()
    try:
        del run
        assert ForgettingStager.num_closed == 0
    finally:
        gc.enable()
    gc.collect()
    assert ForgettingStager.num_closed == 1


def test_a_run_that_never_saves_makes_nothing_and_says_nothing(
    made: MagicMock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = build_run(tmp_path, async_mode=PINNED, load_only=True)
    run.train(2)
    assert run.manager.stager is None and "staged" not in caplog.text
    run.manager.close()


@pytest.mark.parametrize("settings", [{}, {"interval": 1}, {"enable_first_step_checkpoint": True}])
def test_a_machine_without_memory_for_the_copy_saves_all_the_same(
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(stager, "WriterProcess", started.append)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    run = build_run(tmp_path, async_mode=PINNED, keep_latest_k=0, **{"interval": 2, **settings})
    run.train(4)
    assert run.manager.async_mode is AsyncMode.DISABLED and run.manager.stager is None
    assert torch_executor._CHECKPOINT_PROCESS is None
    assert caplog.text.count("From now on training waits for each save") == 1
    assert "only 0.00 GiB of memory are free" in caplog.text and started == []
    run.manager.close()
    saved = [2, 4] if settings == {} else [1, 2, 4]
    assert {f"step-{step}" for step in saved} <= set(names(tmp_path))
    for name in names(tmp_path):
        assert (tmp_path / f"checkpoint/{name}/.metadata").exists()


LATE = RuntimeError("Timed out waiting 600000ms for recv operation to complete")


def test_a_rank_that_is_late_to_settle_is_named_with_step_path_and_flag(
    made: MagicMock, tmp_path: Path
) -> None:
    run = build_run(tmp_path, async_mode=PINNED, interval=3)
    with patch.object(dcp_pinned, "settle", side_effect=LATE):
        ahead = message_of(run.train, 1)
    assert f"Preparing after step 1 for saves into {tmp_path}/checkpoint was given up" in ahead
    assert "rank 0 has waited for 600 s, the limit of --checkpoint.timeout_seconds" in ahead
    with (
        patch.object(dcp_pinned, "settle", side_effect=LATE),
        pytest.raises(CheckpointSaveTimeoutError) as raised,
    ):
        run.train(3)
    assert f"of step 3 to {tmp_path}/checkpoint/step-3 was given up: rank 0" in str(raised.value)
    assert raised.value.__cause__ is LATE
    run.manager.close()


def test_a_late_rank_does_not_hide_how_the_previous_save_failed(
    made: MagicMock, tmp_path: Path
) -> None:
    run = build_run(tmp_path, async_mode=PINNED)
    with (
        patch.object(
            run.manager,
            "maybe_wait_for_saving",
            side_effect=CheckpointSaveError("the disk is full"),
        ),
        patch.object(dcp_pinned, "settle", side_effect=LATE),
        pytest.raises(CheckpointSaveTimeoutError) as raised,
    ):
        run.train(1)
    assert raised.value.__notes__ == ["Before that: the disk is full"]
    run.manager.close()


def test_a_state_that_could_not_be_taken_once_fails_the_save_that_was_prepared_without_it() -> None:
    settled = Verdict(None, can_stage=True)
    session = PinnedSession(
        MagicMock(), group=None, limit_seconds=1, find_can_wait=lambda: lambda key, tensor: True
    )
    writers: list[DurableFileSystemWriter] = []

    def async_save(state_dict: dict[str, Any], *, storage_writer: Any, **others: Any) -> None:
        writers.append(storage_writer)

    take = MagicMock(side_effect=[ValueError("there is no such row"), {"row": 3}])
    with (
        patch.object(dcp_pinned, "settle", return_value=settled),
        patch.object(dcp_pinned.dcp, "async_save", async_save),
    ):
        for is_good in (False, True):
            assert session.settle(None, take) is settled
            session.async_save(DurableFileSystemWriter("/run/step-1"), "/run/step-1")
            assert (writers[-1]._refusal is None) == is_good
    with pytest.raises(ValueError, match="no such row"):
        writers[0].prepare_local_plan(MagicMock())
    session.close()


def test_memory_taken_ahead_that_never_comes_is_an_error_of_the_save(
    made: MagicMock, tmp_path: Path
) -> None:
    made.prepare.side_effect = waiting.WaitExpiredError("not done after 600 s")
    run = build_run(tmp_path, async_mode=PINNED)
    message = message_of(run.train, 1)
    assert f"of step 1 to {tmp_path}/checkpoint/step-1 was given up: rank 0" in message
    run.manager.close()


def test_closing_leaves_a_writer_behind_that_no_signal_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "_has_given_up", False)
    run = build_run(tmp_path, async_mode=PINNED, interval=9)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", UnkillableProcess)
        run.train(2)
    run.manager.close()
    assert run.manager.stager is None and waiting._has_given_up
    assert "of rank 0 was killed and has not ended within 10 s" in caplog.text
