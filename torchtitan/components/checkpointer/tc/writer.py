"""Write one rank's files of a checkpoint, and let it count only when all ranks have written.

    CheckpointWriter (the library's): files and metadata.pkl -> tmp_step-N -> barrier -> rename
    Writer: its barrier is a stop of commit.py, and what fails anywhere is told to the other ranks;
            every file is hashed on its way, and rank 0 writes manifest.json before the rename
            where a rename is a copy: files -> step-N, at the stop rank 0 adds metadata.pkl and manifest.json
            (so there a pre_finalize_callback, which comes before the stop, finds no metadata.pkl yet)

What fails once the checkpoint counts takes that back: its save has failed, as all ranks are told.

It runs in the writer process (writer_main.py) and, for saves that training waits for, in the trainer. There
the lock of the folder is looked at before a checkpoint is published or taken back. A writer process asks
only whether its trainer lives, which has looked when the save began: a run that hangs for longer than
``lock_timeout_seconds`` in the middle of a save may lose the folder unseen. It cannot overwrite what has
the name by then, but may take the markers away from it if its own rename fails right after it was done.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_checkpointing.checkpoint_base import CheckpointWriteInfo
from torch_checkpointing.checkpoint_layout import LayoutInfo
from torch_checkpointing.checkpoint_writer import (
    _temp_dir_path,
    CheckpointWriter,
    CheckpointWriterArgs,
)
from torch_checkpointing.storage.base_storage import Storage

from torchtitan.components.checkpointer.errors import error_of_system
from torchtitan.components.checkpointer.integrity.manifest import Head, Manifest, MANIFEST, render
from torchtitan.components.checkpointer.pinned.meeting import OtherRankFailedError
from torchtitan.components.checkpointer.tc.checked_storage import CheckedStorage
from torchtitan.components.checkpointer.tc.commit import (
    Commit,
    CommitBarrier,
    CommitBarrierConfig,
    Files,
)
from torchtitan.components.checkpointer.tc.compact import compact
from torchtitan.components.checkpointer.tc.index import MARKER
from torchtitan.components.checkpointer.tc.storage import renames_at_once
from torchtitan.tools.logging import logger


def anybody() -> None:
    """The check of a writer that nobody can outlive."""


def _nothing_known() -> None:
    """The head of a checkpoint that gets no manifest."""


def require_checkpoint(storage: Storage, path: str) -> None:
    """Check that ``storage`` has what was written at ``path``.

    Raises:
        FileNotFoundError: it has not.
    """
    if not storage.exists(Path(path)):
        raise FileNotFoundError(
            f"{path} was written and is not there; the storage must be one that this process and the one "
            "that writes see alike, and nobody else may delete from it"
        )


class Writer(CheckpointWriter):
    """Writes saves one after the other, each of them with a commit of its own."""

    def __init__(
        self,
        args: CheckpointWriterArgs,
        new_commit: Callable[[], Commit],
        may_publish: Callable[[], None] = anybody,
        find_head: Callable[[], Head | None] = _nothing_known,
    ) -> None:
        """
        Args:
            may_publish: called before the final name; what it raises prevents that.
            find_head: says what is saved, when a save begins; None is a checkpoint without a manifest, of
                which no digests are taken.
        """
        is_committed = args.config.barrier_config is not None
        barrier = CommitBarrierConfig() if is_committed else None
        super().__init__(replace(args, config=replace(args.config, barrier_config=barrier)))
        if not renames_at_once(self._storage):
            # File by file it would lead over a half checkpoint that has its final name and its marker.
            in_place = replace(self._args.config, write_to_temp_dir=False)
            self._args = replace(self._args, config=in_place)
        num_ranks = args.rank_info.role_world_size
        self._checked = CheckedStorage(self._storage, num_ranks=num_ranks)
        self._storage: Storage = self._checked
        self._new_commit = new_commit
        self._may_publish = may_publish
        self._find_head = find_head
        self._held: bytes | None = None
        """What becomes metadata.pkl when all ranks have written."""

        self._may_count = False
        """Whether the save has come so far that its checkpoint may be complete."""

    def write(self, path: str, checkpoint_info: CheckpointWriteInfo) -> None:
        """Write the checkpoint at ``path``; returns when it is durable on all ranks.

        Raises:
            OtherRankFailedError: another rank failed.
        """
        self._checked.forget_written()  # what a save that failed has left
        folder, head = self._folder(path), self._find_head()
        self._checked.takes_digests = head is not None
        barrier = self._barrier
        if not isinstance(barrier, CommitBarrier):
            self._may_count = True
            with self._undone_by(Exception, path, folder):
                super().write(path, checkpoint_info)
                written = self._checked.written_below(Path(path))
                self._write_manifest(Path(path), head, written)
            return

        def prepare(files: Files) -> None:
            if self._args.config.write_to_temp_dir:
                self._write_manifest(folder, head, files)
                self._may_publish()  # last, because everything before it takes its time
                self._may_count = True
            else:
                self._may_publish()
                self._may_count = True
                self._complete_in_place(folder, head, files)

        self._may_count = False
        barrier.commit = commit = self._new_commit()
        barrier.written = lambda: self._checked.written_below(folder)
        barrier.prepare = prepare
        try:
            with self._undone_by(Exception, path, folder):
                super().write(path, checkpoint_info)
                if self._args.rank_info.role_rank == 0:
                    # Of files that were taken away meanwhile the library renames none, and says nothing.
                    require_checkpoint(self._storage, path)
            # If the connection is lost here nobody knows how it ended, and it may be complete for all.
            with self._undone_by(OtherRankFailedError, path, folder):
                commit.publish()
        except BaseException as error:
            commit.fail(error)
            raise

    def _folder(self, path: str) -> Path:
        """Where the files lie until they are published."""
        config = self._args.config
        if not config.write_to_temp_dir:
            return Path(path)
        return _temp_dir_path(Path(path), config.temp_dir_prefix)

    def _write_manifest(self, folder: Path, head: Head | None, files: Files) -> None:
        if head is not None and self._args.rank_info.role_rank == 0:
            self._storage.write(folder / MANIFEST, render(Manifest(head, dict(files))))

    def _write_metadata(
        self, dir_path: Path, serialized_distributed_metadata: bytes | None = None
    ) -> None:
        if self._barrier is None or self._args.config.write_to_temp_dir:
            super()._write_metadata(dir_path, serialized_distributed_metadata)
        else:
            # In its final place it would make the checkpoint complete before all ranks have written.
            self._held = serialized_distributed_metadata

    def _complete_in_place(self, folder: Path, head: Head | None, files: Files) -> None:
        if self._args.rank_info.role_rank != 0:
            return
        super()._write_metadata(folder, self._held)
        self._held = None
        self._write_manifest(folder, head, {**files, **self._checked.written_below(folder)})

    @contextmanager
    def _undone_by(self, errors: type[Exception], path: str, folder: Path) -> Generator[None]:
        """Let nothing of the block count that ends with one of ``errors``.

        What interrupts it is no such thing: a checkpoint that is complete then may stay, as after a crash.
        """
        try:
            yield
        except errors:
            if self._may_count and self._args.rank_info.role_rank == 0:
                self._take_back(Path(path), folder)
            raise

    def _take_back(self, path: Path, folder: Path) -> None:
        """Remove what makes ``path`` complete, which may be there or not; never an error of its own."""
        try:
            if folder != path and self._storage.exists(folder):
                return  # it has not got its name
            # By now the directory may belong to another run, which has gone on without this one.
            self._may_publish()
            # A marker alone is a checkpoint that nobody can verify, a manifest alone is a damaged one.
            for name in (MANIFEST, MARKER):
                _remove(self._storage, path / name)
        except Exception as error:
            logger.warning(
                f"The save to {path} failed, and what names it as complete stays there: {error!r}. "
                "Delete the directory if it is not wanted."
            )

    def _write_key(
        self, key: str, layout_info: LayoutInfo, full_path: Path, data_to_serialize: Any
    ) -> None:
        # Not earlier: what fails here is told to the other ranks, and one file needs least memory.
        content = compact(data_to_serialize)
        try:
            super()._write_key(key, layout_info, full_path, content)
        except RuntimeError as error:
            # torch's archive writer fails once more when it closes the file, and says nothing of the disk.
            if (found := error_of_system(error)) is not None:
                raise found from error
            raise


def _remove(storage: Storage, path: Path) -> None:
    try:
        if storage.exists(path):
            storage.delete(path)
    except Exception:
        # A disk that does not sync may still have taken the name away, and that is what counts.
        if storage.exists(path):
            raise
