"""Whatever moment a process is killed at, there is something to resume from, and it is the right one.

Each scenario is run again and again and stopped before its first, second, ... operation on the
storage; then a new run looks at what is there, goes on from it and saves.
"""

import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed
from torchtitan.components.checkpointer.history import SUPERSEDED_RECORD
from torchtitan.components.checkpointer.storage import DELETED

from tests.unit_tests.components.checkpointer.fakes import BareManager, MemoryStorage

FILES = "payload", "done", "manifest.json"
"""In the order in which they are written; "done" is the marker."""


class KilledError(BaseException):
    """The process is gone."""


class Killing(MemoryStorage):
    """Every change is an operation; a deletion is one for each file, the commit record first."""

    def __init__(self, *directories: str) -> None:
        self.left: int | None = None
        super().__init__(*directories)

    def operate(self) -> None:
        if self.left is not None:
            if self.left == 0:
                raise KilledError
            self.left -= 1

    def add(self, path: str, content: bytes | None = None) -> None:
        if content is not None:
            self.operate()
        super().add(path, content)

    def move(self, source: str, target: str) -> None:
        self.operate()
        assert self.isdir(source) and not self.isdir(target)
        for path in self._below(source):
            self.entries[target + path[len(source) :]] = self.entries.pop(path)
        super().add(target)

    def remove(self, path: str) -> None:
        is_marked = False
        for name in FILES[::-1]:
            if self.isfile(f"{path}/{name}"):
                self.operate()
                content = self.entries.pop(f"{path}/{name}")
                if not is_marked:
                    # What makes it complete becomes what says that it is not.
                    self.entries[f"{path}/{DELETED}"] = content and b"deleted"
                    is_marked = True
        self.operate()
        self._take(path)

    def save(self, path: str, payload: bytes, *, num_files: int = 3) -> None:
        for name in FILES[:num_files]:
            self.add(f"{path}/{name}", payload)


class CopyingStore(Killing):
    """An object store: a directory is copied file by file, and then the source is deleted."""

    renames = False

    def move(self, source: str, target: str) -> None:
        for path, content in list(self._below(source).items()):
            if content is not None:
                self.add(target + path[len(source) :], content)
        self.remove(source)


def manager_of(storage: Killing, loaded: int | None, keep: int = 2) -> BareManager:
    return BareManager(
        _storage=storage,
        folder="/run",
        keep_latest_k=keep,
        purge_queue=queue.Queue(),
        purge_thread=None,
        _loaded_step=loaded,
        _history_settled=False,
    )


def make_ready(manager: BareManager, step: int, *, with_retention: bool = True) -> None:
    with patch.object(torch.distributed, "get_rank", return_value=0):
        manager._make_ready(f"/run/step-{step}", None, with_retention=with_retention)


def start(storage: Killing, keep: int = 2) -> tuple[BareManager, bytes | None]:
    """A new run, which has passed over what is damaged, and what it has found to go on from."""
    manager = manager_of(storage, None, keep)
    while True:
        own = manager._own_folder()
        manager._loaded_step, _ = own.newest_full()
        if manager._loaded_step is None:
            return manager, None
        path = own.step_paths[manager._loaded_step]
        # Without its commit record it counts as one that another program wrote.
        contents = {storage.entries.get(f"{path}/{name}") for name in FILES[:2]}
        payload = contents.pop() if len(contents) == 1 else b"in pieces"
        if payload is None or not payload.startswith(b"damaged"):
            return manager, payload
        manager._damaged = {**manager._damaged, path: "It is damaged."}


def newest(storage: Killing) -> tuple[int | None, bytes | None]:
    """The step that a new run goes on from, and what it finds there."""
    manager, payload = start(storage)
    return manager._loaded_step, payload


