"""Get the folder of a run ready for a save, and delete what has expired.

Rank 0 acts, while no save is in flight. Histories are settled first: retention must not count the
checkpoints of a future that this run has left.

    base.save -> _make_ready -> end what was replaced -> leave the other history -> put back what was
                 replaced in vain -> retention -> clear the path of the save -> is there room for it

At every point in between the newest checkpoint that this run may go on from is there and is found.
"""

import time
from collections.abc import Iterable, Mapping

import torch.distributed as dist

from torchtitan.components.checkpointer.agreement import rank_zero_decides
from torchtitan.components.checkpointer.claiming import Claiming
from torchtitan.components.checkpointer.deletions import is_pinned
from torchtitan.components.checkpointer.discovery import find_steps, require_no_lost_links
from torchtitan.components.checkpointer.errors import CheckpointInUseError, CheckpointReadError
from torchtitan.components.checkpointer.formats import marker_folders
from torchtitan.components.checkpointer.history import (
    free_name,
    put_aside,
    REPLACED,
    supersede,
    supersede_newer,
    SUPERSEDED_RECORD,
)
from torchtitan.components.checkpointer.integrity.manifest import MANIFEST
from torchtitan.components.checkpointer.room_check import RoomCheck
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger


def _told_of_move(path: str, damaged: Iterable[str]) -> str:
    """That a checkpoint, maybe one of those found ``damaged``, is at ``path`` now."""
    name = path.rpartition("/")[2].partition(".")[0]  # step-7.2 is the second step-7 there
    if name in {each.rpartition("/")[2] for each in damaged}:
        return f"Moved the damaged checkpoint {name} to {path}. Nothing loads or deletes it there."
    return (
        f"Moved a checkpoint that this run does not build on to {path}. Nothing deletes it there; move it "
        "back to use it again."
    )


