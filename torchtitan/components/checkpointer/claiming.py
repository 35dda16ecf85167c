"""Claim the folder of a run, so that no other run writes there while this one lives.

A run claims its folder before it loads, or else before its first save, and makes it for that: of two
that begin in a new one, the second is to be refused before it has trained. A run that ends in order and
has never saved leaves no folder: what was made goes with the claim, if it is empty then. One that only
loads claims nothing. Rank 0 holds the lock. Where its last holder ran on another machine, the ranks there
say whether it is dead: after a restart, rank 0 need not be where it was.

    base.load, base.save -> _claim_folder -> run_lock.hold (rank 0)
    _make_ready -> _require_claim                             base.close -> _release_claim
"""

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from torchtitan.components.checkpointer.agreement import gather, rank_zero_decides
from torchtitan.components.checkpointer.folder_view import FolderView
from torchtitan.components.checkpointer.integrity.manifest import RunDescription
from torchtitan.components.checkpointer.lock_holder import Fate, Holder
from torchtitan.components.checkpointer.run_lock import hold, holder_of, RunLock, Silence
from torchtitan.components.checkpointer.waiting import within
from torchtitan.tools.logging import logger


class Claiming(FolderView):
    """A base of the managers, see the top of the file."""

    load_only: bool = False
    timeout_seconds: float = 600
    lock_timeout_seconds: float = 300
    save_future: "Future[Any] | None"
    purge_thread: threading.Thread | None

    _run: RunDescription | None = None
    """What the trainer has told about the run; a manager without one is no run, and claims nothing."""

    _loaded_step: int | None
    _gave_up: bool = False
    _is_claimed: bool = False
    """The same on all ranks; also where the disk has refused the lock, which is told once."""

    _is_forgotten: bool = False
    """It is closed by the garbage collector, which may be in the middle of anything."""

    _lock: RunLock | None = None
    """Of rank 0."""

    _verdicts: Mapping[str, Fate] = MappingProxyType({})
    _silence: Silence | None = None
    """What was found out about the last holder, for as long as the disk refuses the lock."""

    @property
    def _look_seconds(self) -> float:
        """How long a look at the lock may take; the other ranks wait meanwhile, for all of the limit."""
        return self.timeout_seconds / 4

    @property
    def _may_claim(self) -> bool:
        if self._is_claimed or self.load_only or self._run is None:
            return False
        # A storage of another kind has no files that one process alone could make.
        return getattr(self._storage, "has_files", False)

    def _claim_folder(self) -> None:
        """Make the folder, if it is not there, and make it this run's, if it is not yet. Collective.

        Raises:
            CheckpointInUseError: another run that is alive has it. All ranks raise.
        """
        if not self._may_claim:
            return
        limit_seconds = self.timeout_seconds + self.lock_timeout_seconds
        with within(limit_seconds, f"Waiting for the lock of {self.folder}"):
            other = rank_zero_decides(self._holder_elsewhere)
            fates = [] if other is None else gather(other.fate())
            # Those on its machine know; of the others each says that it runs elsewhere.
            known = [fate for fate in fates if fate is not Fate.ELSEWHERE]
            self._verdicts = {other.run_id: known[0]} if other is not None and known else {}
            self._silence = Silence(self.lock_timeout_seconds)

            rank_zero_decides(self._take_lock)
            self._is_claimed = True

    def _holder_elsewhere(self) -> Holder | None:
        try:
            holder = holder_of(self.folder)
        except OSError:
            return None  # which is told when the lock is to be taken
        return holder if holder is not None and holder.fate() is Fate.ELSEWHERE else None

    def _take_lock(self, *, may_wait: bool = True) -> None:
        """Take the lock, unless the disk refuses it, which is told."""
        if self._lock is not None:
            return  # kept for what was still writing
        try:
            self._lock = hold(
                self.folder,
                timeout_seconds=self.lock_timeout_seconds,
                verdicts=self._verdicts,
                silence=self._silence,
                may_wait=may_wait,
            )
        except OSError as error:
            # Of the last kind is one that somebody else may have.
            if not self._is_claimed or isinstance(error, TimeoutError):
                logger.warning(
                    f"{self.folder} could not be locked: {error}. The run goes on without; before each save "
                    "it is tried again, and until then nothing stops another run in this folder."
                )

    def _require_claim(self) -> None:
        """Check, on rank 0 and right before a save, that no other run has the folder.

        Raises:
            CheckpointInUseError: one has.
            TimeoutError: the disk does not answer.
        """
        if self._lock is not None:
            self._lock.require(self._look_seconds)
        elif self._is_claimed:
            # The other ranks are waiting, so not for a run that may be dead.
            self._take_lock(may_wait=False)

    def _has_lost_folder(self) -> bool:
        """Whether another run has the folder now, as rank 0 sees it; also where the disk does not say."""
        if self._lock is None:
            return False
        if self._gave_up or self._is_forgotten:
            return self._lock.is_lost
        try:
            return self._lock.is_lost_by_now(self._look_seconds)
        except TimeoutError:
            return True

    def _note_start(self) -> None:
        """Let the lock tell what the run goes on from."""
        if self._lock is not None:
            self._lock.note_step(self._loaded_step or 0)

    def _release_claim(self) -> None:
        """Give the folder back, unless something of this run may still write there or delete."""
        self._is_claimed = False
        lock = self._lock
        if lock is None:
            return
        is_deleting = self.purge_thread is not None and self.purge_thread.is_alive()
        if self._gave_up or is_deleting or self.save_future is not None:
            return  # the end of the process gives it back
        self._lock = None
        lock.release(0 if self._is_forgotten else self._look_seconds)
