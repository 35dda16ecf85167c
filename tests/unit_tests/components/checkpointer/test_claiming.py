"""A run claims its folder before it loads from it or saves into it, and gives it back when it is done."""

import os
import queue
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torchtitan.components.checkpointer import claiming
from torchtitan.components.checkpointer.errors import CheckpointInUseError
from torchtitan.components.checkpointer.integrity.manifest import RunDescription
from torchtitan.components.checkpointer.run_lock import hold, RUN_LOCK
from torchtitan.components.checkpointer.storage import FilesystemStorage

from tests.unit_tests.components.checkpointer.fakes import BareManager, MemoryStorage
from tests.unit_tests.components.checkpointer.locks import elsewhere, ended, leave, living
from tests.unit_tests.components.checkpointer.runs import build_run, Run
from tests.unit_tests.components.checkpointer.ways import DISABLED, over, TC_WAITING, Way

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


def lock_of(folder: Path) -> Path:
    return folder / "checkpoint" / RUN_LOCK


@BOTH
def test_a_folder_is_claimed_with_the_first_save_until_the_run_is_closed(
    tmp_path: Path, way: Way, built: list[Run]
) -> None:
    run = start(tmp_path, way, built, interval=2)
    run.manager.load()
    run.train(1)
    # A run that never saves leaves no folder.
    assert not (tmp_path / "checkpoint").exists()
    run.train(2)
    assert lock_of(tmp_path).exists()
    run.manager.close()
    run.manager.close()
    assert os.listdir(tmp_path / "checkpoint") == ["step-2"]


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
    manager._claim_folder(to_save=True)
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
        manager._claim_folder(to_save=True)
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