class Housekeeping(Claiming, RoomCheck):
    """A base of the managers, see the top of the file."""

    _loaded_step: int | None
    """The step that this run goes on from, 0 for none; None before anything was loaded."""

    _history_settled: bool

    _damaged: Mapping[str, str]
    _saved_paths: frozenset[str] = frozenset()
    _has_replaced: bool = False
    _is_folder_synced: bool = False
    _gave_up: bool = False
    """Whether a save was given up, which then may still be running."""

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
            # The other ranks wait as long as the limit, and are to hear what went wrong.
            self._ready_by = time.monotonic() + self.timeout_seconds / 2
            self._require_claim()
            self._sync_folder()
            self._deletions.begin_cycle()
            self._sweep_unfinished()
            self._delete_replaced()
            moved = self._leave_other_history()
            moved += free_name(self._storage, self.folder, checkpoint_id)
            moved += self._put_back_replaced(but=checkpoint_id)
            if with_retention:
                self._sweep_half_deleted()
                self._purge_stale_checkpoints(is_save_in_flight=False)
            moved += self._clear_staging(checkpoint_id)
            moved += self._clear_path(checkpoint_id)
            self._forget_kind(checkpoint_id)
            self._require_room(checkpoint_id, is_last=not with_retention)
            self._begun |= {checkpoint_id}
            return moved

        damaged = self._damaged  # what is put back in their place takes them out of it
        for path in rank_zero_decides(act, group):
            logger.warning(_told_of_move(path, damaged))
        self._history_settled = True
        self._damaged = {}  # They were not loaded, so they are gone from here.
        self._saved_paths |= {checkpoint_id}

    def _sync_folder(self) -> None:
        """Make the names in the folder durable, once: a run that was killed may just have made one.

        What is moved into ``replaced/`` would else be gone with it after a power cut.
        """
        if self._is_folder_synced or not getattr(self._storage, "has_files", False):
            return
        self._is_folder_synced = True  # told once
        try:
            if self._storage.isdir(self.folder):
                filesystem.fsync_dir(self.folder)
        except OSError as error:
            logger.warning(
                f"The names in {self.folder} could not be synced: {error}. A power cut may take away what "
                "an earlier run has saved there. Look whether the disk is in order."
            )

    def _clear_staging(self, checkpoint_id: str) -> list[str]:
        """Remove what an earlier save left where this one is staged; where is now what had to be kept."""
        return []  # nothing for one that is written in place

    def _clear_path(self, path: str) -> list[str]:
        """Make room for a save at ``path``; where what another history left there is now."""
        self._deletions.withdraw(path, self._left_seconds)  # else the new one would be deleted
        if not self._storage.isdir(path):
            require_no_lost_links(self._storage, [path])
            self._put_file_aside(path)
            return []
        if not self._finder().is_complete_for_any(path):
            if found := marker_folders(self._storage, path):
                raise CheckpointReadError(
                    f"{path} holds {', '.join(found)} as a folder, where a checkpoint has a file. That is "
                    "no save that died, so it is not deleted. Move it away and start again."
                )
            return self._clear_leftover(path)
        is_own = self._loaded_step is not None or path in self._saved_paths
        # Where another one waits and is gone on from, this one was to replace it, and nobody has called it saved.
        has_failed = self._step_of(path) in self._waiting_steps()
        if not is_own or has_failed or path in self._damaged:
            return [supersede(self._storage, self.folder, path)]
        self._free_replaced(path)
        aside = put_aside(self._storage, self.folder, path)
        self._has_replaced = True
        logger.info(
            f"{path} is saved again: the one before waits in {aside} until that is complete."
        )
        return []

    def _put_file_aside(self, path: str) -> None:
        """Make room where a file lies: whose it is nobody knows, and each start would come to it and end."""
        if self._storage.isfile(path):
            kept = supersede(self._storage, self.folder, path)
            logger.warning(f"{path} was a file, in the place of a checkpoint. It is now {kept}.")

    def _free_replaced(self, path: str) -> None:
        """End the deletion of what ``path`` itself has replaced: two cannot wait under one name."""
        before = filesystem.join(self.folder, f"{REPLACED}/{path.rpartition('/')[2]}")
        if self._deletions.withdraw(before, self._left_seconds):
            self._remove(before, "whose step was saved again")

    def _clear_leftover(self, path: str) -> list[str]:
        """Delete what a save or a deletion has left at ``path``, or move it aside; where it is then."""
        if not is_pinned(self._storage, path):
            self._remove_leftover(path)
        # What is pinned stays, and so does what cannot be deleted: nothing is written into it.
        return [supersede(self._storage, self.folder, path)] if self._storage.isdir(path) else []

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
            # Also of an earlier run, which was to save that step: this one may do so now.
            self._has_replaced |= path in waiting
            is_going = path in self._deletions.waiting
            if path in waiting or is_going or self._is_left_or_damaged(step, path):
                continue
            if self._is_wanted(step, path):
                self._keep_replaced(path)
            elif self.purge_thread is not None and self.purge_thread.is_alive():
                self._delete_beside_training(path)
                self._has_replaced = True  # the folder around it goes at the end of the run
            else:
                self._remove(path, "whose step was saved again")
        self._remove_if_empty(aside)

    def _is_wanted(self, step: int, path: str) -> bool:
        """Whether what ``path`` in ``replaced/`` holds stays.

        It is pinned, or was begun from by its name; or it has no manifest, and another program may have
        saved it. So has one whose run was killed right before that: it may be all there is to go on from.
        """
        is_protected = self._is_protected(self._create_checkpoint_id(step))
        is_whole = not self._finder().is_half_deleted(path)
        is_complete = self._finder().is_complete_for_any(path)
        is_foreign = is_complete and not self._storage.isfile(f"{path}/{MANIFEST}")
        return is_whole and (is_protected or is_foreign or is_pinned(self._storage, path))

    def _keep_replaced(self, path: str) -> None:
        try:
            kept = supersede(self._storage, self.folder, path)
            logger.info(f"{path} was saved again. It is not deleted, and is now {kept}.")
        except OSError as error:
            logger.warning(f"{path}, whose step was saved again, stays there: {error}.")

    def _is_left_or_damaged(self, step: int, path: str) -> bool:
        # Of a step of the history that is about to be left every checkpoint is moved aside: nobody has read
        # the newer one. And where one was found damaged, or has failed and is complete, the other may be all
        # that there is. What is not complete is what a deletion has left.
        loaded = self._loaded_step
        is_left = loaded is not None and step > loaded and not self._history_settled
        is_left = is_left and self._finder().is_complete_for_any(path)
        newer = self._create_checkpoint_id(step)
        is_doubtful = newer in self._doubtful
        return is_left or is_doubtful or not self._damaged.keys().isdisjoint((path, newer))

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
                    moved += self._clear_leftover(target)
            self._put_file_aside(target)
            self._storage.move(path, target)
            self._forget_kind(target)
            self._damaged = {at: why for at, why in self._damaged.items() if at != target}
            logger.info(f"Moved {path} back to {target}: what was to replace it is of no use.")
            self._remove_if_empty(path.rpartition("/")[0])
        return moved

    def _remove_if_empty(self, folder: str) -> None:
        # Never queued: something may be moved into it before its turn comes.
        if not self._storage.listdir(folder):
            self._remove(folder, "which is empty")

    def _require_claim(self) -> None:
        try:
            super()._require_claim()
        except CheckpointInUseError:
            self._leave_to_others()
            raise
        if self._lock is not None:
            self._deletions.is_ours = self._lock.is_ours

    def _leave_to_others(self) -> None:
        """Delete nothing more: what was to go may be what another run goes on from by now."""
        self._has_replaced = False
        with self._nothing_is_deleted():
            pass

    def _stop_purging(self) -> None:
        """Delete what is queued, then end the thread; give up after the limit."""
        if self._has_lost_folder():
            self._leave_to_others()
        # A disk that a save was given up on must not be waited for here.
        has_replaced = self._has_replaced and not self._gave_up
        self._has_replaced = False
        if has_replaced:
            self._delete_replaced()
        if self._end_purging() and has_replaced:
            self._delete_replaced()  # the folder around what the thread has deleted
