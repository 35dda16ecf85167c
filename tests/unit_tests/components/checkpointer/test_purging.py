"""What is deleted around a save, and what never is."""

import itertools
import queue
from unittest.mock import MagicMock, patch

import pytest
import torch.distributed
from torchtitan.components.checkpointer.discovery import Kind
from torchtitan.tools.logging import logger

from tests.unit_tests.components.checkpointer.fakes import BareManager, folder_of, MemoryStorage


def bare(storage: MemoryStorage, keep: int = 2) -> BareManager:
    return BareManager(
        keep_latest_k=keep,
        folder="/run",
        purge_queue=queue.Queue(),
        purge_thread=None,
        _storage=storage,
    )


def queued(manager: BareManager) -> list[str | None]:
    return [manager.purge_queue.get_nowait() for _ in range(manager.purge_queue.qsize())]


def on_rank(rank: int) -> "patch":  # pyrefly: ignore[not-a-type]  (what patch returns is private)
    return patch.object(torch.distributed, "get_rank", return_value=rank)


def test_without_retention_neither_the_rank_nor_the_disk_is_asked() -> None:
    storage = MagicMock()
    manager = BareManager(keep_latest_k=0, folder="/run", _storage=storage)
    with on_rank(0) as get_rank:
        assert not manager._should_purge()
    get_rank.assert_not_called()
    storage.isdir.assert_not_called()


def test_other_ranks_do_not_look_at_the_disk() -> None:
    storage = MagicMock()
    manager = BareManager(keep_latest_k=2, folder="/run", _storage=storage)
    with on_rank(1):
        assert not manager._should_purge()
    storage.isdir.assert_not_called()


@pytest.mark.parametrize("exists", [True, False])
def test_rank_0_asks_once_whether_the_folder_exists(exists: bool) -> None:
    storage = MagicMock()
    manager = BareManager(keep_latest_k=2, folder="/run", _storage=storage)
    storage.isdir.return_value = exists
    with on_rank(0):
        assert manager._should_purge() is exists
    storage.isdir.assert_called_once_with("/run")


@pytest.mark.parametrize("in_flight", ["step-30", "staging-30"])
def test_a_save_in_flight_has_one_place_and_however_many_died_k_minus_one_stay(
    in_flight: str,
) -> None:
    storage = folder_of("step-2", "step-10", "staging-20", "step-7.bak", "step-25")
    del storage.entries["/run/step-25/done"]  # it died, or is it the one in flight?
    storage.add(f"/run/{in_flight}")
    manager = bare(storage)
    with on_rank(0):
        manager._purge_stale_checkpoints()
    assert queued(manager) == ["/run/step-2"]
    assert storage.calls == []


def test_called_by_itself_it_keeps_the_newest_k() -> None:
    storage = folder_of("step-2", "step-10", "step-9", "step-30")
    storage.add("/run/step-20")  # older than the newest, so it is not in flight
    manager = bare(storage)
    with on_rank(0):
        manager._purge_stale_checkpoints()
    assert queued(manager) == ["/run/step-2", "/run/step-9"]
    assert storage.calls == []


def test_with_nothing_in_flight_the_next_save_gets_a_slot_and_the_dead_go_at_once() -> None:
    storage = folder_of("step-2", "step-9", "step-10", "staging-20", "step-07", "keep me")
    storage.add("/run/step-30")
    storage.add("/run/step-40", b"a file")
    manager = bare(storage)
    with on_rank(0):
        manager._purge_stale_checkpoints(is_save_in_flight=False)
    assert queued(manager) == ["/run/step-2", "/run/step-9"]
    assert storage.calls == [("remove", "/run/staging-20"), ("remove", "/run/step-30")]


@pytest.mark.parametrize("in_flight", [True, False])
def test_fewer_checkpoints_than_allowed_all_stay(in_flight: bool) -> None:
    manager = bare(folder_of("step-1"), keep=3)
    with on_rank(0):
        manager._purge_stale_checkpoints(is_save_in_flight=in_flight)
    assert queued(manager) == []


