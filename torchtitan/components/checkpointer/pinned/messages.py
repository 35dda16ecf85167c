"""What a trainer and its writer process say to each other; everything large lies in the arena.

The messages are small on purpose: sending one can never block on a writer that was stopped.
"""

from dataclasses import dataclass

from torchtitan.components.checkpointer.pinned.meeting import Meeting
from torchtitan.tools.disk import Disk


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The first message: what a writer process is before it is asked for anything."""

    meeting: Meeting
    disk: Disk
    """Through which it writes: the one of its trainer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Save what lies in the arena."""

    path: str
    mapped_bytes: int
    """How much of the arena to map."""
    payload_offset: int
    payload_bytes: int
    job: bytes = b""
    """What else the program of the writer process needs to know, pickled."""
    attempt: int = 0
    """Counts the saves that were staged; the same number on all ranks."""
    failure: BaseException | None = None
    """The copy failed: let this be the error of all ranks, instead of a rank that never comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A request was carried out, or failed."""

    failure: BaseException | None = None
    is_agreed: bool = False
    """The writers of all ranks have failed with this error, so they are still in step."""
