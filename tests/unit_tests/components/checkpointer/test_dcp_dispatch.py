"""How torch.distributed.checkpoint is called: fakes with exactly the parameters it may be given."""

from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torchtitan.components.checkpointer import CheckpointManager, dcp, ModelWrapper
from torchtitan.components.checkpointer.dcp_writer import DurableFileSystemWriter
from torchtitan.components.checkpointer.errors import CheckpointSaveError

from tests.unit_tests.components.checkpointer.fakes import without_parts


class Item:
    """A part with a state of its own."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = dict(state_dict)


class Calls:
    """Fakes for the three functions; each takes exactly what it may be given."""

    def __init__(self) -> None:
        self.saved: list[tuple[dict[str, Any], str, Any]] = []
        self.loaded: list[tuple[dict[str, Any], str | None]] = []
        self.asynchronous: list[dict[str, Any]] = []
        self.groups: list[dict[str, Any]] = []
        self.results: list[Any] = []

    def save(self, state_dict: dict[str, Any], *, checkpoint_id: str, storage_writer: Any) -> None:
        self.saved.append((state_dict, checkpoint_id, storage_writer))

    def load(self, states: dict[str, Any], checkpoint_id: str | None = None) -> None:
        self.loaded.append((states, checkpoint_id))

    def new_group(self, **keywords: Any) -> str:
        self.groups.append(keywords)
        return "own group"

    def async_save(self, state_dict: dict[str, Any], **keywords: Any) -> Any:
        self.asynchronous.append({"state_dict": state_dict, **keywords})
        return self.results.pop(0)


@pytest.fixture
def calls() -> Iterator[Calls]:
    fakes = Calls()
    with (
        patch.object(torch_dcp, "save", fakes.save),
        patch.object(torch_dcp, "load", fakes.load),
        patch.object(torch_dcp, "async_save", fakes.async_save),
        patch.object(dist, "new_group", fakes.new_group),
        patch.object(dist, "get_rank", return_value=0),
    ):
        yield fakes


def build(folder: Path, **settings: Any) -> CheckpointManager:
    config = CheckpointManager.Config(enable=True, interval=1, **settings)
    return config.build(
        dataloader=Item(row=3),
        model_parts=[nn.Linear(2, 2)],
        optimizers=Item(step=1),
        lr_schedulers=Item(last_epoch=1),
        states={"trainer": torch.tensor([1.0])},
        sd_adapter=None,
        base_folder=str(folder),
    )


def done(result: Any = None) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def test_the_states_dict_is_updated_in_place_and_kept(calls: Calls, tmp_path: Path) -> None:
    states: dict[str, Any] = {"trainer": 1}
    model = nn.Linear(1, 1)
    manager = without_parts(
        CheckpointManager.Config(enable=True),
        model_parts=[model],
        states=states,
        base_folder=str(tmp_path),
    )
    assert manager.states is states
    assert set(states) == {"trainer", "model", "optimizer", "dataloader", "lr_scheduler"}
    assert isinstance(states["model"], ModelWrapper) and states["model"].model == [model]
    manager.close()


def test_a_synchronous_save_hands_over_the_flat_state(calls: Calls, tmp_path: Path) -> None:
    manager = build(tmp_path)
    assert manager.pg is None
    assert manager.save(4) is True
    ((state, checkpoint_id, writer),) = calls.saved
    assert checkpoint_id == f"{tmp_path}/checkpoint/step-4"
    assert set(state) == {"weight", "bias", "trainer", "optimizer", "dataloader", "lr_scheduler"}
    assert state["optimizer"] is manager.states["optimizer"]
    assert isinstance(writer, DurableFileSystemWriter)
    assert manager.save_future is None and calls.asynchronous == []
    manager.close()


def test_no_save_is_due_between_the_intervals(calls: Calls, tmp_path: Path) -> None:
    manager = build(tmp_path)
    manager.interval = 10
    assert [manager.save(step) for step in (1, 9, 10, 11)] == [False, False, True, False]
    manager.load_only = True
    assert manager.save(20, last_step=True) is False
    assert len(calls.saved) == 1
    manager.close()


def test_an_asynchronous_save_goes_through_a_group_of_its_own(calls: Calls, tmp_path: Path) -> None:
    manager = build(tmp_path, async_mode="async", timeout_seconds=45)
    assert calls.groups == [{"backend": "gloo", "timeout": timedelta(seconds=45)}]
    calls.results = [done()]
    assert manager.save(4) is True
    (call,) = calls.asynchronous
    assert set(call) == {"state_dict", "storage_writer", "checkpoint_id", "process_group"}
    assert call["process_group"] == "own group"
    assert manager.save_future is not None and manager.staging_future is None
    manager.maybe_wait_for_staging()
    manager.close()
    assert manager.save_future is None


def test_the_previous_save_is_awaited_exactly_once_before_the_next(
    calls: Calls, tmp_path: Path
) -> None:
    manager = build(tmp_path, async_mode="async")
    first, second = MagicMock(), MagicMock()
    calls.results = [first, second]
    manager.save(1)
    first.result.assert_not_called()
    manager.save(2)
    first.result.assert_called_once_with()
    second.result.assert_not_called()
    assert manager.save_future is second
    manager.close()
    second.result.assert_called_once_with()
    first.result.assert_called_once_with()


def test_a_failed_background_save_is_raised_once_with_step_and_path(
    calls: Calls, tmp_path: Path
) -> None:
    manager = build(tmp_path, async_mode="async")
    broken: Future[Any] = Future()
    calls.results = [broken, done()]
    manager.save(1)
    broken.set_exception(torch_dcp.CheckpointException("disk full", {}))
    with pytest.raises(CheckpointSaveError, match=rf"step 1 to {tmp_path}/checkpoint/step-1"):
        manager.save(2)
    assert manager.save(3) is True
    manager.close()


def test_a_wait_that_is_interrupted_leaves_the_save_in_flight(calls: Calls, tmp_path: Path) -> None:
    manager = build(tmp_path, async_mode="async")
    future = MagicMock()
    future.done.return_value = False
    future.result.side_effect = [KeyboardInterrupt, None]
    calls.results = [future]
    manager.save(1)
    with pytest.raises(KeyboardInterrupt):
        manager.save(2)
    manager.close()
    assert future.result.call_count == 2 and len(calls.asynchronous) == 1


def test_a_failed_synchronous_save_names_step_and_path(calls: Calls, tmp_path: Path) -> None:
    manager = build(tmp_path)
    with patch.object(
        torch_dcp, "save", side_effect=torch_dcp.CheckpointException("disk full", {})
    ):
        with pytest.raises(CheckpointSaveError, match="step 6 to .*step-6 failed"):
            manager.save(6)
    assert manager.save(7) is True
    manager.close()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_the_last_save_is_synchronous_weights_alone_in_the_export_dtype(
    calls: Calls, tmp_path: Path, mode: str
) -> None:
    manager = build(tmp_path, async_mode=mode, export_dtype="bfloat16")
    assert manager.save(5, last_step=True) is True
    ((state, checkpoint_id, _),) = calls.saved
    assert set(state) == {"weight", "bias"} and checkpoint_id.endswith("/step-5")
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    assert manager.states["model"].state_dict()["weight"].dtype is torch.float32
    assert manager.save_future is None
    manager.close()


def test_a_full_last_save_keeps_dtypes_and_is_synchronous(calls: Calls, tmp_path: Path) -> None:
    manager = build(
        tmp_path, async_mode="async", export_dtype="bfloat16", last_save_model_only=False
    )
    manager.save(5, last_step=True)
    ((state, _, _),) = calls.saved
    assert "optimizer" in state and state["weight"].dtype is torch.float32
    manager.close()


def test_the_last_save_expires_nothing(calls: Calls, tmp_path: Path) -> None:
    manager = build(tmp_path, keep_latest_k=2)
    for step in (1, 2, 3):
        path = tmp_path / "checkpoint" / f"step-{step}"
        path.mkdir(parents=True)
        (path / ".metadata").touch()
    manager.save(4, last_step=True)
    manager.close()
    assert len(list((tmp_path / "checkpoint").iterdir())) == 3


def test_a_future_in_a_mode_without_futures_is_an_error(calls: Calls, tmp_path: Path) -> None:
    manager = build(tmp_path, async_mode="disabled")
    manager.save_future = done()
    with pytest.raises(RuntimeError, match="async_mode is disabled"):
        manager.maybe_wait_for_saving()
    manager.save_future = None
    manager.staging_future = done()
    with pytest.raises(RuntimeError, match="only async_with_pinned_mem"):
        manager.maybe_wait_for_staging()
    manager.close()


class TestPinnedMemory:
    """The mode whose copy overlaps training as well."""

    @pytest.fixture
    def manager(self, calls: Calls, tmp_path: Path) -> Iterator[CheckpointManager]:
        with patch.object(dcp, "DefaultStager") as self.stager:
            built = build(tmp_path, async_mode="async_with_pinned_mem")
            yield built
            built.close()

    def test_one_stager_with_all_switches_on_serves_every_save(
        self, calls: Calls, manager: CheckpointManager
    ) -> None:
        calls.results = [AsyncSaveResponse(done(), done()) for _ in range(2)]
        assert manager.stager is None
        manager.save(1)
        manager.save(2)
        self.stager.assert_called_once()
        (options,) = self.stager.call_args.args
        assert options.use_pinned_memory and options.use_shared_memory
        assert options.use_async_staging and options.use_non_blocking_copy
        for call in calls.asynchronous:
            assert call["async_stager"] is self.stager.return_value
            assert call["async_checkpointer_type"] is AsyncCheckpointerType.PROCESS
            assert call["process_group"] == "own group"
        manager.close()
        self.stager.return_value.close.assert_called_once_with()

    def test_both_futures_live_until_they_are_awaited(
        self, calls: Calls, manager: CheckpointManager
    ) -> None:
        staging, saving = MagicMock(), MagicMock()
        calls.results = [AsyncSaveResponse(staging, saving)]
        manager.save(1)
        assert manager.staging_future is staging and manager.save_future is saving
        manager.maybe_wait_for_staging()
        manager.maybe_wait_for_staging()
        staging.result.assert_called_once_with()
        assert manager.staging_future is None and manager.save_future is saving
        manager.maybe_wait_for_saving()
        saving.result.assert_called_once_with()
        assert manager.save_future is None
