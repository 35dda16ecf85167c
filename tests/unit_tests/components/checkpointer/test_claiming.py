"""A run claims its folder before it loads from it or saves into it, and gives it back when it is done."""

import errno
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

import pytest
from torchtitan.components.checkpointer import claiming, run_lock
from torchtitan.components.checkpointer.errors import (
    CheckpointError,
    CheckpointInUseError,
    CheckpointSaveError,
)
from torchtitan.components.checkpointer.in_flight import told_as_save_error
from torchtitan.components.checkpointer.integrity.manifest import RunDescription
from torchtitan.components.checkpointer.lock_file import LocalLockFile
from torchtitan.components.checkpointer.run_lock import hold, RUN_LOCK
from torchtitan.components.checkpointer.storage import FilesystemStorage
from torchtitan.tools import disk
from torchtitan.tools.disk import Disk

from tests.unit_tests.components.checkpointer.fakes import BareManager, MemoryStorage
from tests.unit_tests.components.checkpointer.locks import (
    elsewhere,
    ended,
    leave,
    living,
    stopped_clock,
)
from tests.unit_tests.components.checkpointer.runs import build_run, Run
from tests.unit_tests.components.checkpointer.ways import ASYNC, DISABLED, over, TC_WAITING, Way

pytestmark = pytest.mark.usefixtures("one_rank")
BOTH = over(DISABLED, TC_WAITING)


@pytest.fixture
def built() -> Iterator[list[Run]]:
    """Runs to close at the end."""
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.manager.close()


def start(folder: Path, way: Way, built: list[Run], **settings: Any) -> Run:
    """A run as the trainer makes it."""
    run = build_run(folder, **way.settings, **settings)
    run.manager.describe_run(RunDescription({}, {}))
    built.append(run)
    return run


@BOTH
def test_a_folder_that_is_there_is_claimed_before_it_is_loaded_from(
    tmp_path: Path, way: Way, built: list[Run]
) -> None:
    start(tmp_path, way, built).train(1)
    built[0].manager.close()
    with living() as other:
        leave(tmp_path / "checkpoint", other)
        run = start(tmp_path, way, built)
        with pytest.raises(CheckpointInUseError, match=f"process {other.pid} on host"):
            run.manager.load()
        assert run.step == 0
        # A run that was refused does not save beside the other one either.
        with pytest.raises(CheckpointInUseError):
            run.train(1)
        run.manager.close()
        assert sorted(os.listdir(tmp_path / "checkpoint")) == [RUN_LOCK, "step-1"]
    run = start(tmp_path, way, built)
    assert run.manager.load() and run.step == 1
    holder = run.manager._lock.holder
    assert holder.step == 1


@BOTH
def test_a_save_beside_a_run_that_has_taken_the_folder_over_is_refused(
    tmp_path: Path, way: Way, built: list[Run]
) -> None:
    run = start(tmp_path, way, built, on_save_failure="warn")
    run.train(1)
    leave(tmp_path / "checkpoint", elsewhere())
    with pytest.raises(CheckpointInUseError, match="belongs to another run now"):
        run.train(2)
    with pytest.raises(CheckpointInUseError, match="belongs to another run now"):
        run.train(3, last_step=3)
    run.manager.close()
    assert sorted(os.listdir(tmp_path / "checkpoint")) == [RUN_LOCK, "step-1"]


@BOTH
def test_who_writes_nothing_and_who_is_no_run_claims_nothing(
    tmp_path: Path, way: Way, built: list[Run]
) -> None:
    bare = build_run(tmp_path, **way.settings)
    built.append(bare)
    bare.train(1)
    assert os.listdir(tmp_path / "checkpoint") == ["step-1"]
    with living() as other:
        leave(tmp_path / "checkpoint", other)
        reader = start(tmp_path, way, built, load_only=True)
        assert reader.manager.load() and reader.step == 1


def claimed(folder: Path, **attributes: Any) -> BareManager:
    defaults = {
        "_storage": FilesystemStorage(),
        "folder": str(folder),
        "_run": RunDescription({}, {}),
        "purge_thread": None,
    }
    manager = BareManager(**{**defaults, **attributes})
    manager._claim_folder()
    return manager


