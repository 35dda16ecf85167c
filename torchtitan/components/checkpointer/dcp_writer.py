"""The bytes of a checkpoint through torch.distributed.checkpoint, made durable and known by digest.

DCP syncs each file, or most of it, but not the directories that name them, so after a power cut a
checkpoint it called complete can be missing. Here all is synced, and in this order:

    every rank: data files, then their directory -> rank 0: .metadata, directory, parent directory
        -> rank 0: manifest.json, directory

``.metadata`` makes the checkpoint complete for DCP. The manifest says what every file held when it was
written; without it the checkpoint is one that nobody can verify. The digests of a rank's files are taken
while they are written, and travel to rank 0 with what DCP gathers anyway. What changes the disk goes
through ``tools/disk.py``.
"""

import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem
from torch.distributed.checkpoint.metadata import Metadata, STATE_DICT_TYPE, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan.components.checkpointer.dcp_index import MARKER
from torchtitan.components.checkpointer.dcp_screening import require_plain_items
from torchtitan.components.checkpointer.errors import error_of_system
from torchtitan.components.checkpointer.integrity.digests import FileDigest, HashingStream
from torchtitan.components.checkpointer.integrity.manifest import Head, Manifest, MANIFEST, render
from torchtitan.tools import disk, filesystem
from torchtitan.tools.errors import portable
from torchtitan.tools.logging import logger


class CopyingStager:
    """Copies a state dict into CPU memory that is kept from one save to the next.

    DCP's own default makes new memory for every save and gives it back afterwards, which costs
    page faults in the training thread each time. The price is one copy of this rank's state held
    for the whole run. The previous save must be durable before the next one is staged.
    """

    def __init__(self) -> None:
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """A copy of ``state_dict`` whose tensors lie in CPU memory of their own."""
        staged = self._stager.stage(state_dict)
        assert isinstance(staged, dict)
        return staged

    def close(self) -> None:
        """Free the memory."""
        self._stager.close()


class _Open:
    """A file as DCP gets it, which closes it before it can be synced: here it stays open."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.write = stream.write
        """Of the stream itself: there are many small ones."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def close(self) -> None:
        self._stream.flush()


def _made(path: str) -> BinaryIO:
    """A new file. The folder of a save is made for it, so one that is there is a later run's.

    This rank is then one of a run that is over, and has waited for its disk since; the later run may have
    called that file part of a checkpoint. The lock of the folder is held by rank 0, and stops no other rank.

    Raises:
        FileExistsError: says what it may come from.
    """
    try:
        return disk.current().create(path, exclusive=True)
    except FileExistsError as error:
        why = f"{error.strerror}, made meanwhile by another run; see whether a process of an earlier one still lives"
        raise FileExistsError(error.errno, why, path) from None


