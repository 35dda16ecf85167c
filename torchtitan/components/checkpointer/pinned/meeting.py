"""How the writer processes of all ranks find each other, and learn that one of them will never come.

Gloo alone would let the others wait for it until their timeout.

    writer, as soon as it is up: connect ------------+--> ALL_HERE: the store of this meeting
    trainer whose writer has died: report_death ---- + -> its reason: the others give up

Writers that commit over the store wait there for more than the arrival of all: for the moment when all
have written, and for that when rank 0 has committed. A death ends those waits as well.
"""

import contextlib
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

ALL_HERE = "all here"
"""The value of a key that all ranks have reached; any other one says why they never will."""

_NUM_ARRIVED, _OUTCOME = "arrived", "outcome"
_LOST = "lost: "
"""Begins the reason that a death leaves, which says nothing about the disk."""
# A trainer whose own save has failed already should not wait for a host that is gone as well.
_REPORT_SECONDS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """One attempt to meet; a new one when the writers are replaced, which all ranks do together."""

    rank: int
    world_size: int
    host: str
    """Where rank 0 keeps their store; empty when there is one rank."""
    port: int
    generation: int
    """Counts how often the writers were replaced."""
    timeout: timedelta
    """For each of their collectives, and so for the slowest rank's write."""


class WriterMissingError(RuntimeError):
    """The writer process of another rank has died before all had met."""


class OtherRankFailedError(RuntimeError):
    """A save failed on another rank, whose error this one tells."""


class OtherRankLostError(OtherRankFailedError):
    """All that failed there is that its writer process has died."""


def lost(reason: str) -> str:
    """The outcome of a meeting that a death, told of by its ``reason``, leaves."""
    return _LOST + reason


def failure_elsewhere(outcome: str) -> OtherRankFailedError:
    """The error that the ``outcome`` of a meeting, another one than ``ALL_HERE``, stands for."""
    if outcome.startswith(_LOST):
        return OtherRankLostError(outcome.removeprefix(_LOST))
    return OtherRankFailedError(outcome)


def written_key(attempt: int) -> str:
    """Where the store says that all ranks have written their files of a save."""
    return f"save/{attempt}/written"


def committed_key(attempt: int) -> str:
    """Where the store says that a save is complete."""
    return f"save/{attempt}/committed"


def connect(meeting: Meeting) -> dist.Store:
    """The store of this meeting, once the writer processes of all ranks have come.

    Raises:
        WriterMissingError: one of them will not come; says why.
    """
    if meeting.world_size == 1:
        return dist.HashStore()
    store = open_store(meeting, meeting.timeout)
    if store.add(_NUM_ARRIVED, 1) == meeting.world_size:
        store.compare_set(_OUTCOME, "", ALL_HERE)
    if (outcome := store.get(_OUTCOME).decode()) != ALL_HERE:
        raise WriterMissingError(outcome.removeprefix(_LOST))
    return store


def report_death(meeting: Meeting, reason: str, attempt: int) -> None:
    """Tell writers that wait for the one of this rank, before or in save ``attempt``, why it does not come."""
    if meeting.world_size == 1:
        return
    with contextlib.suppress(RuntimeError):  # no store any more: then nobody waits at it
        store = open_store(meeting, timedelta(seconds=_REPORT_SECONDS))
        for key in (_OUTCOME, written_key(attempt), committed_key(attempt)):
            store.compare_set(key, "", lost(reason))


def open_store(meeting: Meeting, timeout: timedelta) -> dist.Store:
    """A connection to the store of a ``meeting`` of several ranks; its waits end after ``timeout``."""
    store = dist.TCPStore(
        meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    return dist.PrefixStore(f"writers/{meeting.generation}", store)