def test_what_cannot_be_deleted_is_a_warning_and_the_others_still_go() -> None:
    storage = folder_of("step-1", "step-2", complete=False)
    storage.undeletable.add("/run/step-1")
    manager = bare(storage)
    with on_rank(0), patch.object(logger, "warning") as warning:
        manager._purge_stale_checkpoints(is_save_in_flight=False)
    assert storage.listdir("/run") == ["step-1"]
    assert "/run/step-1" in warning.call_args.args[0]


def ready(storage: MemoryStorage, *, loaded: int | None, keep: int = 2) -> BareManager:
    manager = bare(storage, keep)
    manager._loaded_step, manager._history_settled = loaded, False
    return manager


def make_ready(manager: BareManager, step: int) -> list[str]:
    with on_rank(0), patch.object(logger, "warning") as warning:
        manager._make_ready(f"/run/step-{step}", None, with_retention=True)
    return [call.args[0] for call in warning.call_args_list]


def test_the_other_history_leaves_before_retention_counts() -> None:
    storage = folder_of("step-10", "step-20", "step-30")
    manager = ready(storage, loaded=10)
    make_ready(manager, 15)
    assert queued(manager) == []
    assert sorted(storage.listdir("/run")) == ["step-10", "superseded"]
    assert sorted(storage.listdir("/run/superseded")) == ["step-20", "step-30"]


def test_a_complete_checkpoint_of_the_same_step_is_kept_aside() -> None:
    storage = folder_of("step-10")
    manager = ready(storage, loaded=None)
    (warning,) = make_ready(manager, 10)
    assert storage.isfile("/run/superseded/step-10/done") and not storage.isdir("/run/step-10")
    assert "/run/superseded/step-10" in warning and "None" not in warning


@pytest.mark.parametrize("keep", [0, 2])
def test_what_is_left_of_an_attempt_at_the_same_step_is_cleared(keep: int) -> None:
    storage = folder_of("step-10", complete=False)
    manager = ready(storage, loaded=0, keep=keep)
    assert make_ready(manager, 10) == []
    assert storage.listdir("/run") == []


def test_histories_are_settled_once_and_again_only_after_another_load() -> None:
    storage = folder_of("step-10", "step-20")
    manager = ready(storage, loaded=20)
    make_ready(manager, 30)
    storage.add("/run/step-30/done", b"1")
    make_ready(manager, 40)
    assert sorted(storage.listdir("/run")) == ["step-10", "step-20", "step-30"]


def test_a_history_that_could_not_move_is_tried_again() -> None:
    storage = folder_of("step-10", "step-20")
    storage.undeletable.add("/run/step-20")
    manager = ready(storage, loaded=10)
    with pytest.raises(PermissionError):
        make_ready(manager, 15)
    storage.undeletable.clear()
    make_ready(manager, 15)
    assert storage.isdir("/run/superseded/step-20")


def test_a_seed_takes_no_slot_and_never_expires() -> None:
    storage = folder_of("step-0", "step-10", "step-20", "step-30")
    manager = bare(storage, keep=3)
    with on_rank(0):
        manager._purge_stale_checkpoints(is_save_in_flight=False)
    assert queued(manager) == ["/run/step-10"]
    assert storage.isdir("/run/step-0")


def test_what_is_being_deleted_is_neither_counted_nor_taken_for_a_save_that_died() -> None:
    storage = folder_of("step-10", "step-20", "step-30")
    manager = bare(storage, keep=2)
    with on_rank(0):
        manager._purge_stale_checkpoints(is_save_in_flight=False)
        assert queued(manager) == ["/run/step-10", "/run/step-20"]
        # The thread has begun: the marker is gone, the directory is still there.
        storage.entries["/run/step-10"] = None
        for path in [path for path in storage.entries if path.startswith("/run/step-10/")]:
            del storage.entries[path]
        manager._purge_stale_checkpoints(is_save_in_flight=False)
    assert queued(manager) == [] and storage.calls == []


def of_another(storage: MemoryStorage, *steps: int) -> None:
    """Complete checkpoints of another back end, which this manager's own marker is not in."""
    for step, marker in zip(steps, itertools.cycle([".metadata", "metadata.pkl"]), strict=False):
        storage.add(f"/run/step-{step}/{marker}", b"1")


