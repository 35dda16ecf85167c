"""What changes a local disk, one operation of the system for each method.

All that a checkpoint consists of, and the lock of its folder, is made, named, moved and deleted through
the one ``Disk`` of the process. So a test can put another one in its place (``using``), which records
what was done and in which order, or fails at any point. What only reads goes past it.

    tools/filesystem.py, dcp_writer.py, tc/storage.py, lock_file.py -> current() -> the disk
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import BinaryIO


class Disk:
    """The disks of this machine.

    One of another class must be picklable and may hold nothing that changes: each writer process gets
    a copy. Paths are as their caller has them, relative ones too. All raise OSError as the system does.
    """

    def create(self, path: str, *, exclusive: bool = False, mode: int = 0o666) -> BinaryIO:
        """An empty file, new or the one of that name, to be written from beginning to end.

        Nobody asks it for more than ``write``, ``flush``, ``tell``, ``fileno``, ``close``, ``closed`` and
        ``with``.

        Args:
            exclusive: FileExistsError when the name is taken.
            mode: who may read and write a new one, before the umask.
        """

        def opener(name: str, flags: int) -> int:
            return os.open(name, flags, mode)

        return open(path, "xb" if exclusive else "wb", opener=opener)  # noqa: SIM115 (the caller's)

    def sync(self, file: BinaryIO) -> None:
        """Make durable what a file of ``create`` holds by now; its name is another matter."""
        file.flush()
        os.fsync(file.fileno())

    def sync_directory(self, path: str) -> None:
        """Make the names in the directory ``path`` durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def mkdir(self, path: str) -> None:
        """Make one directory, which nobody may have made before, in one that is there."""
        os.mkdir(path)

    def rename(self, src: str, dst: str) -> None:
        """Give ``src`` the name ``dst``; a file may take that of a file, a directory of an empty one."""
        os.rename(src, dst)

    def link(self, src: str, dst: str) -> None:
        """Give the file ``src`` a second name."""
        os.link(src, dst)

    def symlink(self, target: str, path: str) -> None:
        """Make ``path`` a symbolic link to ``target``."""
        os.symlink(target, path)

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        """Take the name of a file or a link away.

        ``dir_fd`` is the directory of ``path``, opened: the name is looked for in that one, whatever lies
        on the way to it by now.
        """
        os.unlink(_name(path, dir_fd), dir_fd=dir_fd)

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        """Delete an empty directory; ``dir_fd`` as above."""
        os.rmdir(_name(path, dir_fd), dir_fd=dir_fd)


def _name(path: str, dir_fd: int | None) -> str:
    return path if dir_fd is None else os.path.basename(path)


_current = Disk()


def current() -> Disk:
    """The disk of this process."""
    return _current


@contextmanager
def using(disk: Disk) -> Generator[Disk]:
    """Make ``disk`` that of this process, all threads, and of writer processes started meanwhile."""
    global _current
    before, _current = _current, disk
    try:
        yield disk
    finally:
        _current = before
