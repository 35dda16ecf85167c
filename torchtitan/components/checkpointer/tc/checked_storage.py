"""A storage whose files are hashed as they are written, and checked as they are read.

It stands around whatever storage a run was given, so one in memory, or of another program, is held
to the same. It never reads what it has written: the digests are taken on the way.

    writer.py -> CheckedStorage -> any storage; written_below -> manifest.json
    library.py, reading.py -> CheckedStorage -> any storage; what is not as it was saved is refused
"""

import io
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from torch_checkpointing.storage.base_storage import ReadArgs, Storage
from typing_extensions import Buffer

from torchtitan.components.checkpointer.errors import CheckpointDamagedError
from torchtitan.components.checkpointer.integrity.digests import (
    block_bytes_for,
    digest_of,
    FileDigest,
    HashingStream,
)
from torchtitan.components.checkpointer.integrity.verification import Verification
from torchtitan.components.checkpointer.tc.leaves import tensor_bytes


class CheckedStorage(Storage):
    """See the top of the file."""

    def __init__(
        self, storage: Storage, verification: Verification | None = None, *, num_ranks: int = 1
    ) -> None:
        """
        Args:
            verification: of the checkpoint that is to be read; None checks nothing.
            num_ranks: how many write a file like each that is written here.
        """
        self.verification = verification
        self.takes_digests = True
        """False lets what is written pass untouched."""
        self._storage = storage
        self._num_ranks = num_ranks
        self._digests: dict[Path, FileDigest] = {}

    def __getattr__(self, name: str) -> Any:
        # What a storage has beyond the library's interface, for the callbacks of whoever chose it.
        if name == "_storage":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self._storage, name)

    def written_below(self, folder: Path) -> dict[str, FileDigest]:
        """What was written in ``folder``, by name relative to it."""
        return {
            path.relative_to(folder).as_posix(): digest
            for path, digest in self._digests.items()
            if path.is_relative_to(folder)
        }

    def forget_written(self) -> None:
        """Go on as if nothing had been written."""
        self._digests.clear()

    def stream_write(self, path: Path) -> io.IOBase:
        return self._hashed(path, self._storage.stream_write(path))

    def get_write_stream(self, path: Path, data: object) -> io.IOBase:
        # Besides the tensors of an item there is little in its file.
        stream = self._storage.get_write_stream(path, data)
        return self._hashed(path, stream, lambda: tensor_bytes(data))

    def write(self, path: Path, data: Buffer) -> None:
        self._storage.write(path, data)
        if self.takes_digests:
            block_bytes = self._block_bytes(memoryview(data).nbytes)
            self._digests[Path(path)] = digest_of(data, block_bytes)

    def _hashed(
        self, path: Path, stream: io.IOBase, find_size: Callable[[], int] | None = None
    ) -> io.IOBase:
        if not self.takes_digests:
            return stream

        def keep(digest: FileDigest) -> None:
            self._digests[Path(path)] = digest

        block_bytes = None if find_size is None else self._block_bytes(find_size())
        return _Hashed(stream, keep, block_bytes)

    def _block_bytes(self, size_bytes: int) -> int:
        # By the files of all ranks: many small ones have as many blocks as a large one.
        return block_bytes_for(size_bytes * self._num_ranks)

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """Raises ``CheckpointDamagedError``, as what it returns does."""
        verification = self.verification
        if verification is None:
            return self._storage.stream_read(path, read_args)
        name = _name(path, verification.path)
        stream = self._storage.stream_read(path, read_args)
        if not verification.is_full or stream.seekable():
            return verification.checked(name, stream)
        # Blocks are checked as a whole, and this one gives no more than what comes next.
        with stream:
            content = verification.check(name, stream.read())
        # The library's own storage gives such a stream for a file that is read as a whole.
        return cast(io.RawIOBase, io.BytesIO(content))

    def read(self, path: Path, read_args: ReadArgs | None = None) -> bytes:
        """All of a file. Raises ``CheckpointDamagedError``."""
        verification = self.verification
        if verification is None:
            return self._storage.read(path, read_args)
        name = _name(path, verification.path)
        return verification.check(name, self._storage.read(path, read_args))

    def delete(self, path: Path) -> None:
        self._digests.pop(Path(path), None)
        self._storage.delete(path)

    def rmdir(self, path: Path) -> None:
        self._take_digests(path)
        self._storage.rmdir(path)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        self._storage.rename(src_path, dst_path, is_directory, background_cleanup)
        # A callback may write under one name and publish under another.
        for path, digest in self._take_digests(src_path).items():
            self._digests[Path(dst_path) / path] = digest

    def _take_digests(self, path: Path) -> dict[Path, FileDigest]:
        """Those of the file ``path``, or of all files below it, which are no longer there."""
        inside = [file for file in self._digests if file.is_relative_to(path)]
        return {file.relative_to(path): self._digests.pop(file) for file in inside}

    @property
    def mmap_fill_workers(self) -> int | None:
        return self._storage.mmap_fill_workers

    @property
    def mmap_fill_chunk_bytes(self) -> int | None:
        return self._storage.mmap_fill_chunk_bytes

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        self._storage.mkdir(path, recursive)

    def ls(self, path: Path) -> list[str]:
        return self._storage.ls(path)

    def exists(self, path: Path) -> bool:
        return self._storage.exists(path)

    def getsize(self, path: Path) -> int:
        return self._storage.getsize(path)

    def glob(self, pattern: str) -> list[str]:
        return self._storage.glob(pattern)

    def isdir(self, path: Path) -> bool:
        return self._storage.isdir(path)

    def remap_path(self, path: Path) -> str:
        return self._storage.remap_path(path)


def _name(path: Path, checkpoint_id: str) -> str:
    folder = Path(checkpoint_id)
    if ".." in path.parts[len(folder.parts) :] or not path.is_relative_to(folder):
        raise CheckpointDamagedError(
            f"{checkpoint_id} is damaged: its index leads to {path}, which is outside of it."
        )
    return path.relative_to(folder).as_posix()


class _Hashed(HashingStream):
    """Hands over its digest when it is closed in order."""

    def __init__(
        self, stream: io.IOBase, keep: Callable[[FileDigest], None], block_bytes: int | None
    ) -> None:
        super().__init__(stream, block_bytes)
        self._keep = keep

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        if exc_type is None:
            self._keep(self.digest())

    def close(self) -> None:
        super().close()
        self._keep(self.digest())
