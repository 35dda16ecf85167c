"""A save that does not fit is refused before it begins, and what failed ones have left goes first.

What the disk tells is injected; tests/ranks/test_full_disk.py fills real ones.
"""

import errno
import queue
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.checkpointer import housekeeping, purging, room_check
from torchtitan.components.checkpointer.errors import CheckpointSaveError
from torchtitan.components.checkpointer.retention import purge_thread
from torchtitan.components.checkpointer.state import MODEL, ModelWrapper
from torchtitan.components.checkpointer.tc.storage import BackendCheckpointStorage
from torchtitan.tools import filesystem

from tests.ranks.steering import AFTER_DATA, await_end_of_save, disk_full, Steering
from tests.unit_tests.components.checkpointer.fakes import BareManager, folder_of, MemoryStorage
from tests.unit_tests.components.checkpointer.runs import build_run, message_of, names, Run
from tests.unit_tests.components.checkpointer.ways import DISABLED, over, TC, TC_WAITING, Way

MIB = 2**20


class Disk(MemoryStorage):
    """Has room for ``free`` bytes; what is deleted gives a MiB back."""

    def __init__(self, *directories: str, free: int = 0) -> None:
        super().__init__(*directories)
        self.free = free
        self.before_removal: Callable[[], Any] = bool

    def free_bytes(self, path: str) -> int:
        return self.free

    def remove(self, path: str) -> None:
        self.before_removal()
        super().remove(path)
        self.free += MIB


def disk_of(*names: str, free: int) -> Disk:
    disk = Disk(free=free)
    disk.entries = folder_of(*names).entries
    return disk


def manager_of(storage: MemoryStorage, *, keep: int = 0, **attributes: Any) -> BareManager:
    """One whose model takes 2 MiB."""
    return BareManager(
        keep_latest_k=keep,
        folder="/run",
        purge_queue=queue.Queue(),
        purge_thread=None,
        states={MODEL: ModelWrapper(nn.Linear(2**19, 1, bias=False))},
        _storage=storage,
        _loaded_step=0,
        _history_settled=True,
        **attributes,
    )


def refused(manager: BareManager, step: int = 40, *, with_retention: bool = True) -> str:
    with patch.object(dist, "get_rank", return_value=0):
        return message_of(
            lambda: manager._make_ready(f"/run/step-{step}", None, with_retention=with_retention)
        )


NOTHING = "nothing was raised"


def test_a_save_that_does_not_fit_is_refused_with_all_numbers() -> None:
    text = refused(manager_of(disk_of(free=MIB)))
    assert text.startswith("Saving the checkpoint of step 40 to /run/step-40 was not begun: ")
    assert "it takes 2.0 MiB, and the disk of /run has 1.0 MiB free, 1.0 MiB too few" in text
    assert refused(manager_of(disk_of(free=3 * MIB))) == NOTHING


def test_a_refusal_names_what_could_go_of_what_is_there() -> None:
    disk = disk_of("step-0", "step-5", "step-10", "step-20", "step-30", free=MIB)
    disk.add("/run/step-5/PIN", b"")
    for name in ("step-5", "step-10", "step-20", "superseded/step-50"):
        disk.add(f"/run/{name}/data", bytes(MIB))
    text = refused(manager_of(disk, keep_every=20))
    assert "--checkpoint.keep_latest_k 2 would free 1.0 MiB (step-10)" in text
    assert "/run/superseded holds 1.0 MiB" in text
    assert "--checkpoint.keep_every keeps 1.0 MiB (step-20)" in text
    assert "a file PIN keeps 1.0 MiB (step-5)" in text
    # The newest stays whatever happens, and the seed too.
    assert "step-30" not in text and "step-0" not in text


