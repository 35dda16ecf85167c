"""Every wait has an end, which says what was waited for, how long and which flag changes that."""

import logging
import queue
import threading
import time
import traceback
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch.distributed.checkpoint as torch_dcp
from torchtitan.components.checkpointer import waiting
from torchtitan.components.checkpointer.errors import (
    CheckpointReadError,
    CheckpointSaveError,
    CheckpointSaveTimeoutError,
)
from torchtitan.components.checkpointer.in_flight import await_save, await_staging
from torchtitan.components.checkpointer.modes import AsyncMode
from torchtitan.components.checkpointer.retention import purge_thread
from torchtitan.components.checkpointer.save_report import SaveReport

from tests.ranks.pool import end_of_ranks
from tests.unit_tests.components.checkpointer.fakes import BareManager, MemoryStorage
from tests.unit_tests.components.checkpointer.test_dcp_dispatch import build, Calls, calls

__all__ = ["calls"]

LATE = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv")


@pytest.fixture(autouse=True)
def _given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_has_given_up", False)


def test_a_future_is_awaited_up_to_the_limit_and_what_only_looks_like_one_is_asked() -> None:
    future: Future[int] = Future()
    with pytest.raises(waiting.WaitExpiredError, match="0.01 s"):
        waiting.result_within(future, 0.01)
    future.set_result(4)
    assert waiting.result_within(future, 0) == 4
    fake = MagicMock()
    waiting.result_within(fake, 5)
    fake.result.assert_called_once_with()


def failed(causes: dict[int, BaseException]) -> torch_dcp.CheckpointException:
    stack = traceback.StackSummary()
    return torch_dcp.CheckpointException("", {rank: (e, stack) for rank, e in causes.items()})


def test_a_late_collective_is_told_from_a_disk_that_says_the_same() -> None:
    assert waiting.is_late(LATE)
    assert waiting.is_late(failed({1: LATE}))
    for other in (
        TimeoutError(110, "Connection timed out"),
        RuntimeError("bad"),
        ValueError("timeout"),
    ):
        assert not waiting.is_late(other)
        assert not waiting.is_late(failed({0: other}))


def test_only_late_errors_of_a_block_become_errors_of_the_checkpointer() -> None:
    with pytest.raises(CheckpointReadError, match="Looking was given up: rank 0 .* 3 s, the limit"):
        with waiting.within(3, "Looking"):
            raise LATE
    for error in (ValueError("timeout"), CheckpointSaveError("timed out"), RuntimeError("bad")):
        with pytest.raises(type(error)) as caught:
            with waiting.within(3, "Looking"):
                raise error
        assert caught.value is error


def test_a_save_that_hangs_is_given_up_and_no_other_one_begins(
    calls: Calls, tmp_path: Path
) -> None:
    manager = build(tmp_path, async_mode="async")
    manager.timeout_seconds = 0.01
    hung: Future[Any] = Future()
    calls.results = [hung, Future()]
    manager.save(1)
    for last_step in (False, True):
        with pytest.raises(CheckpointSaveTimeoutError) as caught:
            manager.save(2, last_step=last_step)
    text = str(caught.value)
    for part in (
        f"step 1 to {tmp_path}/checkpoint/step-1 was given up",
        "rank 0 has waited for",
        "--checkpoint.timeout_seconds",
    ):
        assert part in text
    assert len(calls.asynchronous) == 1 and calls.saved == []
    manager.timeout_seconds = 1000
    manager.close()  # It was raised already, and is not awaited again.
    assert manager.save_future is hung


def test_a_save_that_was_given_up_and_comes_after_all_lets_the_next_one_begin(
    calls: Calls, tmp_path: Path
) -> None:
    manager = build(tmp_path, async_mode="async")
    manager.timeout_seconds = 0.01
    slow: Future[Any] = Future()
    last: Future[Any] = Future()
    calls.results = [slow, last]
    manager.save(1)
    with pytest.raises(CheckpointSaveTimeoutError):
        manager.save(2)
    slow.set_result(None)
    assert manager.save(3) is True
    with pytest.raises(CheckpointSaveTimeoutError, match="step 3 to"):
        manager.close()
    last.set_result(None)


