"""A writer process that ends, killed with its trainer, is noticed by that of the rank before it."""

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torchtitan.components.checkpointer.pinned import neighbour
from torchtitan.components.checkpointer.pinned.meeting import (
    ALL_HERE,
    committed_key,
    lost,
    Meeting,
    open_store,
    OtherRankLostError,
    written_key,
)
from torchtitan.components.checkpointer.pinned.neighbour import Neighbour

END = "the writer process of rank 1 has ended, killed or with its trainer"


@pytest.fixture(autouse=True)
def store() -> Iterator[dist.TCPStore]:
    with patch.object(neighbour, "_PRECEDENCE_SECONDS", 0):
        yield dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def meeting(store: dist.TCPStore, rank: int, generation: int = 1) -> Meeting:
    return Meeting(
        rank=rank,
        world_size=2,
        host="localhost",
        port=store.port,
        generation=generation,
        timeout=timedelta(seconds=60),
    )


def joined(meeting: Meeting) -> Neighbour:
    return Neighbour(meeting, open_store(meeting, meeting.timeout))


def end(writer: Neighbour) -> None:
    """What the kernel does to the connections of a process that ends."""
    (looker,) = writer._lookers
    looker.shutdown(socket.SHUT_RDWR)
    looker.close()


def test_the_end_of_the_next_rank_is_told_to_all_that_wait_in_this_save(
    store: dist.TCPStore,
) -> None:
    last = joined(meeting(store, 1))
    first = joined(meeting(store, 0))
    waiting = open_store(meeting(store, 0), timedelta(seconds=60))
    first.begin(3)
    waiting.set(written_key(3), ALL_HERE)
    waiting.set(committed_key(3), ALL_HERE)
    first.begin(4)
    last.begin(4)  # nobody is behind it
    waiting.set(written_key(4), ALL_HERE)
    end(last)
    assert waiting.get(committed_key(4)).decode() == lost(END)
    # What was decided before stays so.
    assert waiting.get(written_key(4)).decode() == ALL_HERE
    assert waiting.get(committed_key(3)).decode() == ALL_HERE
    with pytest.raises(OtherRankLostError, match=END):
        first.begin(5)


@pytest.mark.parametrize("answers", [True, False])
def test_who_cannot_look_says_so_and_saves_all_the_same(
    store: dist.TCPStore, answers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    own = meeting(store, 0)
    if answers:  # a writer of another job, or of an earlier meeting
        other = joined(meeting(store, 1, generation=7))
        address = open_store(other._meeting, own.timeout).get("neighbour/1")
    else:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            address = f"127.0.0.1 {gone.getsockname()[1]}".encode()
    open_store(own, own.timeout).set("neighbour/1", address.decode())
    before = threading.active_count()
    joined(own).begin(1)
    assert threading.active_count() == before
    assert "cannot look at that of rank 1" in caplog.text
    assert "--checkpoint.timeout_seconds" in caplog.text