@dataclass(kw_only=True)
class Scenario:
    """What is there, what a run does, and what may be found whenever it is killed."""

    loaded: int
    there: dict[str, bytes]
    act: Callable[[Killing, BareManager], Any]
    allowed: set[tuple[int, bytes]]
    store: type[Killing] = Killing
    gone: set[bytes] = field(default_factory=set)
    """What is nowhere in the end; all else that was there is somewhere."""

    def manager(self, storage: Killing) -> BareManager:
        """Of a run that was told which step to load, or looked for one that is good."""
        if not any(payload.startswith(b"damaged") for payload in self.there.values()):
            return manager_of(storage, self.loaded)
        manager, _ = start(storage)
        assert manager._loaded_step == self.loaded
        return manager

    def storage(self) -> Killing:
        storage = self.store("/run")
        for path, payload in self.there.items():
            storage.save(path, payload)
        return storage


def save_again(storage: Killing, manager: BareManager) -> None:
    make_ready(manager, 10)
    storage.save("/run/step-10", b"new 10")
    make_ready(manager, 15)
    storage.save("/run/step-15", b"15")


def save_again_in_vain(storage: Killing, manager: BareManager) -> None:
    make_ready(manager, 10)
    storage.save("/run/step-10", b"half", num_files=1)
    make_ready(manager, 15)
    storage.save("/run/step-15", b"15")


def save_again_without_commit(storage: Killing, manager: BareManager) -> None:
    make_ready(manager, 10)
    storage.save("/run/step-10", b"half", num_files=2)
    make_ready(manager, 15)
    storage.save("/run/step-15", b"15")


def save_twice_again(storage: Killing, manager: BareManager) -> None:
    make_ready(manager, 10)
    storage.save("/run/step-10", b"half", num_files=1)
    make_ready(manager, 10)
    storage.save("/run/step-10", b"new 10")
    make_ready(manager, 10)
    storage.save("/run/step-10", b"newest 10")
    make_ready(manager, 15, with_retention=False)


def save_at(step: int) -> Callable[[Killing, BareManager], None]:
    def act(storage: Killing, manager: BareManager) -> None:
        make_ready(manager, step)
        storage.save(f"/run/step-{step}", b"saved")

    return act