def test_the_lock_of_a_dead_run_is_no_obstacle(tmp_path: Path) -> None:
    leave(tmp_path, ended())
    manager = claimed(tmp_path)
    assert manager._lock is not None
    manager._release_claim()
    assert os.listdir(tmp_path) == []


def test_a_disk_that_refuses_the_lock_is_a_warning_and_is_asked_again_before_each_save(
    tmp_path: Path,
) -> None:
    refusal = PermissionError(13, "Permission denied")
    with (
        patch.object(claiming, "hold", side_effect=refusal),
        patch.object(claiming, "logger") as logger,
    ):
        manager = claimed(tmp_path)
        manager._claim_folder()
        manager._require_claim()
    [warning] = logger.warning.call_args_list
    assert "could not be locked: [Errno 13] Permission denied" in warning.args[0]
    with living() as other:
        leave(tmp_path, other)
        with pytest.raises(CheckpointInUseError):
            manager._require_claim()
    manager._require_claim()
    assert manager._lock is not None
    manager._release_claim()


def test_a_storage_that_has_no_files_is_not_locked(tmp_path: Path) -> None:
    assert claimed(tmp_path, _storage=MemoryStorage())._lock is None
    assert os.listdir(tmp_path) == []


def test_what_may_still_write_or_delete_keeps_the_folder(tmp_path: Path) -> None:
    class Deleting:
        def is_alive(self) -> bool:
            return True

    for still in (
        {"_gave_up": True},
        {"purge_thread": Deleting()},
        {"save_future": Future()},
    ):
        manager = claimed(tmp_path, **still)
        manager._release_claim()
        assert (tmp_path / RUN_LOCK).exists(), still
        for name, value in {"_gave_up": False, "purge_thread": None, "save_future": None}.items():
            setattr(manager, name, value)
        manager._release_claim()
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("end", ["a save", "the end of the run"])
def test_what_was_to_be_deleted_is_left_to_the_run_that_has_taken_the_folder_over(
    tmp_path: Path, end: str
) -> None:
    manager = claimed(tmp_path, purge_queue=queue.Queue(), keep_latest_k=2, _loaded_step=None)
    expired, new = tmp_path / "step-1", str(tmp_path / "step-2")
    expired.mkdir()
    manager._delete_beside_training(str(expired))
    manager._has_replaced = True
    leave(tmp_path, elsewhere())
    if end == "a save":
        with pytest.raises(CheckpointInUseError):
            manager._make_ready(new, None, with_retention=True)
    else:
        manager._stop_purging()
    queued = manager.purge_queue.get_nowait()
    assert queued == str(expired)
    manager._deletions.delete(queued)
    assert expired.is_dir() and not manager._has_replaced
    manager._release_claim()


def test_several_managers_of_one_process_have_the_folder_together(tmp_path: Path) -> None:
    first, second = claimed(tmp_path), claimed(tmp_path)
    first._release_claim()
    second._require_claim()
    assert (tmp_path / RUN_LOCK).exists()
    second._release_claim()
    hold(str(tmp_path), timeout_seconds=300).release()


def test_what_the_disk_has_refused_is_tried_again_with_what_is_known_of_the_last_run(
    tmp_path: Path,
) -> None:
    leave(tmp_path, elsewhere())
    full = OSError(errno.ENOSPC, "No space left on device")
    with stopped_clock() as clock, patch.object(claiming, "logger") as logger:
        with patch.object(LocalLockFile, "take_over", side_effect=full):
            manager = claimed(tmp_path)
            waited = sum(clock.slept)
            manager._require_claim()
        manager._require_claim()
        assert sum(clock.slept) == waited == pytest.approx(300, abs=0.1)
    assert len(logger.warning.call_args_list) == 1
    assert manager._lock is not None
    manager._release_claim()
    assert os.listdir(tmp_path) == []