def test_a_last_save_of_weights_needs_room_for_them_alone_in_their_type() -> None:
    attributes = {"last_save_model_only": True, "export_dtype": torch.bfloat16}
    last = manager_of(disk_of(free=3 * MIB // 2), **attributes)
    assert refused(last, with_retention=False) == NOTHING
    assert "it takes 2.0 MiB" in refused(last)


@contextmanager
def deleting(manager: BareManager, disk: Disk) -> Generator[threading.Event]:
    """A thread that deletes as soon as the event is set."""
    may_delete = threading.Event()
    disk.before_removal = lambda: may_delete.wait(60)
    arguments = (manager.purge_queue, disk.remove)
    manager.purge_thread = threading.Thread(target=purge_thread, args=arguments, daemon=True)
    manager.purge_thread.start()
    yield may_delete
    may_delete.set()
    manager.purge_queue.put(None)
    manager.purge_thread.join()


def test_what_is_queued_for_deletion_is_waited_for() -> None:
    disk = disk_of("step-10", "step-20", "step-30", free=MIB)
    manager = manager_of(disk, keep=2)
    with deleting(manager, disk) as may_delete, patch.object(room_check, "logger") as logger:
        logger.info.side_effect = lambda text: may_delete.set()  # it says that it waits
        assert refused(manager) == NOTHING
    assert not disk.isdir("/run/step-10") and not disk.isdir("/run/step-20")


@pytest.mark.parametrize("free", [MIB, 3 * MIB])
def test_the_last_save_deletes_what_has_expired_only_where_it_needs_the_room(free: int) -> None:
    disk = disk_of("step-10", "step-20", "step-30", free=free)
    manager = manager_of(disk, keep=2)
    with deleting(manager, disk) as may_delete:
        may_delete.set()
        assert refused(manager, with_retention=False) == NOTHING
    left = {"step-30"} if free < 2 * MIB else {"step-10", "step-20", "step-30"}
    assert set(disk.listdir("/run")) == left


def test_a_deletion_that_is_over_a_moment_too_late_to_be_waited_for_counts() -> None:
    disk = disk_of("step-10", "step-20", "step-30", free=MIB)
    manager = manager_of(disk, keep=2)
    with deleting(manager, disk) as may_delete:
        free_bytes = disk.free_bytes

        def ask(path: str) -> int:
            found = free_bytes(path)
            may_delete.set()
            manager.purge_queue.join()
            return found

        with patch.object(disk, "free_bytes", ask):
            assert refused(manager) == NOTHING


def test_a_deletion_that_takes_too_long_is_not_waited_for_to_its_end() -> None:
    disk = disk_of("step-10", "step-20", "step-30", free=MIB)
    manager = manager_of(disk, keep=2, timeout_seconds=0.02)
    with deleting(manager, disk):
        assert "was not begun" in refused(manager)


class LateDisk(Disk):
    """Tells of the room that a deletion gave when it is asked for the third time after that."""

    def remove(self, path: str) -> None:
        super().remove(path)
        self.free -= MIB
        self.num_asked = 0

    def free_bytes(self, path: str) -> int:
        self.num_asked = getattr(self, "num_asked", 0) + 1
        return self.free + 2 * MIB * (self.num_asked > 2)


@pytest.mark.parametrize("is_in_time", [True, False])
def test_a_disk_that_frees_late_is_asked_again_for_a_while_after_a_deletion(
    is_in_time: bool,
) -> None:
    disk = LateDisk(free=MIB)
    disk.entries = folder_of("step-10", "step-20").entries
    manager = manager_of(disk, keep=2)
    manager._start_purging()
    with (
        patch.object(room_check, "_PAUSE_SECONDS", 0),
        patch.object(room_check, "_LATE_SECONDS", 30 if is_in_time else 0),
    ):
        assert (refused(manager) == NOTHING) is is_in_time
    manager._end_purging()


def test_where_nothing_was_deleted_nothing_is_waited_for() -> None:
    with patch.object(room_check.time, "sleep") as slept:
        assert "was not begun" in refused(manager_of(disk_of("step-10", free=MIB), keep=2))
    slept.assert_not_called()


def test_a_storage_that_does_not_tell_how_much_is_free_is_tried() -> None:
    assert refused(manager_of(folder_of("step-10"))) == NOTHING
    disk = disk_of("step-10", free=0)
    with patch.object(disk, "free_bytes", return_value=None):
        assert refused(manager_of(disk)) == NOTHING
    with patch.object(disk, "free_bytes", side_effect=OSError(errno.ESTALE, "Stale file handle")):
        assert refused(manager_of(disk)) == NOTHING


def test_a_storage_of_another_program_is_not_taken_for_a_disk_of_this_machine(
    tmp_path: Path,
) -> None:
    class Elsewhere:
        pass

    other: Any = Elsewhere()
    assert BackendCheckpointStorage(other).free_bytes(str(tmp_path)) is None
    assert filesystem.room("memory://run") is None


def starved(run: Run) -> Any:
    """The disk has no byte left, as far as anybody is told."""
    return patch.object(run.manager._storage, "free_bytes", return_value=0)


@over(DISABLED, TC_WAITING)
@pytest.mark.usefixtures("one_rank")
def test_nothing_is_written_by_a_refused_save_and_the_next_one_with_room_is_made(
    tmp_path: Path, way: Way
) -> None:
    run = build_run(tmp_path, **way.settings)
    with starved(run):
        assert "step-1 was not begun" in message_of(run.train, 1)
    assert not any((tmp_path / "checkpoint").glob("*"))
    run.train(2)
    with starved(run):
        assert "step-3 was not begun" in message_of(run.train, 3)
    assert names(tmp_path) == ["step-2"]
    run.train(4)
    run.manager.close()
    assert names(tmp_path) == ["step-2", "step-4"]


@over(DISABLED, TC_WAITING)
@pytest.mark.usefixtures("one_rank")
def test_a_run_that_may_go_on_does_so_without_room_until_too_many_saves_were_refused(
    tmp_path: Path, way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    run = build_run(tmp_path, on_save_failure="warn", max_failed_saves=2, **way.settings)
    with starved(run):
        run.train(1)
    assert "step-1 was not begun" in caplog.text
    run.train(2)
    with starved(run):
        run.train(3)
        text = message_of(run.train, 4)
    assert "2 saves in a row" in text and text.count("was not begun") == 2
    run.manager.close()
    assert names(tmp_path) == ["step-2"]


def test_what_else_is_wrong_with_the_folder_does_not_hide_a_refusal() -> None:
    manager = manager_of(disk_of("step-10", free=MIB))
    with patch.object(manager, "_entries", side_effect=OSError(errno.EIO, "Input/output error")):
        assert "has 1.0 MiB free, 1.0 MiB too few. No other" in refused(manager)


@over(DISABLED, TC_WAITING, TC)
@pytest.mark.usefixtures("one_rank")
def test_what_a_failed_save_has_left_goes_before_room_is_asked_for_though_all_is_kept(
    tmp_path: Path, way: Way
) -> None:
    (tmp_path / "checkpoint/step-77").mkdir(parents=True)  # of another run: it stays, as all does
    steering = Steering(way)
    run = build_run(tmp_path, keep_latest_k=0, **steering.settings)
    run.train(1)
    run.manager.maybe_wait_for_saving()
    steering.set(AFTER_DATA, disk_full)
    first = message_of(run.train, 2)
    await_end_of_save(run.manager)
    steering.stop()
    if first == NOTHING:
        first = message_of(run.train, 3)
    assert f"The disk of {tmp_path}/checkpoint is full: " in first
    left: list[list[str]] = []

    def note(path: str) -> int:
        left.append(names(tmp_path))
        return 2**40

    with patch.object(run.manager._storage, "free_bytes", note):
        run.train(run.step + 1)
        run.manager.close()
    assert left == [["step-1", "step-77"]]
    assert names(tmp_path) == ["step-1", f"step-{run.step}", "step-77"]


def test_a_leftover_with_a_pin_stays() -> None:
    disk = disk_of("step-10", free=10 * MIB)
    disk.add("/run/step-20/PIN", b"")
    disk.add("/run/step-30/data", b"")
    manager = manager_of(disk, _begun=frozenset({"/run/step-20", "/run/step-30"}))
    assert refused(manager) == NOTHING
    assert sorted(disk.listdir("/run")) == ["step-10", "step-20"]


def test_a_leftover_that_cannot_be_deleted_is_tried_again_and_is_no_error() -> None:
    disk = disk_of("step-10", free=10 * MIB)
    disk.add("/run/step-30/data", b"")
    disk.undeletable.add("/run/step-30")
    manager = manager_of(disk, _begun=frozenset({"/run/step-30"}))
    with patch.object(purging, "logger") as logger:
        assert refused(manager) == NOTHING
    assert "/run/step-30" in logger.warning.call_args.args[0]
    disk.undeletable.clear()
    # Not at once: what was refused a moment ago will mostly be refused again.
    for step in (50, 60):
        assert disk.isdir("/run/step-30")
        assert refused(manager, step) == NOTHING
    assert not disk.isdir("/run/step-30")


def test_with_ample_room_the_tensors_are_counted_once() -> None:
    disk = disk_of(free=20 * MIB)
    manager = manager_of(disk)
    with patch.object(room_check, "state_bytes", side_effect=room_check.state_bytes) as counted:
        assert refused(manager) == refused(manager, 50) == NOTHING
        assert counted.call_count == 1
        disk.free = 7 * MIB
        assert refused(manager, 60) == NOTHING
        assert counted.call_count == 2
        disk.free = MIB
        assert "it takes 2.0 MiB" in refused(manager, 70)


def test_only_the_rank_that_sweeps_remembers_what_to_sweep() -> None:
    other = manager_of(folder_of("step-1"))
    with patch.object(housekeeping, "rank_zero_decides", return_value=[]):
        other._make_ready("/run/step-2", None, with_retention=True)
    assert not other._begun


def test_the_size_of_a_save_is_taken_from_the_newest_that_is_complete() -> None:
    disk = disk_of("step-9", "step-10", free=20 * MIB)
    manager = manager_of(disk, _begun=frozenset({"/run/step-9", "/run/step-10"}))
    with patch.object(manager, "_size_of_full", return_value=MIB) as measured:
        assert refused(manager) == NOTHING
    measured.assert_called_once_with("/run/step-10")


class Average:
    """State whose tensors only its state dict shows."""

    def state_dict(self) -> dict[str, Any]:
        return {"average": torch.zeros(MIB)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


@over(DISABLED, TC_WAITING)
@pytest.mark.usefixtures("one_rank")
def test_what_only_an_object_knows_is_counted_once_the_run_has_saved(
    tmp_path: Path, way: Way
) -> None:
    run = build_run(tmp_path, **way.settings)
    run.manager.states["average"] = Average()
    with patch.object(run.manager._storage, "free_bytes", return_value=2 * MIB):
        run.train(1)
        assert "it takes 4." in message_of(run.train, 2)
    run.manager.close()
    # Of an earlier run nobody knows whether it had the same state.
    other = build_run(tmp_path, **way.settings)
    other.manager.states["average"] = Average()
    other.manager.load()
    with patch.object(other.manager._storage, "free_bytes", return_value=2 * MIB):
        assert message_of(other.train, 2) == NOTHING
    other.manager.close()


def test_only_refusals_are_errors_of_a_save() -> None:
    with pytest.raises(CheckpointSaveError):
        manager_of(disk_of(free=0))._require_room("/run/step-1", is_last=False)
