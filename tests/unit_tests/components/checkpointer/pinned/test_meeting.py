"""The writers of all ranks meet, or learn at once that one of them will never come."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torchtitan.components.checkpointer.pinned.meeting import (
    ALL_HERE,
    committed_key,
    connect,
    failure_elsewhere,
    lost,
    Meeting,
    open_store,
    OtherRankFailedError,
    OtherRankLostError,
    report_death,
    WriterMissingError,
    written_key,
)


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def meeting(store: dist.TCPStore, rank: int, *, generation: int = 1) -> Meeting:
    return Meeting(
        rank=rank,
        world_size=3,
        host="localhost",
        port=store.port,
        generation=generation,
        timeout=timedelta(seconds=60),
    )


def connecting(meetings: list[Meeting]) -> tuple[list[threading.Thread], list[Any]]:
    """Threads that connect, and what becomes of them."""
    ends: list[Any] = []

    def end(one: Meeting) -> None:
        try:
            ends.append(connect(one))
        except WriterMissingError as error:
            ends.append(str(error))

    threads = [threading.Thread(target=end, args=(one,)) for one in meetings]
    for thread in threads:
        thread.start()
    return threads, ends


def test_writers_go_on_once_all_have_come_with_one_store(store: dist.TCPStore) -> None:
    threads, stores = connecting([meeting(store, rank) for rank in range(3)])
    for thread in threads:
        thread.join(30)
    stores[0].set("from one", "to all")
    assert [there.get("from one") for there in stores] == [b"to all"] * 3
    # A report that comes later changes nothing: they feel the end of a connection.
    report_death(meeting(store, 2), "killed", 1)


def test_a_writer_that_is_alone_needs_no_other_process() -> None:
    alone = Meeting(
        rank=0, world_size=1, host="", port=0, generation=1, timeout=timedelta(seconds=1)
    )
    assert isinstance(connect(alone), dist.HashStore)
    report_death(alone, "killed", 1)


def test_a_death_ends_the_wait_of_the_others_and_tells_them_why(store: dist.TCPStore) -> None:
    reason = "the writer process 7 of rank 2 was ended by SIGKILL"
    threads, ends = connecting([meeting(store, rank) for rank in range(2)])
    report_death(meeting(store, 2), reason, 1)
    for thread in threads:
        thread.join(30)
    assert ends == [reason] * 2


def test_a_death_in_a_save_is_told_where_that_save_is_committed_and_in_no_other(
    store: dist.TCPStore,
) -> None:
    there = open_store(meeting(store, 0), timedelta(seconds=30))
    there.set(written_key(4), ALL_HERE)
    report_death(meeting(store, 2), "killed", 4)
    # What all ranks have reached stays reached.
    assert there.get(written_key(4)) == ALL_HERE.encode()
    assert there.get(committed_key(4)).decode() == lost("killed")
    report_death(meeting(store, 1), "killed as well", 5)
    assert there.get(written_key(5)).decode() == lost("killed as well")
    assert there.get(committed_key(5)).decode() == lost("killed as well")
    assert not there.check([written_key(3)]) and not there.check([committed_key(6)])


def test_what_a_death_leaves_is_told_from_the_words_of_a_rank_that_has_failed() -> None:
    killed, full = failure_elsewhere(lost("killed")), failure_elsewhere("rank 1: the disk is full")
    assert (type(killed), str(killed)) == (OtherRankLostError, "killed")
    assert (type(full), str(full)) == (OtherRankFailedError, "rank 1: the disk is full")


def test_the_next_attempt_to_meet_knows_nothing_of_a_death_before_it(store: dist.TCPStore) -> None:
    report_death(meeting(store, 2), "killed", 1)
    threads, stores = connecting([meeting(store, rank, generation=2) for rank in range(3)])
    for thread in threads:
        thread.join(30)
    assert not any(there.check([committed_key(1)]) for there in stores) and len(stores) == 3


def test_a_report_to_nobody_is_no_error(store: dist.TCPStore) -> None:
    with patch.object(dist, "TCPStore", side_effect=dist.DistNetworkError("refused")):
        report_death(meeting(store, 1), "killed", 1)
