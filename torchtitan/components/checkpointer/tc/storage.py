"""Where torch_checkpointing reads and writes.

The library never asks a disk to keep what it was given, and writes with O_DIRECT in a way that most
file systems refuse, but only when the first odd length comes. This storage writes through the
page cache and syncs: a file when it is closed, a directory before and after it gets its name. It changes
the disk through ``tools/disk.py``, but for what somebody has it write with direct I/O.

    tc/writer.py -> DurableStorage -> files          (what is written and loaded)
    retention, discovery -> BackendCheckpointStorage -> any storage of the library (questions about paths)
"""

import errno
import io
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

from torch_checkpointing.storage.base_storage import Storage
from torch_checkpointing.storage.filesystem import (
    LocalFileSystemStorage,
    LocalFileSystemStorageConfig,
    WriteStream,
)
from typing_extensions import Buffer

from torchtitan.components.checkpointer.formats import MARKERS
from torchtitan.components.checkpointer.storage import delete_in_order, DELETED
from torchtitan.components.checkpointer.tc.moving import copy_in_order
from torchtitan.tools import disk, filesystem


@dataclass
class DurableStorageConfig(LocalFileSystemStorageConfig):
    """Local files whose contents and names survive a power cut."""

    use_direct_io: bool = False

    def create_storage(self) -> "DurableStorage":
        """The storage; made once in each process that reads or writes."""
        return DurableStorage(self)


class _SyncedStream(WriteStream):
    """A file that is on the disk when its ``with`` block ends."""

    def __enter__(self) -> "_SyncedStream":
        if self._use_direct_io:
            super().__enter__()
        else:
            self._file = disk.current().create(os.fspath(self._path))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        try:
            if exc_type is None and self._file is not None:
                disk.current().sync(cast(BinaryIO, self._file))
        finally:
            super().__exit__(exc_type, exc_val, exc_tb)


_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR}


class DurableStorage(LocalFileSystemStorage):
    """See the top of the file."""

    def stream_write(self, path: Path) -> io.IOBase:
        """A stream to be used as ``with ... as stream``."""
        return _SyncedStream(path, "wb", self._use_direct_io)

    def write(self, path: Path, data: Buffer) -> None:
        """Write a whole file."""
        with _SyncedStream(path, "wb", self._use_direct_io) as stream:
            stream.write(data)

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Make a directory; the names of parents that were missing become durable too."""
        if recursive:
            filesystem.makedirs(os.fspath(path))
        else:
            disk.current().mkdir(os.fspath(path))

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """Give ``src_path`` its final name, once all in it is durable.

        Raises:
            FileExistsError: the name is taken; a file may take that of another.
        """
        if os.path.isdir(src_path):
            # The names inside first; a layout may put files anywhere.
            for folder in _folders_below(src_path):
                filesystem.fsync_dir(folder)
            filesystem.fsync_dir(os.fspath(src_path))
        try:
            disk.current().rename(os.fspath(src_path), os.fspath(dst_path))
        except OSError as error:
            if error.errno == errno.EXDEV:
                raise OSError(
                    errno.EXDEV,
                    f"cannot rename {src_path} to {dst_path}, which is on another disk: a copy could end half "
                    "way. Let all folders in that of the checkpoints lie on one disk",
                ) from error
            # Said of what lies on the way, too: a file where a directory should be.
            is_taken = os.path.lexists(src_path) and os.path.lexists(dst_path)
            if error.errno not in _TAKEN or not is_taken:
                raise
            raise FileExistsError(
                error.errno,
                f"cannot rename {src_path} to {dst_path}: something of that name is there. "
                "Delete it first, if it is not wanted",
            ) from error
        # The new name first: a power cut between the two may leave both names, never neither.
        for folder in dict.fromkeys((dst_path.parent, src_path.parent)):
            filesystem.fsync_dir(os.fspath(folder))

    def rmdir(self, path: Path) -> None:
        """Delete a directory with all in it; what says that it is being deleted goes last."""
        filesystem.rmtree(os.fspath(path), last=DELETED, strict=True)

    def delete(self, path: Path) -> None:
        """Delete a file, durably."""
        filesystem.remove_file(os.fspath(path))

    def exists(self, path: Path) -> bool:
        """Whether a file or a directory is there. Raises OSError when that cannot be told."""
        name = os.fspath(path)
        return filesystem.isfile(name) or self.isdir(path)

    def isdir(self, path: Path) -> bool:
        """Whether a directory is there. Raises OSError when that cannot be told."""
        # The library takes every error for "not there"; a checkpoint on a disk that does not answer
        # for a moment would pass for one that died, and be deleted.
        return filesystem.isdir(os.fspath(path))

    def _open_for_read(self, path: Path, use_direct_io: bool) -> io.RawIOBase:
        # Slices lie anywhere in a file, and O_DIRECT would refuse all that are not aligned.
        return super()._open_for_read(path, use_direct_io and self._use_direct_io)


def _folders_below(folder: Path) -> list[str]:
    return [found for found, _, _ in os.walk(folder, topdown=False)][:-1]


def renames_at_once(storage: Storage) -> bool:
    """Whether a directory is moved in one step.

    Local files are; another storage says so with an attribute ``renames_at_once = True``.
    """
    told = getattr(storage, "renames_at_once", isinstance(storage, LocalFileSystemStorage))
    return told is True


_NUM_ASKING = 16


class _Files:
    """What a deletion consists of, as a storage of the library does it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def isfile(self, path: str, /) -> bool:
        return self._storage.exists(Path(path)) and not self._storage.isdir(Path(path))

    def rename(self, src: str, dst: str, /) -> None:
        self._storage.rename(Path(src), Path(dst))

    def remove_file(self, path: str, /) -> None:
        if self._storage.exists(Path(path)):
            self._storage.delete(Path(path))

    def rmtree(self, path: str, /, *, last: str) -> None:
        # Ours knows what goes last; in which order another one deletes is its own business.
        self._storage.rmdir(Path(path))


