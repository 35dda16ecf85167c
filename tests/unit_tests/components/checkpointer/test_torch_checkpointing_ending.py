"""How a save through torch_checkpointing is waited for, how it fails, and how a manager ends."""

import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torchtitan.components.checkpointer import in_flight, waiting
from torchtitan.components.checkpointer.errors import (
    CheckpointSaveError,
    CheckpointSaveTimeoutError,
)
from torchtitan.components.checkpointer.pinned import means
from torchtitan.components.checkpointer.pinned.writer_process import WriterDiedError
from torchtitan.components.checkpointer.tc.library import Backend
from torchtitan.components.checkpointer.torch_checkpointing import TorchCheckpointingManager
from torchtitan.components.checkpointer.waiting import WaitExpiredError

from tests.unit_tests.components.checkpointer.runs import build_run, message_of, names, Run
from tests.unit_tests.components.checkpointer.tc.stand_ins import FullDisk, Vanishing, Writers

pytestmark = pytest.mark.usefixtures("one_rank")
FULL = OSError(28, "No space left on device")


def run_in(folder: Path, **settings: Any) -> Run:
    return build_run(folder, manager=TorchCheckpointingManager, **settings)


def test_an_error_is_raised_once_and_the_next_save_starts_clean(
    tmp_path: Path, writers: Writers
) -> None:
    run = run_in(tmp_path)
    writers.error = FULL
    run.train(1)
    text = message_of(run.manager.save, 2)
    assert text.startswith(
        f"Saving the checkpoint of step 1 to {tmp_path}/checkpoint/step-1 failed: {FULL!r}. "
    )
    assert run.manager.save_future is None
    writers.error = None
    run.train(4)
    run.manager.close()
    assert names(tmp_path) == ["step-2", "step-3", "step-4"]
    # The writers agreed on the failure, so they are all there still.
    assert len(writers.started) == 1


def test_a_failed_save_is_told_by_the_wait_for_it_and_not_again_by_the_end(
    tmp_path: Path, writers: Writers
) -> None:
    run = run_in(tmp_path)
    writers.error = FULL
    run.train(1)
    with pytest.raises(CheckpointSaveError, match="step 1 .*No space left"):
        run.manager.maybe_wait_for_saving()
    assert run.manager.save_future is None
    run.manager.maybe_wait_for_saving()
    run.manager.close()


