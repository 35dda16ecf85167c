"""Get the folder of a run ready for a save, and delete what has expired.

Rank 0 acts, while no save is in flight. Histories are settled first: retention must not count the
checkpoints of a future that this run has left.

    base.save -> _make_ready -> end what was replaced -> leave the other history -> put back what was
                 replaced in vain -> retention -> clear the path of the save

At every point in between the newest checkpoint that this run may go on from is there and is found.
"""

import queue
import threading
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from torchtitan.components.checkpointer.agreement import rank_zero_decides
from torchtitan.components.checkpointer.claiming import Claiming
from torchtitan.components.checkpointer.discovery import find_steps, require_no_lost_links
from torchtitan.components.checkpointer.errors import CheckpointReadError
from torchtitan.components.checkpointer.formats import marker_folders
from torchtitan.components.checkpointer.history import (
    free_name,
    put_aside,
    REPLACED,
    supersede,
    supersede_newer,
    superseded_names,
    SUPERSEDED_RECORD,
)
from torchtitan.components.checkpointer.integrity.manifest import MANIFEST
from torchtitan.components.checkpointer.retention import plan_purge, purge_thread
from torchtitan.components.checkpointer.waiting import explanation
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger


class Housekeeping(Claiming):
    """A base of the managers, see the top of the file."""

    keep_latest_k: int
    timeout_seconds: float = 600
    purge_queue: "queue.Queue[str | None]"
    purge_thread: threading.Thread | None

    _loaded_step: int | None
    """The step that this run goes on from, 0 for none; None before anything was loaded."""

    _history_settled: bool

    _damaged: Mapping[str, str]
    _saved_paths: frozenset[str] = frozenset()
    _has_replaced: bool = False
    _gave_up: bool = False
    """Whether a save was given up, which then may still be running."""

    # Queued for deletion: a directory that is half gone must not be taken for a save that died.
    _expiring: frozenset[str] = frozenset()

    def _make_ready(
        self,
        checkpoint_id: str,
        group: "dist.ProcessGroup | None",
        *,
        with_retention: bool,
    ) -> None:
        """Get the folder ready for a save: rank 0 acts, and an error there is one on all ranks.

        Call it while no save is in flight.
        """

        def act() -> list[str]:
            self._require_claim()
            self._delete_replaced()
            moved = self._leave_other_history()
            moved += free_name(self._storage, self.folder, checkpoint_id)
            moved += self._put_back_replaced(but=checkpoint_id)
            if with_retention:
                self._purge_stale_checkpoints(is_save_in_flight=False)
            self._clear_staging(checkpoint_id)
            return moved + self._clear_path(checkpoint_id)

        for path in rank_zero_decides(act, group):
            logger.warning(
                f"Moved a checkpoint that this run does not build on to {path}. Nothing deletes "
                "it there; move it back to use it again."
            )
        self._history_settled = True
        self._damaged = {}  # They were not loaded, so they are gone from here.
        self._saved_paths |= {checkpoint_id}

    def _clear_staging(self, checkpoint_id: str) -> None:
        """Remove what an earlier save left where this one is staged; nothing for one written in place."""

    def _clear_path(self, path: str) -> list[str]:
        """Make room for a save at ``path``; where what another history left there is now."""
        if not self._storage.isdir(path):
            require_no_lost_links(self._storage, [path])
            return []
        if not self._finder().is_complete_for_any(path):
            if found := marker_folders(self._storage, path):
                raise CheckpointReadError(
                    f"{path} holds {', '.join(found)} as a folder, where a checkpoint has a file. That is "
                    "no save that died, so it is not deleted. Move it away and start again."
                )
            self._remove(path)
            return []
        is_own = self._loaded_step is not None or path in self._saved_paths
        is_good = self._storage.isfile(f"{path}/{MANIFEST}") and path not in self._damaged
        if not is_own or not is_good:
            return [supersede(self._storage, self.folder, path)]
        aside = put_aside(self._storage, self.folder, path)
        self._expiring -= {aside}
        self._has_replaced = True
        logger.info(
            f"{path} is saved again: the one before waits in {aside} until that is complete."
        )
        return []

    def _leave_other_history(self) -> list[str]:
        if self._history_settled or self._loaded_step is None:
            return []
        moved: list[str] = []
        # More than once: what was in replaced/ may have hidden another one of the same step.
        while newer := self._newer_steps(self._loaded_step):
            found = supersede_newer(self._storage, self.folder, newer, than=self._loaded_step)
            for path in set(found) & set(newer.values()):
                logger.warning(
                    f"{path} belongs to a history that this run has left: {SUPERSEDED_RECORD} beside it "
                    "says that it does not count. Nothing deletes it."
                )
            moved += [path for path in found if path not in newer.values()]
        return moved

    def _newer_steps(self, step: int) -> dict[int, str]:
        found = self._finder().complete_steps(self.folder)
        return {newer: path for newer, path in found.items() if newer > step}

    def _delete_replaced(self) -> None:
        """Delete what waited in ``replaced/`` for a save that is complete now, or what is left of it."""
        aside = filesystem.join(self.folder, REPLACED)
        if not self._storage.isdir(aside):
            return
        waiting = set(self._waiting_steps().values())
        for step, path, _ in find_steps(self._storage, aside, parse=self._parse_step):
            if path in waiting or path in self._expiring or self._is_left_or_damaged(step, path):
                continue
            if self.purge_thread is not None and self.purge_thread.is_alive():
                self._expiring |= {path}
                self.purge_queue.put(path)
            else:
                self._remove(path, "whose step was saved again")
        self._remove_if_empty(aside)

    def _is_left_or_damaged(self, step: int, path: str) -> bool:
        # Of a step of the history that is about to be left every checkpoint is moved aside: nobody has read
        # the newer one. And where one was found damaged, the other may be all that there is.
        loaded = self._loaded_step
        is_left = loaded is not None and step > loaded and not self._history_settled
        return is_left or not self._damaged.keys().isdisjoint(
            (path, self._create_checkpoint_id(step))
        )

    def _waiting_steps(self) -> dict[int, str]:
        """The steps whose newest complete checkpoint is the one in ``replaced/``."""
        replaced = self._finder().replaced_steps(self.folder)
        found = self._own_folder().step_paths if replaced else {}
        return {step: path for step, path in replaced.items() if found.get(step) == path}

    def _put_back_replaced(self, *, but: str) -> list[str]:
        """Give what waits in ``replaced/`` its name back, except the one that is saved next.

        Returns where is now what another program or damage has left under that name.
        """
        moved = []
        for step, path in self._waiting_steps().items():
            target = self._create_checkpoint_id(step)
            if target == but:
                continue
            if self._storage.isdir(target):
                if self._finder().is_complete_for_any(target):
                    moved.append(supersede(self._storage, self.folder, target))
                else:
                    self._storage.remove(target)
            self._storage.move(path, target)
            self._damaged = {at: why for at, why in self._damaged.items() if at != target}
            logger.info(f"Moved {path} back to {target}: what was to replace it is of no use.")
            self._remove_if_empty(path.rpartition("/")[0])
        return moved

    def _remove_if_empty(self, folder: str) -> None:
        # Never queued: something may be moved into it before its turn comes.
        if not self._storage.listdir(folder):
            self._remove(folder, "which is empty")

    def _should_purge(self) -> bool:
        return self.keep_latest_k > 0 and dist.get_rank() == 0 and self._storage.isdir(self.folder)

    def _purge_stale_checkpoints(self, *, is_save_in_flight: bool = True) -> None:
        """Queue expired checkpoints for deletion, and delete at once what died; rank 0 only."""
        if not self._should_purge():
            return
        found = find_steps(self._storage, self.folder, parse=self._parse_step)
        left = superseded_names(self._storage, self.folder)
        skipped = {filesystem.join(self.folder, name) for name in left} | self._damaged.keys()
        purge = plan_purge(
            [entry for entry in found if entry[1] not in self._expiring | skipped],
            self.keep_latest_k,
            is_save_in_flight=is_save_in_flight,
            is_complete=self._finder().is_complete_for_any,
        )
        for path in purge.abandoned:
            self._remove(path)
        self._expiring |= frozenset(purge.expired)
        for path in purge.expired:
            self.purge_queue.put(path)

    def _remove(self, path: str, what: str = "left behind by a save that did not finish") -> None:
        try:
            self._storage.remove(path)
            logger.info(f"Deleted {path}, {what}.")
        except Exception as error:
            logger.warning(f"Could not delete {path}, {what}: {error}.")

    def _start_purging(self) -> None:
        """Start the thread that deletes; it belongs to a run that saves and keeps not everything."""
        arguments: tuple[Any, ...] = (self.purge_queue, self._storage.remove)
        self.purge_thread = threading.Thread(target=purge_thread, args=arguments, daemon=True)
        self.purge_thread.start()

    def _stop_purging(self) -> None:
        """Delete what is queued, then end the thread; give up after the limit."""
        # A disk that a save was given up on must not be waited for here.
        has_replaced = self._has_replaced and not self._gave_up
        self._has_replaced = False
        if has_replaced:
            self._delete_replaced()
        if self.purge_thread is not None and self.purge_thread.is_alive():
            self.purge_queue.put(None)
            self.purge_thread.join(self.timeout_seconds)
            if self.purge_thread.is_alive():
                # A daemon: it does not keep the process from ending.
                logger.warning(
                    f"Deleting expired checkpoints from {self.folder} was given up: "
                    f"{explanation(self.timeout_seconds)} What is left is deleted by a later run."
                )
                return
        if has_replaced:
            self._delete_replaced()  # the folder around what the thread has deleted
