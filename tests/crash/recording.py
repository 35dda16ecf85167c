"""Do to a disk what is asked, and keep a log of what was done and of what was said about it.

An operation and its record are one: while one process or thread is at it, no other one is. So the
order in the log is the order on the disk, whichever of ranks, threads and writer processes did it.

    disk.using(RecordingDisk(root, log)) -> real managers -> the log -> model.py
                     note -------------------------------------^    -> promises.py
"""

import fcntl
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import BinaryIO, cast

from torchtitan.tools.disk import Disk

from tests.crash.open_file import OpenFile
from tests.crash.operations import append, Kind, note, Operation


class RecordingDisk(Disk):
    """The disk of this machine; what happens below ``root`` goes into the file ``log``."""

    def __init__(self, root: str, log: str, rank: int = 0) -> None:
        """``log`` lies elsewhere, and outlives the processes that write it."""
        self.root, self.log, self.rank = os.path.abspath(root), log, rank

    def note(self, what: str, step: int | str = "", content: bytes = b"") -> None:
        """Say something at this place of the history."""
        with self._alone():
            append(self.log, [note(self.rank, what, step, content)])

    def create(self, path: str, *, exclusive: bool = False, mode: int = 0o666) -> BinaryIO:
        name = self._below(path)
        with self._alone():
            file = super().create(path, exclusive=exclusive, mode=mode)
            if name is None:
                return file
            self._add(Kind.CREATE, name)
        return cast(BinaryIO, _RecordedFile(file, name, self._hand_over))

    def sync(self, file: BinaryIO) -> None:
        if not isinstance(file, _RecordedFile):
            super().sync(file)
            return
        with self._alone():
            super().sync(file.inner)
            self._add_written(file)
            self._add(Kind.SYNC, file.path)

    def _hand_over(self, file: "_RecordedFile") -> None:
        """Give the system what is still in memory of the process."""
        with self._alone():
            file.inner.flush()
            self._add_written(file)

    def _add_written(self, file: "_RecordedFile") -> None:
        if written := file.taken():
            self._add(Kind.WRITE, file.path, content=written)

    def sync_directory(self, path: str) -> None:
        with self._recorded(Kind.SYNC_DIRECTORY, path):
            super().sync_directory(path)

    def mkdir(self, path: str) -> None:
        with self._recorded(Kind.MKDIR, path):
            super().mkdir(path)

    def rename(self, src: str, dst: str) -> None:
        with self._recorded(Kind.RENAME, src, dst):
            super().rename(src, dst)

    def link(self, src: str, dst: str) -> None:
        with self._recorded(Kind.LINK, src, dst):
            super().link(src, dst)

    def symlink(self, target: str, path: str) -> None:
        raise NotImplementedError(
            "no history that is recorded makes links; the log could hold them"
        )

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        with self._recorded(Kind.UNLINK, path):
            super().unlink(path, dir_fd=dir_fd)

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        with self._recorded(Kind.RMDIR, path):
            super().rmdir(path, dir_fd=dir_fd)

    @contextmanager
    def _recorded(self, kind: Kind, path: str, target: str | None = None) -> Generator[None]:
        """Add what the block does, once it is done."""
        name, new_name = self._below(path), "" if target is None else self._below(target)
        with self._alone():
            yield
            if name is not None and new_name is not None:
                self._add(kind, name, new_name)
            elif target is not None and (name, new_name) != (None, None):
                raise ValueError(f"{kind} of {path} to {target} crosses the root {self.root}")

    def _add(self, kind: Kind, path: str, target: str = "", content: bytes = b"") -> None:
        append(self.log, [Operation(self.rank, kind, path, target, content)])

    def _below(self, path: str) -> str | None:
        """``path`` below the root; None when it lies elsewhere."""
        found = os.path.abspath(path)
        if found == self.root:
            return ""
        is_below = found.startswith(f"{self.root}{os.sep}")
        return found[len(self.root) + 1 :] if is_below else None

    @contextmanager
    def _alone(self) -> Generator[None]:
        # Opened each time: it is the open file that holds the lock, against other threads as well.
        descriptor = os.open(f"{self.log}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


class _RecordedFile(OpenFile):
    """A file of which the log learns what was written when it is flushed, synced or closed, in one piece.

    Torn writes are made of that piece; thousands of little ones would say no more.
    """

    def __init__(
        self, inner: BinaryIO, path: str, hand_over: "Callable[[_RecordedFile], None]"
    ) -> None:
        super().__init__(inner)
        self.path = path
        self._hand_over = hand_over
        self._pending = bytearray()

    def write(self, content: bytes) -> int:
        self._pending += content
        return super().write(content)

    def flush(self) -> None:
        self._hand_over(self)

    def close(self) -> None:
        if not self.closed:
            self._hand_over(self)
            super().close()

    def taken(self) -> bytes:
        """What was written since this was asked last."""
        written, self._pending = bytes(self._pending), bytearray()
        return written
