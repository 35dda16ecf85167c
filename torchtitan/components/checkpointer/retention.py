"""Which checkpoints expire, and the thread that deletes them.

Choosing is pure; deleting is slow and happens beside training, on rank 0 only. Only what is complete
counts: what died, what is being written and what is half deleted never push a checkpoint out.

    purging._purge_stale_checkpoints -> Retention.plan -> purge_queue -> purge_thread -> deletions.py
"""

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from torchtitan.tools.logging import logger

T = TypeVar("T")


class State(Enum):
    """What has become of a directory of ours."""

    COMPLETE = "complete"
    """Committed by us, or finished by another program."""

    UNFINISHED = "unfinished"
    """Neither: a save that is running, or one that died."""

    HALF_DELETED = "half deleted"
    """Its deletion has begun and not ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One directory of ours, as far as retention asks."""

    step: int
    path: str
    state: State = State.COMPLETE
    is_full: bool = True
    """Whether it is more than weights, or cannot be told to be no more."""

    is_pinned: bool = False
    """Whether a user has said that it stays."""

    is_protected: bool = False
    """Whether the run begins from it, or reads it now."""

    @property
    def may_go(self) -> bool:
        """Whether neither a user nor the run needs it."""
        return not self.is_pinned and not self.is_protected


@dataclass(frozen=True, kw_only=True, slots=True)
class Purge:
    """What to delete, oldest first."""

    abandoned: list[str]
    """Left behind by saves that died."""

    half_deleted: list[str]
    """Left behind by deletions that were cut short."""

    expired: list[str]
    """Checkpoints that newer ones have pushed out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """What stays besides the newest."""

    keep_latest: int
    """So many of the newest full ones stay, and so many of those that hold weights; 0 keeps all."""

    keep_every: int = 0
    """The steps that are divisible by this stay; 0 is none."""

    def plan(self, entries: Sequence[Entry], *, is_save_in_flight: bool) -> Purge:
        """Decide over all directories of ours.

        The save that comes next, or is in flight, is a full one and has one of the ``keep_latest``
        places. With nothing in flight what is not complete has died.
        """
        ordered = sorted(entries, key=lambda entry: (entry.step, entry.path))
        half_deleted = [each for each in ordered if each.state is State.HALF_DELETED]
        ordered = [each for each in ordered if each.state is not State.HALF_DELETED]
        died = [each for each in ordered if each.state is State.UNFINISHED and each.may_go]
        # Step 0 is a seed that other runs may begin from; it takes no place and never expires.
        counted = [each for each in ordered if each.state is State.COMPLETE and each.step != 0]
        full = [each for each in counted if each.is_full]
        weights = [each for each in counted if not each.is_full]
        # What is newest and not complete may be the save in flight. There is one at most.
        is_in_sight = bool(ordered) and ordered[-1].state is State.UNFINISHED
        needs_place = is_in_sight if is_save_in_flight else True
        gone = self._beyond(full, self.keep_latest - needs_place)
        gone += self._beyond(weights, self.keep_latest)
        return Purge(
            abandoned=[] if is_save_in_flight else [each.path for each in died],
            half_deleted=[each.path for each in half_deleted if each.may_go],
            expired=[each.path for each in counted if each in gone],
        )

    def _beyond(self, oldest_first: list[Entry], num_places: int) -> list[Entry]:
        if self.keep_latest == 0:
            return []
        old = expired(oldest_first, num_places)
        return [each for each in old if each.may_go and not self._is_multiple(each.step)]

    def _is_multiple(self, step: int) -> bool:
        return self.keep_every > 0 and step % self.keep_every == 0


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
                f"Could not delete the expired checkpoint {path}: {error}. It is tried again at a later "
                "save; delete it by hand if its space is needed now."
            )
        finally:
            purge_queue.task_done()  # somebody may wait for the space