class Asked:
    """Answers like a future, and notes what the manager knew when it was asked."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.seen: list[Any] = []

    def result(self, timeout: float | None = None) -> None:
        self.seen.append(self.run.manager.save_future)

    def done(self) -> bool:
        return True

    def exception(self) -> None:
        return None


def test_the_future_is_cleared_before_it_is_awaited(tmp_path: Path, writers: Writers) -> None:
    run = run_in(tmp_path)
    future = run.manager.save_future = Asked(run)
    run.manager.maybe_wait_for_saving()
    assert future.seen == [None] and run.manager.save_future is None
    run.manager.close()


def test_a_wait_has_the_configured_limit_and_whoever_gave_up_does_not_wait_again(
    tmp_path: Path, writers: Writers
) -> None:
    run = run_in(tmp_path, timeout_seconds=7)
    run.train(1)
    run.manager.maybe_wait_for_saving()
    waits: list[float] = []

    def give_up(future: "Future[Any]", seconds: float) -> None:
        waits.append(seconds)
        raise WaitExpiredError("not done")

    hung: Future[Any] = Future()
    run.manager.save_future = hung
    with patch.object(in_flight, "result_within", give_up):
        with pytest.raises(CheckpointSaveTimeoutError, match="given up: .*timeout_seconds"):
            run.manager.maybe_wait_for_saving()
        # Staging and writing have the limit each, and say better what is late.
        assert waits == [24] and run.manager.save_future is hung
        with pytest.raises(CheckpointSaveTimeoutError):
            run.manager.save(2)
        run.manager.close()
    assert waits == [24, 10]
    assert names(tmp_path) == ["step-1"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_waits_for_the_save_and_the_deletions_and_frees_everything(
    tmp_path: Path, writers: Writers, fails: bool
) -> None:
    run = run_in(tmp_path, keep_latest_k=2)
    run.train(3)
    run.manager.maybe_wait_for_saving()
    writers.error = FULL if fails else None
    writers.hold()
    run.train(4)
    backend, stager = run.manager._manager, run.manager._stager
    assert writers.reached.wait(60)

    def let_go_and_wait(future: "Future[Any]", seconds: float) -> None:
        writers.let_go()
        future.result(60)

    with patch.object(in_flight, "result_within", let_go_and_wait):
        if fails:
            with pytest.raises(CheckpointSaveError, match="step 4 .*No space left"):
                run.manager.close()
        else:
            run.manager.close()
    assert backend._closed and not stager._is_open and not writers.started[0].is_usable
    assert not run.manager.purge_thread.is_alive() and run.manager.purge_queue.empty()
    assert names(tmp_path) == (["step-3"] if fails else ["step-3", "step-4"])
    run.manager.close()  # nothing is told twice


def test_the_wait_for_staging_goes_through_the_lock_of_the_backend(
    tmp_path: Path, writers: Writers
) -> None:
    run = run_in(tmp_path)
    seen: list[str] = []
    lock = Backend.lock

    @contextmanager
    def noted(backend: Backend) -> Generator[None]:
        seen.append("asked")
        with lock(backend):
            seen.append("has")
            yield
        seen.append("free")

    with patch.object(Backend, "lock", noted):
        run.manager.maybe_wait_for_staging()
        assert seen == []
        writers.hold()
        run.train(1)
        assert seen == []
        # The write holds it as a reader, as this does: only the copy excludes.
        run.manager.maybe_wait_for_staging()
        assert seen == ["asked", "has", "free"]
    assert run.manager._manager._saver.staging_lock.locked_mode() == "read"
    writers.let_go()
    run.manager.close()


def test_a_copy_that_hangs_is_given_up_with_the_flag_to_raise(
    tmp_path: Path, writers: Writers
) -> None:
    run = run_in(tmp_path, timeout_seconds=1)
    run.train(1, save=False)
    stager, may_copy = run.manager._stager, threading.Event()
    copy = stager._copy

    def hang(copies: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert may_copy.wait(60)
        copy(copies)

    with patch.object(stager, "_copy", hang), patch.object(waiting, "_has_given_up", False):
        run.manager.save(1)
        with pytest.raises(CheckpointSaveTimeoutError, match="--checkpoint.timeout_seconds"):
            run.manager.maybe_wait_for_staging()
        assert waiting._has_given_up
        may_copy.set()
        run.manager.maybe_wait_for_saving()
    run.manager.close()


def test_parameters_may_change_as_soon_as_they_are_copied_and_not_before(
    tmp_path: Path, writers: Writers
) -> None:
    run = run_in(tmp_path)
    run.train(1, save=False)
    copying, may_copy = threading.Event(), threading.Event()
    stager, asked_for = run.manager._stager, Backend.lock
    copy = stager._copy

    def slow(copies: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            copying.set()
            assert may_copy.wait(60)
        copy(copies)

    def let_copy(backend: Backend) -> Any:
        may_copy.set()
        return asked_for(backend)

    with patch.object(stager, "_copy", slow), patch.object(Backend, "lock", let_copy):
        run.manager.save(1)
        assert copying.wait(60)
        lock = run.manager._manager._saver.staging_lock
        assert lock.locked_mode() == "write"
        assert not lock.read.acquire(blocking=False)
        run.manager.maybe_wait_for_staging()
        assert may_copy.is_set() and lock.locked_mode() != "write"
    run.manager.close()


def test_a_full_disk_fails_a_save_that_training_waits_for_and_the_next_goes_on(
    tmp_path: Path,
) -> None:
    with patch.object(means, "no_shared_memory", return_value="the test says so"):
        run = run_in(tmp_path, keywords={"storage_config": FullDisk()})
    text = message_of(run.train, 1)
    assert "Saving the checkpoint of step 1" in text and "No space left" in text
    assert "never counts as a checkpoint" in text
    assert names(tmp_path) == ["tmp_step-1"]
    run.manager.close()


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "background"])
def test_a_checkpoint_that_is_not_there_in_the_end_is_no_success(
    tmp_path: Path, waits: bool
) -> None:
    reason = "the test says so" if waits else None
    with patch.object(means, "no_shared_memory", return_value=reason):
        run = run_in(tmp_path, keywords={"storage_config": Vanishing()})

    def save() -> None:
        run.train(1)
        run.manager.maybe_wait_for_saving()

    text = message_of(save)
    assert "Saving the checkpoint of step 1" in text and "was written and is not there" in text
    run.manager.close()


def test_a_last_save_is_made_although_the_one_before_has_failed_which_is_told(
    tmp_path: Path, writers: Writers
) -> None:
    run = run_in(tmp_path, last_save_model_only=False)
    writers.error = FULL
    run.train(1)
    assert run.manager.save_future.exception(60) is FULL
    writers.error = None
    run.progress.values["step"] = 2
    assert "step 1" in message_of(run.manager.save, 2, True)
    assert names(tmp_path) == ["step-2"]
    run.manager.close()


def test_a_save_that_cannot_begin_tells_what_the_one_before_has_failed_with(
    tmp_path: Path, writers: Writers
) -> None:
    run = run_in(tmp_path)
    writers.error = FULL
    run.train(1)
    run.manager.states["odd"] = {"entry": threading.Lock()}
    with pytest.raises(CheckpointSaveError, match="step 2 .*odd cannot be saved") as raised:
        run.manager.save(2)
    (note,) = raised.value.__notes__
    assert "Before that: Saving the checkpoint of step 1" in note and "No space left" in note
    del run.manager.states["odd"]
    run.manager.close()


def test_whatever_interrupts_the_end_the_writer_process_ends(
    tmp_path: Path, writers: Writers
) -> None:
    run = run_in(tmp_path)
    run.train(1)
    run.manager.maybe_wait_for_saving()
    with patch.object(run.manager, "_stop_purging", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            run.manager.close()
    assert run.manager._stager is None and not writers.started[0].is_usable
    run.manager.close()


def test_a_save_lost_with_its_writer_costs_that_save_and_not_the_run(
    tmp_path: Path, writers: Writers, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_in(tmp_path)
    writers.error = WriterDiedError("it was killed")
    run.train(1)
    with pytest.raises(WriterDiedError):
        run.manager.save_future.result(60)
    writers.started[0].is_usable = False
    writers.error = None
    run.train(3)
    run.manager.close()
    assert names(tmp_path) == ["step-2", "step-3"] and len(writers.started) == 2
    assert "Training goes on without that checkpoint" in caplog.text


def test_without_room_to_stage_training_waits_for_saves_from_then_on(
    tmp_path: Path, writers: Writers, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_in(tmp_path)
    with patch("torchtitan.components.checkpointer.pinned.memory.available_bytes", lambda: 0):
        run.train(1)
    assert run.manager.save_future is None and run.manager._stager is None
    run.train(2)
    run.manager.close()
    assert names(tmp_path) == ["step-1", "step-2"] and not writers.started
    assert caplog.text.count("From now on training waits for each save") == 1


def test_what_cannot_be_pickled_fails_before_a_save_has_begun(
    tmp_path: Path, writers: Writers
) -> None:
    run = run_in(tmp_path)
    run.manager.states["odd"] = {"lock": threading.Lock()}
    text = message_of(run.manager.save, 1)
    assert "Saving the checkpoint of step 1" in text and "odd" in text
    assert run.manager.save_future is None and not (tmp_path / "checkpoint").exists()
    del run.manager.states["odd"]
    run.train(1)
    run.manager.close()
    assert names(tmp_path) == ["step-1"]


def test_managers_that_are_closed_leave_no_thread(tmp_path: Path, writers: Writers) -> None:
    before = set(threading.enumerate())
    for seed in range(5):
        run = run_in(tmp_path / str(seed), keep_latest_k=2)
        run.train(2, last_step=2 if seed % 2 else None)
        run.manager.close()
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(10)
    assert not [thread.name for thread in left if thread.is_alive()]
