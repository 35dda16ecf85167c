"""What a trainer and its writer process say to each other; everything large lies in the arena.

The messages are small on purpose: sending one can never block on a writer that was stopped.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Save what lies in the arena."""

    path: str
    mapped_bytes: int
    """How much of the arena to map."""
    payload_offset: int
    payload_bytes: int
    writer: bytes = b""
    """The pickled storage writer."""
    failure: BaseException | None = None
    """The copy failed: let this be the error of all ranks, instead of a rank that never comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A request was carried out, or failed."""

    failure: BaseException | None = None
