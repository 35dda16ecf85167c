"""How the previous save ended, as all ranks see it. They tell each other before each save.

Ranks can see different ends of one save: one has the error of its disk, another feels that a connection
was closed, a third still waits. All of them must go the same way from there.

    in_flight.failure_of -> ending_of -> (gather) -> agreed_failure -> failures.py: does the run go on?
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch.distributed as dist

from torchtitan.components.checkpointer.agreement import gather
from torchtitan.components.checkpointer.errors import (
    CheckpointSaveError,
    CheckpointSaveTimeoutError,
)
from torchtitan.distributed.failure import is_echo


class Told(Protocol):
    """What a rank tells of the end of a save, whatever else it tells."""

    @property
    def failure(self) -> str | None: ...

    @property
    def is_echo(self) -> bool: ...

    @property
    def is_late(self) -> bool: ...

    @property
    def was_raised(self) -> bool: ...


class Ending(NamedTuple):
    """The end of a save on one rank."""

    failure: str | None
    """None for a good one, and where there was none."""
    is_echo: bool
    """It may only be how this rank felt the failure of another one."""
    is_late: bool
    """The save was given up and may still be running."""
    was_raised: bool
    """Somebody is told of the failure already."""


class Verdict(NamedTuple):
    """The same on all ranks."""

    failure: CheckpointSaveError | None
    """How the previous save failed; one that was given up is a CheckpointSaveTimeoutError on all of them."""
    can_stage: bool
    """Whether further saves can be staged. If not, all ranks have said so and closed their stagers."""
    is_excused: bool = False
    """The failure says nothing about the next save, so it is none that ends a run."""


def ending_of(failure: CheckpointSaveError | None) -> Ending:
    """What this rank tells the others of the save that ended with ``failure``."""
    return Ending(
        failure=None if failure is None else str(failure),
        is_echo=failure is not None and is_echo(failure),
        is_late=isinstance(failure, CheckpointSaveTimeoutError),
        was_raised=failure is not None and failure.was_raised,
    )


def agreed_failure(
    own: CheckpointSaveError | None, endings: Iterable[Told]
) -> CheckpointSaveError | None:
    """How the save failed whose ``endings`` the ranks have told each other; None if on none of them.

    Args:
        own: what it failed with on this rank.
    """
    failed = [ending for ending in endings if ending.failure is not None]
    if not failed:
        return None
    # What a rank only felt of another one's end says less than what that one says.
    text = next((ending for ending in failed if not ending.is_echo), failed[0]).failure
    kind = CheckpointSaveError
    if any(ending.is_late for ending in failed):
        kind = CheckpointSaveTimeoutError
    agreed = own
    if agreed is None or type(agreed) is not kind or str(agreed) != text:
        agreed = kind(text)
        agreed.__cause__ = own
    agreed.was_raised = any(ending.was_raised for ending in failed)
    return agreed


def agree(
    own: CheckpointSaveError | None, group: "dist.ProcessGroup | None"
) -> CheckpointSaveError | None:
    """How the previous save failed, on whatever rank. Collective over ``group``."""
    return agreed_failure(own, gather(ending_of(own), group))
