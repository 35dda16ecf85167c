"""Get the folder of a run ready for a save, and delete what has expired.

Rank 0 acts, while no save is in flight. Histories are settled first: retention must not count the
checkpoints of a future that this run has left.

    base.save -> _make_ready -> leave the other history -> retention -> clear the path of the save
"""

import queue
import threading
from typing import Any

import torch
import torch.distributed

from torchtitan.components.checkpointer import discovery
from torchtitan.components.checkpointer.agreement import rank_zero_decides
from torchtitan.components.checkpointer.folder_view import FolderView
from torchtitan.components.checkpointer.history import supersede, supersede_newer
from torchtitan.components.checkpointer.retention import plan_purge, purge_thread
from torchtitan.components.checkpointer.waiting import explanation
from torchtitan.tools.logging import logger


class Housekeeping(FolderView):
    """A base of the managers, see the top of the file."""

    keep_latest_k: int
    timeout_seconds: float = 600
    purge_queue: "queue.Queue[str | None]"
    purge_thread: threading.Thread | None

    _loaded_step: int | None
    """The step that this run goes on from, 0 for none; None before anything was loaded."""

    _history_settled: bool

    # Queued for deletion: a directory that is half gone must not be taken for a save that died.
    _expiring: frozenset[str] = frozenset()

    def _make_ready(
        self,
        checkpoint_id: str,
        group: "torch.distributed.ProcessGroup | None",
        *,
        with_retention: bool,
    ) -> None:
        """Get the folder ready for a save: rank 0 acts, and an error there is one on all ranks.

        Call it while no save is in flight.
        """

        def act() -> list[str]:
            moved = self._leave_other_history()
            if with_retention:
                self._purge_stale_checkpoints(is_save_in_flight=False)
            self._clear_staging(checkpoint_id)
            if self._storage.isdir(checkpoint_id):
                if self._finder().is_complete_for_any(checkpoint_id):
                    moved.append(supersede(self._storage, self.folder, checkpoint_id))
                else:
                    self._remove_abandoned(checkpoint_id)
            return moved

        for path in rank_zero_decides(act, group):
            logger.warning(
                f"Moved a checkpoint that this run does not build on to {path}. Nothing deletes "
                "it there; move it back to use it again."
            )
        self._history_settled = True

    def _clear_staging(self, checkpoint_id: str) -> None:
        """Remove what an earlier save left where this one is staged; nothing for one written in place."""

    def _leave_other_history(self) -> list[str]:
        if self._history_settled or self._loaded_step is None:
            return []
        steps = self._finder().complete_steps(self.folder)
        return supersede_newer(self._storage, self.folder, steps, than=self._loaded_step)

    def _should_purge(self) -> bool:
        return (
            self.keep_latest_k > 0
            and torch.distributed.get_rank() == 0
            and self._storage.isdir(self.folder)
        )

    def _purge_stale_checkpoints(self, *, is_save_in_flight: bool = True) -> None:
        """Queue expired checkpoints for deletion, and delete at once what died; rank 0 only."""
        if not self._should_purge():
            return
        found = discovery.find_steps(self._storage, self.folder, parse=self._parse_step)
        purge = plan_purge(
            [entry for entry in found if entry[1] not in self._expiring],
            self.keep_latest_k,
            is_save_in_flight=is_save_in_flight,
            is_complete=self._finder().is_complete_for_any,
        )
        for path in purge.abandoned:
            self._remove_abandoned(path)
        self._expiring |= frozenset(purge.expired)
        for path in purge.expired:
            self.purge_queue.put(path)

    def _remove_abandoned(self, path: str) -> None:
        try:
            self._storage.remove(path)
            logger.info(f"Deleted {path}, left behind by a save that did not finish.")
        except Exception as error:
            logger.warning(f"Could not delete the unfinished checkpoint {path}: {error}.")

    def _start_purging(self) -> None:
        """Start the thread that deletes; it belongs to a run that saves and keeps not everything."""
        arguments: tuple[Any, ...] = (self.purge_queue, self._storage.remove)
        self.purge_thread = threading.Thread(target=purge_thread, args=arguments, daemon=True)
        self.purge_thread.start()

    def _stop_purging(self) -> None:
        """Delete what is queued, then end the thread; give up after the limit."""
        if self.purge_thread is not None and self.purge_thread.is_alive():
            self.purge_queue.put(None)
            self.purge_thread.join(self.timeout_seconds)
            if self.purge_thread.is_alive():
                # A daemon: it does not keep the process from ending.
                logger.warning(
                    f"Deleting expired checkpoints from {self.folder} was given up: "
                    f"{explanation(self.timeout_seconds)} What is left is deleted by a later run."
                )
