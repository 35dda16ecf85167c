"""Whether there is room for a save, before anything of it is written; rank 0 only.

What an earlier save of this run did not finish goes first, whatever retention says: after a disk was
full it may be all that is in the way. What is queued for deletion is waited for, and until the disk counts it
as free, before it is said that there is too little. Of a disk that cannot tell how much is free nothing is asked.

    housekeeping._make_ready -> _sweep_unfinished ... _require_room -> the save begins
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.components.checkpointer.deletions import is_pinned, PIN
from torchtitan.components.checkpointer.discovery import find_steps, parse_step
from torchtitan.components.checkpointer.errors import CheckpointError, CheckpointSaveError
from torchtitan.components.checkpointer.history import SUPERSEDED
from torchtitan.components.checkpointer.in_flight import saving
from torchtitan.components.checkpointer.integrity.manifest import read as read_manifest
from torchtitan.components.checkpointer.purging import Purging
from torchtitan.components.checkpointer.retention import Retention
from torchtitan.components.checkpointer.space import Kept, refusal, state_bytes
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

_AMPLE = 4
"""With room for so many saves as large as the last one, it is not counted how large the next one is."""

_LATE_SECONDS = 30
"""What was deleted may be counted as free so much later: btrfs commits every 30 s, ZFS every 5 s."""

_PAUSE_SECONDS = 0.5


class RoomCheck(Purging):
    """A base of the managers, see the top of the file."""

    last_save_model_only: bool = False
    export_dtype: torch.dtype = torch.float32

    _begun: frozenset[str] = frozenset()
    """The saves of this run of which it has not been seen that they are complete."""

    _saved_bytes: int = 0
    """How large a full save of this run was, 0 until that is known."""

    _needed_bytes: int = 0
    """What the largest save so far needed, 0 before it was counted."""

    def _sweep_unfinished(self) -> None:
        """Delete what saves of this run have left that failed; no save may be in flight."""
        finder = self._finder()
        done = {path for path in self._begun if finder.is_complete_for_any(path)}
        if done and not self._saved_bytes:
            self._saved_bytes = self._size_of_full(max(done, key=self._step_of))
        self._begun -= done
        if not self._begun or not self._storage.isdir(self.folder):
            return
        failed = {self._step_of(path): path for path in self._begun}
        found = find_steps(self._storage, self.folder, parse=self._parse_step)
        for step, path, is_staging in found:
            if step not in failed or is_pinned(self._storage, path):
                continue
            if is_staging or not finder.is_complete_for_any(path):
                self._remove(path, "left behind by a save of this run that failed")
                if self._storage.isdir(path):
                    failed.pop(step)  # it is tried again
        self._begun -= set(failed.values())

    def _require_room(self, checkpoint_id: str, *, is_last: bool) -> None:
        """Check that the save to ``checkpoint_id`` fits on the disk.

        Raises:
            CheckpointSaveError: it does not, as far as the disk tells; says what could be done.
        """
        free = self._free_bytes()
        # To count the tensors of a large model takes milliseconds, for which training would wait.
        known = max(self._needed_bytes, self._saved_bytes)
        if free is None or (known and free >= _AMPLE * known):
            return
        needed = self._bytes_to_save(model_only=is_last and self.last_save_model_only)
        self._needed_bytes = max(self._needed_bytes, needed)
        if free < needed:
            if is_last:
                # Retention has not looked: nothing more than this save would need the room.
                self._purge_stale_checkpoints(is_save_in_flight=False)
            self._wait_for_deletions()
            free = self._free_in_the_end(needed)  # also if the last one was over before that
        if free is None or free >= needed:
            return
        asked = saving(self._step_of(checkpoint_id), checkpoint_id)
        older, superseded = list(self._older()), self._size_bytes(SUPERSEDED)
        raise CheckpointSaveError(
            refusal(
                asked, self.folder, needed=needed, free=free, older=older, superseded=superseded
            )
        )

    def _bytes_to_save(self, *, model_only: bool) -> int:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        states: dict[str, Any] = getattr(self, "states", {})
        if model_only:
            return state_bytes(states, world_size=world_size, export_dtype=self.export_dtype)
        # What this run has saved is the better measure, but it may have grown since.
        return max(state_bytes(states, world_size=world_size), self._saved_bytes)

    def _size_of_full(self, path: str) -> int:
        # Of no other run: its state may have been larger, and to refuse what fits is worse than to try.
        try:
            manifest = read_manifest(self._storage, path)
        except (CheckpointError, OSError):
            return 0
        if manifest is None or manifest.head.kind != "full":
            return 0
        return sum(file.size_bytes for file in manifest.files.values())

    def _free_bytes(self) -> int | None:
        # Not all storages know, and a disk that does not answer will say so when it is written to.
        ask = getattr(self._storage, "free_bytes", None)
        try:
            return None if ask is None else ask(self.folder)
        except OSError:
            return None

    def _free_in_the_end(self, needed: int) -> int | None:
        """What is free as soon as it is enough, or when what was deleted must have become free."""
        while True:
            free = self._free_bytes()
            left = min(_LATE_SECONDS - self._deletions.idle_seconds, self._left_seconds)
            if free is None or free >= needed or left <= 0:
                return free
            time.sleep(min(_PAUSE_SECONDS, left))

    def _wait_for_deletions(self) -> None:
        """Let what is queued be deleted, as far as it is in time."""
        paths, thread = self.purge_queue, self.purge_thread
        if thread is None or not thread.is_alive() or not paths.unfinished_tasks:
            return
        logger.info(
            f"Waiting for expired checkpoints to be deleted from {self.folder}: it is full."
        )
        with paths.all_tasks_done:
            paths.all_tasks_done.wait_for(lambda: not paths.unfinished_tasks, self._left_seconds)

    def _older(self) -> Iterator[Kept]:
        """What the smallest retention would leave no place for, and what keeps it here."""
        try:
            entries = self._entries()
        except (OSError, CheckpointError):
            return  # no folder yet; and whatever is wrong with it, there is too little room
        smallest = Retention(keep_latest=2)
        bare = [replace(entry, is_pinned=False, is_protected=False) for entry in entries]
        could_go = smallest.plan(bare, is_save_in_flight=False).expired
        go = replace(smallest, keep_every=self.keep_every).plan(entries, is_save_in_flight=False)
        for entry in entries:
            if entry.path not in could_go:
                continue
            why = ""
            if entry.is_pinned:
                why = f"a file {PIN}"
            elif entry.is_protected:
                why = "--checkpoint.initial_load_path"
            elif entry.path not in go.expired:
                why = "--checkpoint.keep_every"
            name = entry.path.removeprefix(f"{self.folder}/")
            yield Kept(name=name, size_bytes=self._size_bytes(name), why=why)

    @staticmethod
    def _step_of(path: str) -> int:
        step = parse_step(path.rpartition("/")[2])
        return -1 if step is None else step

    def _size_bytes(self, name: str) -> int:
        try:
            return self._storage.size_bytes(filesystem.join(self.folder, name))
        except (OSError, CheckpointError):
            return 0  # it is not there, or does not tell
