"""How the writer processes of all ranks find each other, and learn that one of them will never come.

Gloo alone would let the others wait for it until their timeout.

    writer, as soon as it is up: join ---------------+--> "all here": connect
    trainer whose writer has died: report_death ---- + -> its reason: the others give up
"""

import contextlib
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

_NUM_ARRIVED, _OUTCOME = "arrived", "outcome"
_ALL_HERE = "all here"
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


def join(meeting: Meeting) -> None:
    """Make the default process group of this writer process, together with those of all ranks.

    Raises:
        WriterMissingError: one of them will not come; says why.
    """
    store: dist.Store = dist.HashStore()
    if meeting.world_size > 1:
        store = _store(meeting, meeting.timeout)
        if store.add(_NUM_ARRIVED, 1) == meeting.world_size:
            store.compare_set(_OUTCOME, "", _ALL_HERE)
        if (outcome := store.get(_OUTCOME).decode()) != _ALL_HERE:
            raise WriterMissingError(outcome)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=meeting.rank,
        world_size=meeting.world_size,
        timeout=meeting.timeout,
    )


def report_death(meeting: Meeting, reason: str) -> None:
    """Tell writers that still wait for the one of this rank why it does not come."""
    if meeting.world_size == 1:
        return
    with contextlib.suppress(RuntimeError):  # no store any more: then nobody waits at it
        store = _store(meeting, timedelta(seconds=_REPORT_SECONDS))
        store.compare_set(_OUTCOME, "", reason)


def _store(meeting: Meeting, timeout: timedelta) -> dist.Store:
    store = dist.TCPStore(
        meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    return dist.PrefixStore(f"writers/{meeting.generation}", store)