class CommittingFileSystem(FileSystem):
    """DCP's local file system, which syncs and digests files, and asks before one gets its name."""

    def __init__(self, *, takes_digests: bool = True) -> None:
        """Without ``takes_digests`` what is written passes untouched."""
        self._takes_digests = takes_digests
        self.before_rename: Callable[[], None] | None = None
        self.digests: dict[str, FileDigest] = {}
        """Of each file that was written through this object, by name."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _made(os.fspath(path)) as file:
            hashing = HashingStream(file) if self._takes_digests else None
            yield _Open(hashing or file)
            # Not left to DCP, which forgets what Python still holds back: a small .metadata is all of it.
            disk.current().sync(file)
        if hashing is not None:
            self.digests[Path(path).name] = hashing.digest()

    def require_may_commit(self) -> None:
        """Raises whatever forbids that a checkpoint is made complete, or taken back, any more."""
        if self.before_rename is not None:
            self.before_rename()

    def rename(self, path: Any, new_path: Any) -> None:
        self.require_may_commit()
        disk.current().rename(os.fspath(path), os.fspath(new_path))
        if (digest := self.digests.pop(Path(path).name, None)) is not None:
            self.digests[Path(new_path).name] = digest

    def mkdir(self, path: Any) -> None:
        filesystem.makedirs(os.fspath(path))

    def rm_file(self, path: Any) -> None:
        disk.current().unlink(os.fspath(path))


class Written(list[WriteResult]):
    """What one rank has written; DCP gathers these, so the digests need no way of their own."""

    def __init__(self, results: Iterable[WriteResult], digests: dict[str, FileDigest]) -> None:
        super().__init__(results)
        self.digests = digests


class DurableFileSystemWriter(FileSystemWriter):
    """DCP's file writer that syncs directories, stages through a kept copy and leaves a manifest."""

    def __init__(
        self, path: str, *, stager: CopyingStager | None = None, head: Head | None = None
    ) -> None:
        """``head`` begins the manifest; without one there is none, and no digest is taken."""
        super().__init__(path, sync_files=False)  # self.fs does
        self.fs = CommittingFileSystem(takes_digests=head is not None)
        self._kept_stager = stager
        self._head = head
        self._refusal: BaseException | None = None
        self.has_met_others = False
        """This rank is where DCP gathers the errors of all."""

    def commit_only_if(self, check: Callable[[], None]) -> None:
        """Call ``check`` immediately before ``.metadata`` gets its name, or has it taken away again.

        What it raises prevents that.
        """
        self._committing_fs().before_rename = check

    def refuse(self, error: Exception) -> None:
        """Fail with ``error``, once all ranks hear of it: what this one was to write cannot be had."""
        self._refusal = portable(error)  # a process of its own may write

    def storage_meta(self) -> StorageMeta | None:
        """Called first of all where DCP gathers errors."""
        self.has_met_others = True
        return super().storage_meta()

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """Called by ``async_save`` in the training thread."""
        if self._refusal is not None:
            return {}
        if self._kept_stager is None:
            return super().stage(state_dict)
        # The copies are in CPU memory already; writing needs no second look-ahead buffer.
        self.per_thread_copy_ahead = 0
        return self._kept_stager.stage(state_dict)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the directory; the names of parents that were missing become durable too."""
        if self._refusal is not None:
            raise self._refusal
        filesystem.makedirs(os.fspath(self.path))
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Rank 0 only, before any rank writes: what lies there stops being a checkpoint, and goes."""
        # By now the directory may be another run's, which has gone on without this one.
        self._committing_fs().require_may_commit()
        folder = os.fspath(self.path)
        data = sorted(glob(f"*{DEFAULT_SUFFIX}", root_dir=folder))
        for name in (MANIFEST, MARKER, f"{MARKER}.tmp", *data):
            filesystem.remove_file(f"{folder}/{name}")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, and return once their names are durable as well.

        Raises:
            ValueError: no load would take something in them back; nothing is written then.
        """
        require_plain_items(plan, planner)
        try:
            written = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            # torch's archive writer fails once more when it closes the file; alone, that error
            # would reach the other ranks, and it does not say that the disk is full.
            if (found := error_of_system(error)) is not None:
                raise found from error
            raise
        filesystem.fsync_dir(os.fspath(self.path))
        results: Future[list[WriteResult]] = Future()
        results.set_result(Written(written, self._committing_fs().digests))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0 only, after every rank's ``write_data``: make the checkpoint complete."""
        try:
            super().finish(metadata, results)
            filesystem.fsync_dir(os.fspath(self.path))
            filesystem.fsync_dir(os.path.dirname(os.fspath(self.path)))
            if self._head is not None:
                self._write_manifest(self._head, results)
        except BaseException:
            # The save has failed, as its caller is told; so it must not count as a checkpoint.
            self._take_back()
            raise

    def _take_back(self) -> None:
        """Remove what names the checkpoint, which may be there or not; never an error of its own."""
        folder = os.fspath(self.path)
        try:
            # By now the directory may belong to another run, which has gone on without this one.
            self._committing_fs().require_may_commit()
            # A marker alone is a checkpoint that nobody can verify, a manifest alone is a damaged one.
            for name in (MANIFEST, f"{MANIFEST}.tmp", MARKER):
                _remove(f"{folder}/{name}")
        except Exception as error:
            logger.warning(
                f"The save to {folder} failed, and what names it as complete stays there: {error!r}. "
                "Delete the directory if it is not wanted."
            )

    def _write_manifest(self, head: Head, results: list[list[WriteResult]]) -> None:
        files = {MARKER: self._committing_fs().digests[MARKER]}
        for written in results:
            assert isinstance(written, Written)
            files |= written.digests
        content = render(Manifest(head=head, files=files))
        # Nobody is asked any more: the checkpoint is complete, and only becomes one to verify.
        filesystem.write_bytes(f"{os.fspath(self.path)}/{MANIFEST}", content)

    def _committing_fs(self) -> CommittingFileSystem:
        assert isinstance(self.fs, CommittingFileSystem)
        return self.fs


def _remove(path: str) -> None:
    try:
        filesystem.remove_file(path)
    except OSError:
        # A disk that does not sync may still have taken the name away, and that is what counts.
        if os.path.lexists(path):
            raise
