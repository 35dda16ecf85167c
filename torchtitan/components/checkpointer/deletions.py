"""Delete checkpoints one at a time, and none that is wanted after all.

Between the decision and the deletion time passes: a user may put a file PIN there, and a run that
loads may want to go on from what is queued. So both are looked at once more, right before. What cannot
be deleted is tried again, less and less often, since a disk that refused once will mostly refuse again.

    purging.py -> add -> purge_queue -> purge_thread -> delete
    base.load -> none_begin (what is queued stays, until a later cycle queues it again)
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

from torchtitan.components.checkpointer.storage import CheckpointStorage
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

PIN = "PIN"
"""A file of this name keeps the directory that it lies in."""


def is_pinned(storage: CheckpointStorage, path: str) -> bool:
    """Whether a user has said that the checkpoint ``path`` stays."""
    return storage.isfile(filesystem.join(path, PIN))


class Deletions:
    """What is to be deleted; asked by the training thread and by the one that deletes."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self._storage = storage
        # Held for a moment, so that what is withdrawn has either not begun or is known to have.
        self._marks = threading.Condition()
        self._waiting: Counter[str] = Counter()
        self._withdrawn: Counter[str] = Counter()
        self._current: str | None = None
        self._cycle = 0
        self._failures: Counter[str] = Counter()
        self._next_try: dict[str, int] = {}
        self.is_ours: Callable[[], bool] = lambda: True
        """Whether the folder still is this run's."""

        self._ended_at = -math.inf

    def begin_cycle(self) -> None:
        """A save begins, and with it the next look at what may go."""
        self._cycle += 1

    def is_due(self, path: str) -> bool:
        """Whether ``path`` may be tried: it never failed, or did often enough to be tried again."""
        return self._cycle >= self._next_try.get(path, 0)

    @property
    def waiting(self) -> frozenset[str]:
        """What is queued or being deleted: it counts no more, and is nobody's leftover."""
        return frozenset(self._waiting)

    @property
    def idle_seconds(self) -> float:
        """How long ago the last one of those that were queued was deleted."""
        return time.monotonic() - self._ended_at

    def add(self, path: str) -> None:
        """Note that ``path`` is queued."""
        self._waiting[path] += 1

    def delete(self, path: str) -> None:
        """Delete ``path``, which was queued, if it is still to go.

        Raises:
            Exception: what the storage says; it is tried again in a later cycle.
        """
        with self._marks:
            if self._withdrawn[path] > 0:
                self._withdrawn[path] -= 1
                return
            self._current = path
        try:
            if not self.is_ours():
                return  # another run may go on from it by now
            if is_pinned(self._storage, path):
                logger.info(f"Kept {path}: a file {PIN} was put there before its turn came.")
            else:
                self.delete_now(path)
                self._ended_at = time.monotonic()
        finally:
            with self._marks:
                self._current = None
                self._waiting.pop(path, None)
                self._marks.notify_all()

    def withdraw(self, path: str, limit_seconds: float) -> bool:
        """Let ``path``, which gets another content, not be deleted; whether it was queued.

        Raises:
            TimeoutError: its deletion has begun and is not over within the limit.
        """
        with self._marks:
            if self._current != path:
                return self._take_back(path)
            if not self._marks.wait_for(lambda: self._current != path, limit_seconds):
                raise TimeoutError(
                    f"the deletion of {path} was not over after {limit_seconds:.4g} s"
                )
        return False

    def _take_back(self, path: str) -> bool:
        times = self._waiting.pop(path, 0)
        self._withdrawn[path] += times
        return times > 0

    def delete_now(self, path: str) -> None:
        """Delete ``path``, which nobody has queued, in the training thread.

        Raises:
            Exception: what the storage says.
        """
        try:
            self._storage.remove(path)
        except Exception:
            self._failures[path] += 1
            # The second cycle from now; after another failure the fourth, the eighth... up to 64.
            self._next_try[path] = self._cycle + 2 ** min(self._failures[path], 6)
            raise
        self._failures.pop(path, None)
        self._next_try.pop(path, None)

    @contextmanager
    def none_begin(self, limit_seconds: float) -> Generator[None]:
        """Withdraw all that is queued, so that no deletion begins in the block.

        One that has begun is waited for, up to the limit: what it deletes looks like a checkpoint until
        its commit record is gone, which is its first act.
        """
        with self._marks:
            for path in self.waiting - {self._current}:
                self._take_back(path)
            if not self._marks.wait_for(lambda: self._current is None, limit_seconds):
                logger.warning(
                    f"The deletion of {self._current} was not over after {limit_seconds:g} s. What it "
                    "deletes is not loaded."
                )
        yield