def report(tmp_path: Path) -> SaveReport:
    storage = MemoryStorage()
    return SaveReport(4, f"{tmp_path}/step-4", storage, background=True, is_speaker=True)


def test_a_copy_that_hangs_is_given_up(tmp_path: Path) -> None:
    pinned = AsyncMode.ASYNC_WITH_PINNED_MEM
    with pytest.raises(CheckpointSaveTimeoutError, match="step 4 to .*step-4 was given up"):
        await_staging(Future(), pinned, report(tmp_path), 0.01)


def test_the_wait_for_a_copy_is_one_of_training(tmp_path: Path) -> None:
    one = report(tmp_path)
    waits: list[str] = []

    @contextmanager
    def training_waits() -> Generator[None]:
        waits.append("begin")
        yield
        waits.append("end")

    copy: Future[Any] = Future()
    copy.set_result(None)
    with patch.object(one, "training_waits", training_waits):
        await_staging(copy, AsyncMode.ASYNC_WITH_PINNED_MEM, one, 1)
    assert waits == ["begin", "end"]


def test_a_save_is_due_before_it_waits_for_the_one_before_it(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = build(tmp_path, async_mode="async")
    waited_at: list[float] = []
    monkeypatch.setattr(
        manager, "_end_of_previous", lambda *arguments: waited_at.append(time.monotonic())
    )
    calls.results = [Future()]
    calls.results[0].set_result(None)
    manager.save(1)
    assert manager._report is not None and manager._report._due_at <= waited_at[0]


def test_a_late_collective_of_a_background_save_is_explained(tmp_path: Path) -> None:
    future: Future[Any] = Future()
    future.set_exception(LATE)
    with pytest.raises(CheckpointSaveTimeoutError, match="timeout_seconds"):
        await_save(future, AsyncMode.ASYNC, report(tmp_path), 1)
    with pytest.raises(CheckpointSaveError, match="timeout_seconds") as caught:
        await_save(future, AsyncMode.ASYNC_WITH_PINNED_MEM, report(tmp_path), 1)
    # Its writer process is replaced, and the next save may begin.
    assert not isinstance(caught.value, CheckpointSaveTimeoutError)


def test_a_deletion_that_hangs_does_not_keep_a_run_from_ending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    released = threading.Event()
    paths: queue.Queue[str | None] = queue.Queue()
    paths.put("/run/step-1")
    thread = threading.Thread(
        target=purge_thread, args=(paths, lambda path: released.wait()), daemon=True
    )
    thread.start()
    manager = BareManager(
        folder="/run", timeout_seconds=0.01, purge_queue=paths, purge_thread=thread
    )
    with caplog.at_level(logging.WARNING):
        manager._stop_purging()
    assert "expired checkpoints from /run was given up: rank 0" in caplog.text
    assert "--checkpoint.timeout_seconds" in caplog.text
    released.set()


def leave_while_a_thread_hangs(error: BaseException | None) -> None:
    threading.Thread(target=threading.Event().wait, daemon=False).start()
    waiting.leave_if_given_up()  # Nothing was given up yet, so this does nothing.
    with pytest.raises(waiting.WaitExpiredError):
        waiting.result_within(Future(), 0)
    try:
        if error is not None:
            raise error
    finally:
        waiting.leave_if_given_up()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "error,code", [(SystemExit(143), 143), (SystemExit(), 0), (ValueError("first"), 1), (None, 0)]
)
def test_a_program_ends_with_its_own_exit_code_although_a_thread_hangs(
    error: BaseException | None, code: int
) -> None:
    (end,) = end_of_ranks(1, leave_while_a_thread_hangs, error, init=False)
    assert end.exit_code == code, end.log
    assert ("ValueError: first" in end.log) == isinstance(error, ValueError)
