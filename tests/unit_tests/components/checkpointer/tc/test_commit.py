"""One save on all ranks: saved on all, or failed on all with one story; never a rank that waits on."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, HealthCheck, settings, strategies as st
from torch_checkpointing.types import RankInfo
from torchtitan.components.checkpointer.integrity.digests import digest_of
from torchtitan.components.checkpointer.pinned.meeting import (
    Meeting,
    open_store,
    OtherRankFailedError,
    report_death,
)
from torchtitan.components.checkpointer.tc.commit import (
    Commit,
    CommitBarrier,
    CommitBarrierConfig,
    Files,
    GroupCommit,
    StoreCommit,
)

Connect = Callable[[int], dist.Store]
"""The connection of a rank to the store, which each process has of its own."""

WORLD = 3
FULL = "rank {}: OSError: no space left"


def written(*ranks: int) -> Files:
    """What these ranks have written, each one file of more than a block."""
    return {f"model_{rank}.pt": digest_of(bytes([rank]) * 5_000_000) for rank in ranks}


def info(rank: int, world_size: int = WORLD) -> RankInfo:
    return RankInfo(rank, world_size, rank, world_size)


@dataclass
class Save:
    """What the ranks of one save do, each in a thread; what becomes of it."""

    connect: Connect
    attempt: int = 1
    named: list[int] = field(default_factory=list)
    """Who has given the checkpoint its name."""
    ends: dict[int, str] = field(default_factory=dict)
    """By rank: saved, or what it failed with."""
    named_before: dict[int, bool] = field(default_factory=dict)
    """By rank that saved: whether the checkpoint had its name by then."""
    files: dict[int, Files] = field(default_factory=dict)
    """By rank: what it writes."""
    known: dict[int, Files] = field(default_factory=dict)
    """By rank: what it knows that all have written."""

    def on(self, rank: int, fails: str = "") -> None:
        """Write as ``rank``, which ``fails`` before it has written or when it names the checkpoint."""
        commit = StoreCommit(info(rank), self.connect(rank), self.attempt)
        try:
            if fails == "writing":
                raise OSError("no space left")
            self.known[rank] = commit.agree(self.files.get(rank, {}))
            if fails == "naming":
                raise OSError("no space left")
            if rank == 0:
                self.named.append(rank)
            commit.publish()
            self.named_before[rank] = bool(self.named)
            self.ends[rank] = "saved"
        except Exception as error:
            commit.fail(error)
            text = str(error)
            self.ends[rank] = text if isinstance(error, OtherRankFailedError) else f"own: {text}"

    def all_at_once(self, **fails: str) -> None:
        """All ranks, and nobody is left waiting."""
        threads = [
            threading.Thread(target=self.on, args=(rank, fails.get(f"rank_{rank}", "")))
            for rank in range(WORLD)
        ]
        end_all(threads)


def end_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def in_memory(seconds: float = 60.0) -> Connect:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=seconds))
    return lambda rank: store


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    """Where writers meet, whose store is there until the test ends."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield Meeting(
        rank=0,
        world_size=WORLD,
        host="localhost",
        port=server.port,
        generation=1,
        timeout=timedelta(seconds=60),
    )
    del server


def connections(meeting: Meeting) -> Connect:
    return functools.cache(lambda rank: open_store(meeting, meeting.timeout))


@pytest.fixture(params=["memory", "tcp"])
def connect(request: pytest.FixtureRequest, meeting: Meeting) -> Connect:
    if request.param == "memory":
        return in_memory()
    return connections(meeting)


def test_nobody_has_saved_before_the_checkpoint_has_its_name(
    connect: Connect,
) -> None:
    for attempt in range(1, 6):
        save = Save(connect, attempt)
        save.all_at_once()
        assert save.ends == dict.fromkeys(range(WORLD), "saved")
        assert save.named == [0] and all(save.named_before.values())


def test_what_all_ranks_have_written_comes_to_rank_0_and_stays_in_no_store(
    connect: Connect,
) -> None:
    before = connect(0).num_keys()
    for attempt in (1, 2):
        save = Save(connect, attempt, files={rank: written(rank) for rank in range(WORLD)})
        save.all_at_once()
        assert save.known == {0: written(0, 1, 2), 1: {}, 2: {}}
    # Of each save the two verdicts are left, and the count of the arrivals.
    assert connect(0).num_keys() == before + 2 * 3