BOTH = {"/run/step-5": b"5", "/run/step-10": b"10"}
ROLLED_BACK = {**BOTH, "/run/step-20": b"20", "/run/step-30": b"30"}
KEPT = {(30, b"30"), (20, b"20"), (10, b"10"), (7, b"saved"), (5, b"5")}
SCENARIOS = {
    "saved again": Scenario(
        loaded=10,
        there=BOTH,
        act=save_again,
        allowed={(10, b"10"), (10, b"new 10"), (15, b"15")},
        gone={b"10"},
    ),
    "saved again, and the save failed": Scenario(
        loaded=10, there=BOTH, act=save_again_in_vain, allowed={(10, b"10"), (15, b"15")}
    ),
    "saved again, and failed right before the commit": Scenario(
        loaded=10, there=BOTH, act=save_again_without_commit, allowed={(10, b"10"), (15, b"15")}
    ),
    "saved again and again": Scenario(
        loaded=10,
        there=BOTH,
        act=save_twice_again,
        allowed={(10, b"10"), (10, b"new 10"), (10, b"newest 10")},
        gone={b"10"},
    ),
    "both are there": Scenario(
        loaded=10,
        there={**BOTH, "/run/replaced/step-10": b"old 10"},
        act=save_at(15),
        allowed={(10, b"10"), (15, b"saved")},
        gone={b"old 10"},
    ),
    "both are there, and the newer one is damaged": Scenario(
        loaded=10,
        there={"/run/step-5": b"5", "/run/step-10": b"damaged", "/run/replaced/step-10": b"10"},
        act=save_at(15),
        allowed={(10, b"10"), (15, b"saved")},
    ),
    "the newer one is damaged, and its step is saved again": Scenario(
        loaded=10,
        there={"/run/step-5": b"5", "/run/step-10": b"damaged", "/run/replaced/step-10": b"10"},
        act=save_again,
        allowed={(10, b"10"), (10, b"new 10"), (15, b"15")},
        gone={b"10"},
    ),
    "both are there and damaged": Scenario(
        loaded=5,
        there={
            "/run/step-5": b"5",
            "/run/step-10": b"damaged",
            "/run/replaced/step-10": b"damaged too",
        },
        act=save_at(7),
        allowed={(5, b"5"), (7, b"saved")},
    ),
    "both are there, and are of the history that is left": Scenario(
        loaded=5,
        there={**BOTH, "/run/replaced/step-10": b"old 10"},
        act=save_at(7),
        allowed={(10, b"10"), (10, b"old 10"), (5, b"5"), (7, b"saved")},
    ),
    "what waits is of the history that is left": Scenario(
        loaded=5,
        there={"/run/step-5": b"5", "/run/replaced/step-10": b"10"},
        act=save_at(7),
        allowed={(10, b"10"), (5, b"5"), (7, b"saved")},
    ),
    "both are there, and are of the history that is left, where nothing can be renamed": Scenario(
        loaded=5,
        there={**BOTH, "/run/replaced/step-10": b"old 10"},
        act=save_at(7),
        allowed={(10, b"10"), (10, b"old 10"), (5, b"5"), (7, b"saved")},
        store=CopyingStore,
    ),
    "rolled back": Scenario(loaded=5, there=ROLLED_BACK, act=save_at(7), allowed=KEPT),
    "rolled back where nothing can be renamed": Scenario(
        loaded=5, there=ROLLED_BACK, act=save_at(7), allowed=KEPT, store=CopyingStore
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_at_no_moment_is_there_nothing_to_resume_from(name: str) -> None:
    scenario = SCENARIOS[name]
    num_operations = 0
    while True:
        storage = scenario.storage()
        storage.left = num_operations
        try:
            scenario.act(storage, scenario.manager(storage))
            break
        except KilledError:
            storage.left = None
        assert newest(storage) in scenario.allowed, f"killed at operation {num_operations}"
        go_on(storage)
        num_operations += 1
    assert num_operations > 2
    assert newest(storage) in scenario.allowed
    left = set(storage.entries.values())
    assert {payload for payload in scenario.there.values() if payload not in left} == scenario.gone


def go_on(storage: Killing) -> None:
    """A new run on what is there: it saves, and afterwards nothing waits and no half is left."""
    manager, payload = start(storage, keep=0)
    step = manager._loaded_step
    assert step is not None
    for saved in (step + 1, step + 2):
        make_ready(manager, saved)
        storage.save(f"/run/step-{saved}", b"later")
        assert newest(storage) == (saved, b"later")
    assert payload in storage.entries.values()
    assert "/run/replaced" not in storage.entries


def test_a_record_tells_which_do_not_count_and_a_save_of_one_of_them_moves_it() -> None:
    storage = SCENARIOS["rolled back where nothing can be renamed"].storage()
    manager = manager_of(storage, 5, keep=2)
    make_ready(manager, 10)
    storage.save("/run/step-10", b"new 10")
    assert newest(storage) == (10, b"new 10")
    # Nothing is copied that is not in the way, and nothing newer is deleted or expires.
    assert storage.entries["/run/step-30/payload"] == b"30"
    assert storage.entries["/run/superseded/step-10/payload"] == b"10"
    own = manager._own_folder()
    assert sorted(own.step_paths) == [5, 10] and own.unfinished == {} and own.foreign == ()
    make_ready(manager, 12)
    assert [manager.purge_queue.get_nowait() for _ in range(manager.purge_queue.qsize())] == [
        "/run/step-5"
    ]
    assert b'"step-20",' in storage.read_bytes(f"/run/{SUPERSEDED_RECORD}")
    assert b"step-10" not in storage.read_bytes(f"/run/{SUPERSEDED_RECORD}")