class BackendCheckpointStorage:
    """``MovingStorage`` on a storage of the library, so that both look at the same place."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._files = storage, _Files(storage)
        self.renames = renames_at_once(storage)
        """Whether ``move`` takes no longer for what is large."""
        self.has_files = isinstance(storage, LocalFileSystemStorage)
        """Whether its paths are those of the system."""

    def isdir(self, path: str) -> bool:
        return self._storage.isdir(Path(path))

    def isfile(self, path: str) -> bool:
        return self._files.isfile(path)

    def listdir(self, path: str) -> list[str]:
        return self._storage.ls(Path(path))

    def remove(self, path: str) -> None:
        if os.path.islink(path):
            # What it leads to lies in another folder and belongs to somebody else.
            filesystem.remove_file(path)
            return
        delete_in_order(self._files, path, MARKERS)

    def move(self, source: str, target: str) -> None:
        self._storage.mkdir(Path(target).parent)
        if os.path.islink(source):
            # A relative link would lead nowhere from its new place.
            filesystem.symlink(os.path.realpath(source), target)
            filesystem.remove_file(source)
            return
        if self.renames:
            self._storage.rename(Path(source), Path(target), is_directory=True)
            return
        copy_in_order(self._storage, Path(source), Path(target), MARKERS)
        self.remove(source)

    def size_bytes(self, path: str) -> int:
        if not self.isdir(path):
            return self._storage.getsize(Path(path))
        return sum(self.size_bytes(f"{path}/{name}") for name in self.listdir(path))

    def file_sizes(self, path: str, names: Iterable[str]) -> dict[str, int]:
        asked = list(names)
        # On a disk an answer takes less time than a thread, elsewhere it may be a request to a server.
        with ThreadPoolExecutor(1 if self.has_files else _NUM_ASKING) as asking:
            sizes = asking.map(lambda name: self._size_of_file(Path(path, name)), asked)
            found = zip(asked, sizes, strict=True)
            return {name: size for name, size in found if size is not None}

    def _size_of_file(self, path: Path) -> int | None:
        try:
            return self._storage.getsize(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def free_bytes(self, path: str) -> int | None:
        """How much may still be written around ``path``; None where nobody can tell."""
        return filesystem.free_bytes(path) if self.has_files else None

    def read_bytes(self, path: str) -> bytes:
        return self._storage.read(Path(path))

    def write_bytes(self, path: str, content: bytes) -> None:
        self._storage.write(Path(path), content)