@pytest.mark.parametrize("fails", ["writing", "naming"])
def test_what_was_written_stays_in_no_store_when_a_save_fails(connect: Connect, fails: str) -> None:
    before = connect(0).num_keys()
    save = Save(connect, files={rank: written(rank) for rank in range(WORLD)})
    save.all_at_once(rank_0=fails)
    assert "saved" not in save.ends.values()
    assert connect(0).num_keys() <= before + 3


class Counted:
    """A store that notes what is asked of it."""

    def __init__(self, store: dist.Store) -> None:
        self.asked: list[str] = []
        self._store = store

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self._store, name)


def test_rank_0_asks_the_store_no_more_often_for_more_ranks() -> None:
    store = in_memory()(0)
    stores: list[Any] = [Counted(store), store, store]
    save = Save(stores.__getitem__, files={rank: written(rank) for rank in range(WORLD)})
    save.all_at_once()
    assert save.known[0] == written(0, 1, 2)
    asked = stores[0].asked
    assert asked.count("multi_get") == asked.count("delete_key") == 1 and asked.count("get") == 2


def test_a_save_is_saved_although_the_store_has_ended_with_rank_0() -> None:
    class Ended(Counted):
        def delete_key(self, key: str) -> bool:
            raise RuntimeError("connection reset by peer")

    store = in_memory()(0)
    stores: list[Any] = [store, Ended(store), Ended(store)]
    save = Save(stores.__getitem__, files={rank: written(rank) for rank in range(WORLD)})
    save.all_at_once()
    assert save.ends == dict.fromkeys(range(WORLD), "saved")


def test_two_ranks_that_write_one_file_must_write_the_same(connect: Connect) -> None:
    same = Save(connect, 1, files={0: written(0), 1: written(0)})
    same.all_at_once()
    assert same.known[0] == written(0)
    other = Save(connect, 2, files={0: written(0), 2: {"model_0.pt": digest_of(b"other")}})
    other.all_at_once()
    said = "two ranks have written model_0.pt, each of them something else; give them different layouts"
    told = f"rank 0: ValueError: {said}"
    assert other.ends == {0: f"own: {said}", 1: told, 2: told} and other.named == []


@pytest.mark.parametrize("failing", range(WORLD))
def test_a_rank_that_cannot_write_fails_all_and_no_name_is_given(
    failing: int,
) -> None:
    save = Save(in_memory())
    save.all_at_once(**{f"rank_{failing}": "writing"})
    others = {rank: FULL.format(failing) for rank in range(WORLD) if rank != failing}
    assert save.ends == {failing: "own: no space left", **others}
    assert save.named == []


def test_a_checkpoint_that_cannot_get_its_name_is_saved_nowhere(
    connect: Connect,
) -> None:
    save = Save(connect)
    save.all_at_once(rank_0="naming")
    assert save.ends == {0: "own: no space left", 1: FULL.format(0), 2: FULL.format(0)}
    # What failed is over: the next save of the same writers is counted for itself.
    again = Save(connect, attempt=2)
    again.all_at_once()
    assert set(again.ends.values()) == {"saved"}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_the_order_in_which_ranks_come_after_a_failure_makes_no_difference(
    order: tuple[int, ...],
) -> None:
    save = Save(in_memory())
    save.on(1, "writing")  # long before the others
    for rank in order:
        if rank != 1:
            save.on(rank)
    assert save.ends == {1: "own: no space left", 0: FULL.format(1), 2: FULL.format(1)}


def test_of_two_failures_all_others_tell_the_first() -> None:
    save = Save(in_memory())
    save.on(2, "writing")
    save.on(0, "writing")
    save.on(1)
    assert save.ends[1] == FULL.format(2)
    assert save.ends[0] == save.ends[2] == "own: no space left"


def test_a_rank_that_comes_when_the_others_have_given_up_does_not_save_alone() -> None:
    save = Save(in_memory(0.1))
    save.on(0)
    save.on(1)
    save.connect(0).set_timeout(timedelta(seconds=60))
    save.on(2)  # with it, all have arrived
    assert save.ends[0].startswith("own: ") and "timeout" in save.ends[0].lower()
    assert save.ends[2] == save.ends[1] == f"rank 0: {save.ends[0].removeprefix('own: ')}"
    assert save.named == []


