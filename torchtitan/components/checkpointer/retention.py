"""Which checkpoints expire, and the thread that deletes them.

Choosing is pure; deleting is slow and happens beside training, on rank 0 only.

    housekeeping._purge_stale_checkpoints -> plan_purge -> purge_queue -> purge_thread -> storage.remove
"""

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torchtitan.tools.logging import logger

T = TypeVar("T")


def expired(oldest_first: Sequence[T], keep: int) -> list[T]:
    """What may be deleted so that the ``keep`` newest stay; ``keep`` 0 deletes everything."""
    return list(oldest_first[: max(len(oldest_first) - keep, 0)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Purge:
    """What to delete, oldest first."""

    abandoned: list[str]
    """Left behind by saves that died."""

    expired: list[str]
    """Checkpoints that newer ones have pushed out."""


def plan_purge(
    found: Sequence[tuple[int, str, bool]],
    keep: int,
    *,
    is_save_in_flight: bool,
    is_complete: Callable[[str], bool],
) -> Purge:
    """Decide over ``found``: (step, path, is a staging name) of all directories of ours, sorted.

    While a save is in flight its directory cannot be told from one that died, so everything of
    ours counts and only the oldest go. With nothing in flight the next save gets a slot
    (``keep - 1`` complete ones stay), and what is not complete has died.
    """
    if is_save_in_flight:
        return Purge(abandoned=[], expired=expired([path for _, path, _ in found], keep))
    complete = {path for _, path, is_staging in found if not is_staging and is_complete(path)}
    # Step 0 is a seed that other runs may begin from; it takes no slot and never expires.
    counted = [path for step, path, _ in found if path in complete and step != 0]
    return Purge(
        abandoned=[path for _, path, _ in found if path not in complete],
        expired=expired(counted, keep - 1),
    )


def purge_thread(
    purge_queue: "queue.Queue[str | None]", remove_path: Callable[[str], None]
) -> None:
    """Delete the paths of ``purge_queue`` one after the other until None comes.

    A path that cannot be deleted costs disk space and nothing else, so it is a warning.
    """
    while (path := purge_queue.get()) is not None:
        try:
            remove_path(path)
        except Exception as error:
            logger.warning(
                f"Could not delete the expired checkpoint {path}: {error}. "
                "It is left in place; delete it by hand if its space is needed."
            )
        finally:
            purge_queue.task_done()  # somebody may wait for the space