def test_complete_ones_of_another_back_end_expire_in_their_turn_and_are_never_leftovers() -> None:
    storage = folder_of("step-20")
    of_another(storage, 10, 30, 40)
    storage.add("/run/step-50")
    manager = bare(storage, keep=3)
    with on_rank(0):
        manager._purge_stale_checkpoints(is_save_in_flight=False)
    assert queued(manager) == ["/run/step-10", "/run/step-20"]
    assert storage.calls == [("remove", "/run/step-50")]


def test_a_seed_of_another_back_end_takes_no_slot_and_never_expires() -> None:
    storage = folder_of("step-10", "step-20")
    of_another(storage, 0)
    manager = bare(storage, keep=2)
    with on_rank(0):
        manager._purge_stale_checkpoints(is_save_in_flight=False)
    assert queued(manager) == ["/run/step-10"]


@pytest.mark.parametrize("keep", [0, 2])
def test_a_save_of_the_same_step_moves_that_of_another_back_end_aside(keep: int) -> None:
    storage = MemoryStorage("/run")
    of_another(storage, 10)
    manager = ready(storage, loaded=None, keep=keep)
    (warning,) = make_ready(manager, 10)
    assert storage.isfile("/run/superseded/step-10/.metadata") and not storage.isdir("/run/step-10")
    assert "/run/superseded/step-10" in warning


def test_newer_ones_of_another_back_end_leave_with_the_history_that_is_left() -> None:
    storage = folder_of("step-10", "step-20")
    of_another(storage, 5, 15, 30)
    manager = ready(storage, loaded=10, keep=0)
    assert len(make_ready(manager, 12)) == 3
    assert sorted(storage.listdir("/run")) == ["step-10", "step-5", "superseded"]
    assert sorted(storage.listdir("/run/superseded")) == ["step-15", "step-20", "step-30"]


def test_staging_names_of_another_back_end_are_not_this_one_s_to_touch() -> None:
    storage = folder_of("step-10")
    storage.add("/run/tmp_step-20/metadata.pkl", b"1")
    manager = bare(storage, keep=2)
    with on_rank(0):
        manager._purge_stale_checkpoints(is_save_in_flight=False)
    make_ready(ready(storage, loaded=10), 20)
    assert sorted(storage.listdir("/run")) == ["step-10", "tmp_step-20"]
    assert storage.calls == []


def test_the_newest_step_to_load_is_one_that_this_back_end_can_read() -> None:
    storage = folder_of("step-10")
    of_another(storage, 20)
    manager = bare(storage)
    assert manager._find_load_step() == 10
    assert manager._find_load_step("/elsewhere") == -1
    storage.add("/elsewhere/step-30/done", b"1")
    assert manager._find_load_step("/elsewhere") == 30


def saved(storage: MemoryStorage, path: str) -> None:
    """A complete checkpoint with its commit record."""
    for name in ("done", "manifest.json"):
        storage.add(f"{path}/{name}", b"1")


@pytest.mark.parametrize("loaded", [None, 10])
def test_a_step_of_the_own_history_waits_while_it_is_saved_again_and_another_one_stays_for_good(
    loaded: int | None,
) -> None:
    storage = MemoryStorage("/run")
    saved(storage, "/run/step-10")
    manager = ready(storage, loaded=loaded, keep=0)
    warnings = make_ready(manager, 10)
    where = "superseded" if loaded is None else "replaced"
    assert storage.listdir("/run") == [where] and len(warnings) == (loaded is None)
    # What this run itself has saved is of its history, whatever it has loaded.
    saved(storage, "/run/step-10")
    make_ready(manager, 10)
    assert "replaced" in storage.listdir("/run")


def test_what_another_program_saved_is_kept_when_its_step_is_saved_again() -> None:
    storage = folder_of("step-10")
    manager = ready(storage, loaded=10)
    make_ready(manager, 10)
    assert storage.isdir(
        "/run/replaced/step-10"
    ), "until the new one is complete it is all there is"
    saved(storage, "/run/step-10")
    make_ready(manager, 20)
    assert storage.listdir("/run/superseded") == ["step-10"]


def test_all_of_a_step_leaves_with_its_history_what_waits_and_what_was_not_committed() -> None:
    storage = folder_of("step-5", "step-10")
    saved(storage, "/run/replaced/step-10")
    make_ready(ready(storage, loaded=5), 7)
    assert sorted(storage.listdir("/run/superseded")) == ["step-10", "step-10.2"]
    assert not storage.isdir("/run/step-10")


