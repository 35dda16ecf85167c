"""Let every rank enter a save through DCP, also the one that has nothing to bring.

DCP takes the state, and stages it, before the ranks meet. A rank that fails there would leave the others
waiting for it until their timeout, and without its error. So it comes all the same, with nothing but its
error, which DCP then gathers from it like that of any write and makes the failure of all.

    enter -> dcp.save | dcp.async_save -> state_dict, staging -> plan (the ranks meet) -> write -> finish
               |  fails before they meet: once more, with an empty state and a writer that refuses
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torchtitan.components.checkpointer.dcp_writer import DurableFileSystemWriter

T = TypeVar("T")


def enter(
    save: Callable[[dict[str, Any], DurableFileSystemWriter], T],
    state_dict: dict[str, Any],
    writer: DurableFileSystemWriter,
) -> T:
    """Call ``save``, a collective, for ``state_dict``; whatever it fails with, this rank has come to it."""
    try:
        return save(state_dict, writer)
    except Exception as error:  # of any object in the state
        if writer.has_met_others:
            raise
        writer.refuse(error)
        return save({}, writer)


def taken(
    take: Callable[[], dict[str, Any]],
) -> tuple[dict[str, Any], Exception | None]:
    """What ``take`` gives, and nothing beside the error where it fails; for a writer that refuses by it."""
    try:
        return take(), None
    except Exception as error:  # of any object in the state
        return {}, error
