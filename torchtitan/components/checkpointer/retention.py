"""Which checkpoints expire, and the thread that deletes them.

Choosing is pure; deleting is slow and happens beside training, on rank 0 only.

    base._purge_stale_checkpoints -> expired -> purge_queue -> purge_thread -> storage.remove
"""

import queue
from collections.abc import Callable, Sequence
from typing import TypeVar

from torchtitan.tools.logging import logger

T = TypeVar("T")


def expired(oldest_first: Sequence[T], keep: int) -> list[T]:
    """What may be deleted so that the ``keep`` newest stay; ``keep`` 0 deletes everything."""
    return list(oldest_first[: max(len(oldest_first) - keep, 0)])


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
