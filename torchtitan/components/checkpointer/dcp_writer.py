"""The bytes of a checkpoint through torch.distributed.checkpoint, made durable.

DCP syncs each file but not the directories that name them, so after a power cut a checkpoint it
called complete can be missing. Here the names are synced too, and in this order:

    every rank: data files, then their directory -> rank 0: .metadata, directory, parent directory

``.metadata`` is written last and makes the checkpoint complete.
"""

import os
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, STATE_DICT_TYPE
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan.tools import filesystem


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


class CommittingFileSystem(FileSystem):
    """DCP's local file system, with a last question before a file gets its final name."""

    before_rename: Callable[[], None] | None = None

    def rename(self, path: Any, new_path: Any) -> None:
        if self.before_rename is not None:
            self.before_rename()
        super().rename(path, new_path)


class DurableFileSystemWriter(FileSystemWriter):
    """DCP's file writer that syncs directories and stages through a kept copy."""

    def __init__(self, path: str, *, stager: CopyingStager | None = None) -> None:
        super().__init__(path)
        self.fs = CommittingFileSystem()
        self._kept_stager = stager

    def commit_only_if(self, check: Callable[[], None]) -> None:
        """Call ``check`` immediately before ``.metadata`` gets its name; what it raises prevents that."""
        assert isinstance(self.fs, CommittingFileSystem)
        self.fs.before_rename = check

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """Called by ``async_save`` in the training thread."""
        if self._kept_stager is None:
            return super().stage(state_dict)
        # The copies are in CPU memory already; writing needs no second look-ahead buffer.
        self.per_thread_copy_ahead = 0
        return self._kept_stager.stage(state_dict)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the directory; the names of parents that were missing become durable too."""
        filesystem.makedirs(os.fspath(self.path))
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, and return once their names are durable as well."""
        try:
            written = super().write_data(plan, planner)
            written.wait()
        except RuntimeError as error:
            # torch's archive writer fails once more when it closes the file; alone, that error
            # would reach the other ranks, and it does not say that the disk is full.
            raise _disk_error(error) or error from error
        filesystem.fsync_dir(os.fspath(self.path))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0 only, after every rank's ``write_data``: make the checkpoint complete."""
        super().finish(metadata, results)
        filesystem.fsync_dir(os.fspath(self.path))
        filesystem.fsync_dir(os.path.dirname(os.fspath(self.path)))


def _disk_error(error: BaseException) -> OSError | None:
    """The operating system's error behind ``error``, if there is one."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, OSError):
        link = link.__cause__ or link.__context__
    return link
