"""Between the decision to delete and the deletion: what is wanted after all stays."""

import logging
import queue
import threading
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch.distributed
from torchtitan.components.checkpointer.deletions import Deletions, PIN
from torchtitan.components.checkpointer.retention import purge_thread

from tests.unit_tests.components.checkpointer.fakes import (
    BareManager,
    folder_of,
    MemoryStorage,
    wait_until,
)

STEPS = "/run/step-1", "/run/step-2", "/run/step-3"


class Held(MemoryStorage):
    """Stops in the middle of a deletion until it is let go."""

    def __init__(self, *directories: str) -> None:
        super().__init__(*directories)
        self.reached, self.let_go = threading.Event(), threading.Event()

    def remove(self, path: str) -> None:
        self.reached.set()
        assert self.let_go.wait(30)
        super().remove(path)


def held() -> Held:
    storage = Held("/run")
    for path in STEPS:
        storage.add(f"{path}/done", b"1")
    return storage


def begun(storage: MemoryStorage, *paths: str) -> tuple[Deletions, Callable[[], None]]:
    """Deletions of ``paths`` on a thread that has begun, and what waits for its end."""
    deletions, paths_to_go = Deletions(storage), queue.Queue[str | None]()
    for path in paths:
        deletions.add(path)
        paths_to_go.put(path)
    paths_to_go.put(None)
    thread = threading.Thread(target=purge_thread, args=(paths_to_go, deletions.delete))
    thread.start()

    def end() -> None:
        thread.join(30)
        assert not thread.is_alive()

    return deletions, end


def test_a_pin_that_comes_after_the_decision_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    storage = held()
    deletions, end = begun(storage, *STEPS)
    assert storage.reached.wait(30)
    storage.add(f"{STEPS[1]}/{PIN}", b"")
    with caplog.at_level(logging.INFO):
        storage.let_go.set()
        end()
    assert sorted(storage.listdir("/run")) == ["step-2"]
    assert f"Kept {STEPS[1]}: a file PIN was put there" in caplog.text
    assert deletions.waiting == frozenset()


def test_a_load_waits_for_the_deletion_that_has_begun_and_what_is_queued_stays() -> None:
    storage = held()
    deletions, end = begun(storage, *STEPS[:2])
    assert storage.reached.wait(30)
    seen = []

    def load() -> None:
        with deletions.none_begin(30):
            seen.append(sorted(storage.listdir("/run")))

    loading = threading.Thread(target=load)
    loading.start()
    wait_until(lambda: deletions.waiting == {STEPS[0]})
    assert seen == []
    storage.let_go.set()
    loading.join(30)
    end()
    assert seen == [["step-2", "step-3"]] and sorted(storage.listdir("/run")) == seen[0]
    assert deletions.waiting == frozenset()


def test_what_a_load_has_withdrawn_goes_when_it_is_queued_again() -> None:
    storage = folder_of("step-1", "step-2")
    deletions = Deletions(storage)
    deletions.add(STEPS[0])
    with deletions.none_begin(30):
        assert deletions.waiting == frozenset()
    deletions.add(STEPS[0])
    deletions.delete(STEPS[0])  # the turn that was withdrawn
    assert storage.isdir(STEPS[0]) and deletions.waiting == {STEPS[0]}
    deletions.delete(STEPS[0])
    assert storage.listdir("/run") == ["step-2"] and deletions.waiting == frozenset()


def test_a_load_does_not_wait_for_a_disk_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    storage = held()
    deletions, end = begun(storage, *STEPS[:2])
    assert storage.reached.wait(30)
    with caplog.at_level(logging.WARNING), deletions.none_begin(0.01):
        assert deletions.waiting == {STEPS[0]}, "only what has begun goes on"
    assert f"The deletion of {STEPS[0]} was not over after 0.01 s" in caplog.text
    storage.let_go.set()
    end()
    assert sorted(storage.listdir("/run")) == ["step-2", "step-3"]


def test_a_name_that_is_needed_is_taken_back_or_waited_for() -> None:
    storage = held()
    deletions, end = begun(storage, *STEPS[:2])
    assert storage.reached.wait(30)
    assert deletions.withdraw(STEPS[1], 30) and not deletions.withdraw(STEPS[2], 30)
    with pytest.raises(TimeoutError, match=f"deletion of {STEPS[0]} was not over after 0.01 s"):
        deletions.withdraw(STEPS[0], 0.01)
    storage.let_go.set()
    assert not deletions.withdraw(STEPS[0], 30)
    assert not storage.isdir(STEPS[0])
    end()
    assert storage.isdir(STEPS[1])


def manager_of(storage: MemoryStorage, keep: int = 2) -> BareManager:
    return BareManager(
        _storage=storage,
        folder="/run",
        keep_latest_k=keep,
        purge_queue=queue.Queue(),
        purge_thread=None,
        _loaded_step=0,
        _history_settled=True,
    )


def test_a_save_waits_for_all_deletions_together_half_as_long_as_the_other_ranks_wait() -> None:
    storage = folder_of("step-1")
    storage.add("/run/step-1/manifest.json", b"1")
    manager, limits = manager_of(storage), list[float]()
    manager.timeout_seconds = 100

    def withdraw(path: str, limit_seconds: float) -> bool:
        limits.append(limit_seconds)
        return False

    with patch.object(manager._deletions, "withdraw", withdraw):
        save(manager, storage, 1)
    assert len(limits) == 2 and 50 >= limits[0] > limits[1] > 0


def save(manager: BareManager, storage: MemoryStorage, step: int) -> list[str]:
    """What is tried to delete around a save of ``step``."""
    storage.calls.clear()
    with patch.object(torch.distributed, "get_rank", return_value=0):
        manager._make_ready(f"/run/step-{step}", None, with_retention=True)
    while not manager.purge_queue.empty():
        path = manager.purge_queue.get_nowait()
        assert path is not None
        manager.purge_queue.put(None)
        manager.purge_queue.queue.appendleft(path)
        purge_thread(manager.purge_queue, manager._deletions.delete)
    storage.add(f"/run/step-{step}/done", b"1")
    return [call[1] for call in storage.calls if call[0] == "remove"]


def test_what_cannot_be_deleted_is_tried_again_less_and_less_often_and_others_go() -> None:
    storage = folder_of("step-1", "step-2", "step-3")
    storage.undeletable.add("/run/step-1")
    manager = manager_of(storage)
    tried = [step for step in range(4, 24) if "/run/step-1" in save(manager, storage, step)]
    assert tried == [4, 6, 10, 18]
    assert sorted(storage.listdir("/run")) == ["step-1", "step-22", "step-23"]
    storage.undeletable.clear()
    for step in range(24, 36):
        save(manager, storage, step)
    assert sorted(storage.listdir("/run")) == ["step-34", "step-35"]


def test_where_all_is_kept_what_an_earlier_run_had_not_deleted_is_looked_for_until_it_is_gone() -> (
    None
):
    storage = folder_of("step-1", "step-2")
    storage.add("/run/step-2/manifest.deleted", b"1")
    storage.undeletable.add("/run/step-2")
    manager = manager_of(storage, keep=0)
    save(manager, storage, 3)
    storage.undeletable.clear()
    for step in (4, 5):
        assert storage.isdir("/run/step-2")
        save(manager, storage, step)
    assert not storage.isdir("/run/step-2")
    with patch.object(storage, "isfile", side_effect=storage.isfile) as asked:
        save(manager, storage, 6)
    assert not [call for call in asked.call_args_list if "step-1/" in call.args[0]]