def test_ranks_that_wait_for_the_name_give_up_for_good() -> None:
    store = in_memory(0.1)(0)
    early = [StoreCommit(info(rank), store, 1) for rank in range(WORLD)]
    end_all([threading.Thread(target=commit.agree, args=({},)) for commit in early])
    with pytest.raises(RuntimeError, match="(?i)timeout"):
        early[1].publish()
    with pytest.raises(OtherRankFailedError, match="(?i)rank 1: .*timeout"):
        early[2].publish()
    # It has its name by now, but is not called saved where others have called it failed.
    with pytest.raises(OtherRankFailedError, match="(?i)rank 1: .*timeout"):
        early[0].publish()


@pytest.mark.parametrize("has_written", [False, True])
def test_the_death_of_a_writer_ends_the_wait_for_it(meeting: Meeting, has_written: bool) -> None:
    save = Save(connections(meeting), attempt=4)
    threads = [threading.Thread(target=save.on, args=(rank,)) for rank in (1, 2)]
    if has_written:
        # The writer of rank 0 dies between its files and the name.
        commit = StoreCommit(info(0), save.connect(0), 4)
        threads.append(threading.Thread(target=commit.agree, args=({},)))
    for thread in threads:
        thread.start()
    if has_written:
        threads[-1].join(60)
    report_death(meeting, "it was killed", 4)
    for thread in threads:
        thread.join(60)
    assert save.ends == {1: "it was killed", 2: "it was killed"} and save.named == []


@given(
    fails=st.lists(st.sampled_from(["", "", "writing", "naming"]), min_size=WORLD, max_size=WORLD)
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_fails_all_ranks_save_or_none_does(fails: list[str]) -> None:
    # Only rank 0 has anything to do between the two stops.
    fails = [how if rank == 0 or how != "naming" else "" for rank, how in enumerate(fails)]
    save = Save(in_memory())
    save.all_at_once(**{f"rank_{rank}": how for rank, how in enumerate(fails)})
    is_saved = not any(fails)
    assert save.named == ([0] if is_saved else [])
    assert [end == "saved" for _, end in sorted(save.ends.items())] == [is_saved] * WORLD
    told = {end for end in save.ends.values() if not end.startswith(("own", "saved"))}
    assert len(told) <= 1


def test_a_failure_that_all_know_of_is_not_told_again() -> None:
    met: list[str | None] = []

    class Told(Commit):
        def _of_all_ranks(self) -> list[Files]:
            return []

        def _meet(self, stop: Any, failure: str | None) -> str | None:
            met.append(failure)
            return failure or "rank 1: OSError: full"

    for begin in (lambda commit: commit.agree({}), lambda commit: commit.fail(OSError("own"))):
        commit = Told(info(0))
        with contextlib.suppress(OtherRankFailedError):
            begin(commit)
        commit.fail(OSError("later"))
    assert met == [None, "rank 0: OSError: own"]


def test_one_rank_agrees_with_nobody_and_meets_nobody() -> None:
    class Unused(Commit):
        def _of_all_ranks(self) -> list[Files]:
            raise AssertionError("there is nobody else who has written")

        def _meet(self, stop: Any, failure: str | None) -> str | None:
            raise AssertionError("there is nobody to meet")

    commit = Unused(info(0, 1))
    assert commit.agree(written(0)) == written(0)
    commit.publish()
    commit.fail(OSError("too late to matter"))
    failed = Unused(info(0, 1))
    failed.fail(OSError("alone"))
    failed.fail(OSError("twice"))


def test_the_barrier_of_a_writer_is_the_first_stop_of_its_commit() -> None:
    order: list[str] = []

    class Noted(GroupCommit):
        def agree(self, files: Files) -> Files:
            order.append(f"agree on {[*files]}")
            return written(0, 1)

    barrier = CommitBarrierConfig().create_barrier(info(0))
    assert isinstance(barrier, CommitBarrier)
    barrier.commit = Noted(info(0), None)
    barrier.written = lambda: written(0)
    barrier.prepare = lambda files: order.append(f"prepare {[*files]}")
    barrier.execute_barrier(0)
    assert order == ["agree on ['model_0.pt']", "prepare ['model_0.pt', 'model_1.pt']"]