class HangingFile(LocalLockFile):
    """On a disk that does not answer once something is written into it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.hangs, self.answers = threading.Event(), threading.Event()

    def write(self, content: bytes) -> None:
        self.hangs.set()
        assert self.answers.wait(60)
        super().write(content)


def ends_in_time(action: Callable[[], Any]) -> bool:
    def act() -> None:
        with suppress(TimeoutError):
            action()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()


def test_a_disk_that_does_not_answer_is_not_waited_for_longer_than_the_limit(
    tmp_path: Path,
) -> None:
    file = HangingFile(str(tmp_path / RUN_LOCK))
    with patch.object(run_lock, "lock_file", return_value=file):
        manager = claimed(
            tmp_path,
            lock_timeout_seconds=0.05,
            timeout_seconds=0.4,
            purge_queue=queue.Queue(),
            _loaded_step=7,
        )
    lock = manager._lock
    assert lock is not None and file.hangs.wait(20)
    try:
        assert ends_in_time(manager._note_start)
        assert ends_in_time(manager._require_claim)
        manager._gave_up = True
        with patch.object(lock, "is_lost_by_now", side_effect=AssertionError("nobody looks")):
            manager._stop_purging()
        manager._gave_up = False
        assert ends_in_time(manager._stop_purging)
        assert ends_in_time(manager._release_claim)
    finally:
        file.answers.set()
    lock._thread.join(20)
    assert not lock._thread.is_alive() and os.listdir(tmp_path) == []


def test_a_manager_may_die_in_the_middle_of_whatever_else_is_done_with_locks(
    tmp_path: Path,
) -> None:
    manager, other = claimed(tmp_path / "a"), claimed(tmp_path / "b")
    assert manager._lock is not None
    manager._close = manager._stop_purging  # as a back end does

    def die() -> None:
        with run_lock._registry_lock:
            manager.__del__()

    assert ends_in_time(die)
    hold(str(tmp_path / "a"), timeout_seconds=300).release()
    # The folder stays if it was not gone yet when somebody else came.
    assert not (tmp_path / "a" / run_lock.RUN_LOCK).exists()
    other._release_claim()


def test_what_is_queued_is_not_deleted_once_the_folder_is_lost(tmp_path: Path) -> None:
    manager = claimed(tmp_path, purge_queue=queue.Queue(), _loaded_step=None)
    manager._require_claim()
    for name in ("step-1", "step-2"):
        (tmp_path / name).mkdir()
        manager._delete_beside_training(str(tmp_path / name))
    manager._deletions.delete(str(tmp_path / "step-1"))
    leave(tmp_path, elsewhere())
    # No save has begun since: the thread that deletes looks for itself.
    manager._deletions.delete(str(tmp_path / "step-2"))
    assert sorted(os.listdir(tmp_path)) == [RUN_LOCK, "step-2"]
    assert manager._deletions.waiting == frozenset()
    manager._release_claim()


def test_after_it_was_given_back_every_rank_claims_anew(tmp_path: Path) -> None:
    holding, other_rank = claimed(tmp_path), claimed(tmp_path)
    other_rank._lock, lock = None, other_rank._lock
    assert lock is not None
    lock.release()
    for manager in (holding, other_rank):
        assert not manager._may_claim
        manager._release_claim()
        assert manager._may_claim


def test_what_is_kept_for_a_save_that_still_writes_is_held_once(tmp_path: Path) -> None:
    manager = claimed(tmp_path, _gave_up=True)
    manager._release_claim()
    assert manager._may_claim
    manager._claim_folder()
    manager._gave_up = False
    manager._release_claim()
    assert os.listdir(tmp_path) == []


def test_a_save_that_is_refused_tells_of_the_failure_before_it() -> None:
    earlier = CheckpointSaveError("step 3 is lost")
    with pytest.raises(CheckpointInUseError) as caught:
        with told_as_save_error("Saving", 1, earlier):
            raise CheckpointInUseError("another run")
    assert caught.value.__notes__ == ["Before that: step 3 is lost"]


class Stolen(Disk):
    """Gives the folder ``root`` to a run elsewhere once a save has begun to write."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, path: str, **more: Any) -> BinaryIO:
        if path.endswith((".distcp", ".pt")):
            leave(self._root / "checkpoint", elsewhere())
        return super().create(path, **more)


@over(DISABLED, ASYNC, TC_WAITING)
def test_a_save_that_the_folder_was_lost_during_does_not_become_a_checkpoint(
    tmp_path: Path, way: Way, built: list[Run]
) -> None:
    run = start(tmp_path, way, built)

    def save() -> None:
        run.train(1)
        run.manager.maybe_wait_for_saving()

    with disk.using(Stolen(tmp_path)):
        with pytest.raises(CheckpointError, match="belongs to another run now"):
            save()
    assert way.complete(tmp_path) == []