def test_what_has_been_replaced_is_queued_for_deletion_once_and_its_folder_goes_in_the_end() -> (
    None
):
    storage = MemoryStorage("/run")
    for path in ("/run/step-10", "/run/replaced/step-10"):
        saved(storage, path)
    manager = ready(storage, loaded=10)
    manager.purge_thread = MagicMock()
    for step in (20, 30):
        make_ready(manager, step)
    assert queued(manager) == ["/run/replaced/step-10"] and storage.calls == []
    storage.remove("/run/replaced/step-10")
    storage.add("/run/replaced")
    make_ready(manager, 40)
    assert storage.listdir("/run") == ["step-10"]


def test_what_has_been_replaced_and_cannot_be_deleted_is_a_warning() -> None:
    storage = MemoryStorage("/run")
    for path in ("/run/step-10", "/run/replaced/step-10"):
        saved(storage, path)
    storage.undeletable.add("/run/replaced/step-10")
    manager = ready(storage, loaded=10, keep=0)
    (warning,) = make_ready(manager, 10)
    assert "Could not delete /run/replaced/step-10, whose step was saved again" in warning
    # Nothing is moved onto it.
    assert storage.isfile("/run/superseded/step-10/done")


def test_a_disk_that_a_save_was_given_up_on_is_not_asked_at_the_end() -> None:
    storage = MagicMock()
    manager = bare(storage)
    manager._has_replaced = manager._gave_up = True
    manager._stop_purging()
    assert storage.mock_calls == []
    manager._has_replaced, manager._gave_up = True, False
    manager._stop_purging()
    assert storage.isdir.called


def test_what_cannot_be_cleared_away_is_moved_and_nothing_is_written_into_it() -> None:
    class Stubborn(MemoryStorage):
        def remove(self, path: str) -> None:
            raise PermissionError(f"{path} is protected")

    storage = Stubborn("/run/step-10")
    storage.add("/run/step-10/manifest.deleted", b"1")
    warnings = make_ready(ready(storage, loaded=0), 10)
    assert storage.listdir("/run") == ["superseded"]
    assert storage.isfile("/run/superseded/step-10/manifest.deleted")
    assert "Could not delete /run/step-10" in warnings[0]


def test_what_is_half_deleted_neither_counts_nor_is_loaded_and_is_queued_again() -> None:
    storage = folder_of("step-10", "step-20", "step-30")
    storage.add("/run/step-30/manifest.deleted", b"1")
    manager = bare(storage, keep=3)
    assert manager._find_load_step() == 20
    with on_rank(0):
        manager._purge_stale_checkpoints(is_save_in_flight=False)
        manager._purge_stale_checkpoints()
    assert queued(manager) == ["/run/step-30"]


def test_what_a_checkpoint_holds_is_looked_at_where_it_matters_once_and_anew_when_it_was_saved() -> (
    None
):
    storage = folder_of("step-1", "step-2", "step-3", "step-4")
    looked: list[str] = []

    class Looking(BareManager):
        def _kind_of(self, checkpoint_id: str) -> Kind:
            looked.append(checkpoint_id)
            if checkpoint_id.endswith("4"):
                raise OSError("not now")  # nothing is learned, so it counts as full
            return Kind.MODEL_ONLY if checkpoint_id.endswith("1") else Kind.FULL

    manager = Looking(**vars(bare(storage, keep=5)))
    with on_rank(0):
        manager._purge_stale_checkpoints(is_save_in_flight=False)
        assert looked == []
        manager.keep_latest_k = 2
        for _ in range(2):
            manager._purge_stale_checkpoints(is_save_in_flight=False)
    assert sorted(looked) == [f"/run/step-{n}" for n in (1, 2, 3, 4, 4)]
    assert queued(manager) == ["/run/step-2", "/run/step-3"], "the weights are the only ones"
    looked.clear()
    manager._loaded_step, manager._history_settled = 0, True
    make_ready(manager, 1)
    storage.add("/run/step-1/done", b"1")
    storage.add("/run/step-5/done", b"1")
    with on_rank(0):
        manager._purge_stale_checkpoints(is_save_in_flight=False)
    assert "/run/step-1" in looked
