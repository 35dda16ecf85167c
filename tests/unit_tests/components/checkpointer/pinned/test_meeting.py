"""The writers of all ranks meet, or learn at once that one of them will never come."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torchtitan.components.checkpointer.pinned.meeting import (
    join,
    Meeting,
    report_death,
    WriterMissingError,
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


def joined(meetings: list[Meeting]) -> tuple[list[threading.Thread], list[Any]]:
    """Threads that join, and what becomes of them; the process group is only asked for."""
    ends: list[Any] = []

    def end(one: Meeting) -> None:
        try:
            join(one)
            ends.append("joined")
        except WriterMissingError as error:
            ends.append(str(error))

    threads = [threading.Thread(target=end, args=(one,)) for one in meetings]
    for thread in threads:
        thread.start()
    return threads, ends


def test_writers_go_on_once_all_have_come(store: dist.TCPStore) -> None:
    with patch.object(dist, "init_process_group") as init:
        threads, ends = joined([meeting(store, rank) for rank in range(3)])
        for thread in threads:
            thread.join(30)
    assert ends == ["joined"] * 3
    assert sorted(call.kwargs["rank"] for call in init.mock_calls) == [0, 1, 2]
    # A report that comes later changes nothing: they feel the end of a connection.
    report_death(meeting(store, 2), "killed")


def test_a_death_ends_the_wait_of_the_others_and_tells_them_why(store: dist.TCPStore) -> None:
    reason = "the writer process 7 of rank 2 was ended by SIGKILL"
    with patch.object(dist, "init_process_group") as init:
        threads, ends = joined([meeting(store, rank) for rank in range(2)])
        report_death(meeting(store, 2), reason)
        for thread in threads:
            thread.join(30)
    assert ends == [reason] * 2 and not init.called


def test_the_next_attempt_knows_nothing_of_a_death_before_it(store: dist.TCPStore) -> None:
    report_death(meeting(store, 2), "killed")
    with patch.object(dist, "init_process_group"):
        threads, ends = joined([meeting(store, rank, generation=2) for rank in range(3)])
        for thread in threads:
            thread.join(30)
    assert ends == ["joined"] * 3


def test_a_report_to_nobody_is_no_error(store: dist.TCPStore) -> None:
    alone = Meeting(
        rank=0, world_size=1, host="", port=0, generation=1, timeout=timedelta(seconds=1)
    )
    report_death(alone, "killed")
    with patch.object(dist, "TCPStore", side_effect=dist.DistNetworkError("refused")):
        report_death(meeting(store, 1), "killed")
