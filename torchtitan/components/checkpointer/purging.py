"""Look at what the folder holds, and delete what has expired.

Rank 0 acts. What a checkpoint holds is told by its manifest or its index, which may take a while to
read: it is looked at only where more are there than may stay, and once in a run.

    _make_ready -> _sweep_half_deleted, _purge_stale_checkpoints -> Retention.plan -> _remove, purge_queue
    close -> _stop_purging (what is queued is gone then)
"""

import os
import queue
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from torchtitan.components.checkpointer.deletions import Deletions, is_pinned
from torchtitan.components.checkpointer.discovery import find_steps, Finder, Kind
from torchtitan.components.checkpointer.folder_view import FolderView
from torchtitan.components.checkpointer.history import superseded_names
from torchtitan.components.checkpointer.retention import Entry, purge_thread, Retention, State
from torchtitan.components.checkpointer.waiting import explanation
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

_TURN_SECONDS = 1.0


class Purging(FolderView):
    """A base of the managers, see the top of the file."""

    keep_latest_k: int
    keep_every: int = 0
    initial_load_path: str | None = None
    timeout_seconds: float = 600
    purge_queue: "queue.Queue[str | None]"
    purge_thread: threading.Thread | None

    _deletions_or_none: Deletions | None = None

    _kinds: Mapping[str, Kind] = MappingProxyType({})
    """What checkpoints were found to hold, by path."""

    _ready_by: float = 0
    """Until when the folder has to be ready for the save that comes next, on the monotonic clock."""

    _doubtful: frozenset[str] = frozenset()
    """The saves of this run that are not known to be good. One that failed may be complete all the same, if
    the disk has not let it be taken back; but it may not be durable, so nothing is deleted on its account."""

    _is_swept: bool = False
    """Whether no deletion of an earlier run is left to be ended, where nothing expires."""

    @property
    def _left_seconds(self) -> float:
        return max(self._ready_by - time.monotonic(), 0)

    @property
    def _deletions(self) -> Deletions:
        if self._deletions_or_none is None:
            self._deletions_or_none = Deletions(self._storage)
        return self._deletions_or_none

    def _should_purge(self) -> bool:
        return self.keep_latest_k > 0 and dist.get_rank() == 0 and self._storage.isdir(self.folder)

    def _purge_stale_checkpoints(self, *, is_save_in_flight: bool = True) -> None:
        """Queue expired checkpoints for deletion, and delete at once what died; rank 0 only."""
        if not self._should_purge():
            return
        retention = Retention(keep_latest=self.keep_latest_k, keep_every=self.keep_every)
        purge = retention.plan(self._entries(), is_save_in_flight=is_save_in_flight)
        for path in purge.abandoned:
            self._remove_leftover(path)
        for path in (*purge.half_deleted, *purge.expired):
            self._delete_beside_training(path)

    def _sweep_half_deleted(self) -> None:
        """Delete what deletions have left that were cut short by a crash; rank 0 only.

        For runs in which nothing expires: such a directory is of no use to anybody there as well. Once,
        since only an earlier run can have left one, and to look takes longer with each checkpoint.
        """
        if self.keep_latest_k > 0 or self._is_swept or not self._storage.isdir(self.folder):
            return  # the search for what expires finds them as well
        self._is_swept = True
        for name in self._storage.listdir(self.folder):
            path = filesystem.join(self.folder, name)
            if self._parse_step(name) is None or is_pinned(self._storage, path):
                continue
            if self._finder().is_half_deleted(path):
                self._remove_leftover(path)
                self._is_swept &= not self._storage.isdir(path)

    def _delete_beside_training(self, path: str) -> None:
        """Queue ``path`` for deletion, unless that has failed a moment ago."""
        if self._deletions.is_due(path):
            self._deletions.add(path)
            self.purge_queue.put(path)

    def _remove_leftover(self, path: str) -> None:
        """Delete what a save that died, or a deletion that was cut short, has left at ``path``."""
        if self._finder().is_half_deleted(path):
            self._remove(path, "whose deletion had not ended")
        else:
            self._remove(path, "left behind by a save that did not finish")

    def _remove(self, path: str, what: str) -> None:
        """Delete ``path`` at once, unless that has failed a moment ago."""
        if not self._deletions.is_due(path):
            return
        try:
            self._deletions.delete_now(path)
            logger.info(f"Deleted {path}, {what}.")
        except Exception as error:
            logger.warning(f"Could not delete {path}, {what}: {error}.")

    def _entries(self) -> list[Entry]:
        """All directories of ours that retention may count or delete."""
        found = find_steps(self._storage, self.folder, parse=self._parse_step)
        left = superseded_names(self._storage, self.folder)
        skipped = {filesystem.join(self.folder, name) for name in left}
        skipped |= self._damaged.keys() | self._deletions.waiting
        finder = self._finder()
        skipped |= {path for path in self._doubtful if finder.is_complete_for_any(path)}
        states = {
            path: _state_of(finder, path, is_staging=is_staging)
            for _, path, is_staging in found
            if path not in skipped
        }
        num_complete = sum(state is State.COMPLETE for state in states.values())
        return [
            Entry(
                step=step,
                path=path,
                state=states[path],
                is_full=(
                    states[path] is not State.COMPLETE
                    or num_complete < self.keep_latest_k
                    or self._is_full(finder, path)
                ),
                is_pinned=is_pinned(self._storage, path),
                is_protected=self._is_protected(path),
            )
            for step, path, _ in found
            if path in states
        ]

    def _is_full(self, finder: Finder, path: str) -> bool:
        """Whether ``path`` is more than weights. What cannot be told is, and so pushes nothing out early."""
        if path not in self._kinds:
            owner = finder.owner_of(path)
            try:
                kind = Kind.UNREADABLE if owner is None else owner.kind_of(path)
            except (OSError, AttributeError):
                # A disk that does not answer now, or a storage that only lists: nothing is learned.
                return True
            self._kinds = {**self._kinds, path: kind}
        return self._kinds[path] is not Kind.MODEL_ONLY

    def _forget_kind(self, path: str) -> None:
        """Let ``path``, which gets another content, be looked at again."""
        self._kinds = {at: kind for at, kind in self._kinds.items() if at != path}

    def _is_protected(self, path: str) -> bool:
        """Whether the run begins from ``path``, by whatever name."""
        if not self.initial_load_path:
            return False
        begun_from, own = _real(self.initial_load_path), _real(path)
        return begun_from == own or begun_from.startswith(f"{own}/")

    @contextmanager
    def _nothing_is_deleted(self) -> Generator[None]:
        """Let a load find what it was shown: what is queued stays, until the next look at what may go."""
        if self._deletions_or_none is None:
            yield
            return
        with self._deletions.none_begin(self.timeout_seconds / 2):
            yield

    def _start_purging(self) -> None:
        """Start the thread that deletes; it belongs to a run that saves and keeps not everything."""
        # Not a method of the manager: one that is forgotten must be able to die.
        arguments: tuple[Any, ...] = (self.purge_queue, self._deletions.delete)
        self.purge_thread = threading.Thread(target=purge_thread, args=arguments, daemon=True)
        self.purge_thread.start()

    def _end_purging(self) -> bool:
        """Delete what is queued and end the thread; whether that is over within the limit."""
        if self.purge_thread is None or not self.purge_thread.is_alive():
            return True
        self.purge_queue.put(None)
        # In turns: a Ctrl-C that comes right before a wait begins is only seen after it.
        ends_at = time.monotonic() + self.timeout_seconds
        while self.purge_thread.is_alive() and (left := ends_at - time.monotonic()) > 0:
            self.purge_thread.join(min(left, _TURN_SECONDS))
        if self.purge_thread.is_alive():
            # A daemon: it does not keep the process from ending.
            logger.warning(
                f"Deleting expired checkpoints from {self.folder} was given up: "
                f"{explanation(self.timeout_seconds)} What is left is deleted by a later run."
            )
            return False
        return True


def _state_of(finder: Finder, path: str, *, is_staging: bool) -> State:
    if finder.is_half_deleted(path):
        return State.HALF_DELETED
    is_complete = not is_staging and finder.is_complete_for_any(path)
    return State.COMPLETE if is_complete else State.UNFINISHED


def _real(path: str) -> str:
    return path.rstrip("/") if filesystem.is_remote(path) else os.path.realpath(path)
