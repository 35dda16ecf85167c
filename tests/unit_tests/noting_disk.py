"""Disks for tests: one remembers what it is asked for, in which order, and one refuses some of it."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torchtitan.tools.disk import Disk


@dataclass(frozen=True)
class RefusingDisk(Disk):
    """Makes no file below a directory of this name."""

    name: str

    def create(self, path: str, *, exclusive: bool = False, mode: int = 0o666) -> BinaryIO:
        if f"{self.name}/" in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super().create(path, exclusive=exclusive, mode=mode)


class NotingDisk(Disk):
    """``noted`` has a line such as ``rename a b`` for each operation that succeeded."""

    def __init__(self, root: str | Path) -> None:
        """The paths in the lines are relative to ``root``."""
        self.root = os.path.realpath(root)
        self.noted: list[str] = []

    def create(self, path: str, *, exclusive: bool = False, mode: int = 0o666) -> BinaryIO:
        file = super().create(path, exclusive=exclusive, mode=mode)
        self._note("create", path)
        return file

    def sync(self, file: BinaryIO) -> None:
        super().sync(file)
        self._note("sync", os.readlink(f"/proc/self/fd/{file.fileno()}"))

    def sync_directory(self, path: str) -> None:
        super().sync_directory(path)
        self._note("sync_directory", path)

    def mkdir(self, path: str) -> None:
        super().mkdir(path)
        self._note("mkdir", path)

    def rename(self, src: str, dst: str) -> None:
        super().rename(src, dst)
        self._note("rename", src, dst)

    def link(self, src: str, dst: str) -> None:
        super().link(src, dst)
        self._note("link", src, dst)

    def symlink(self, target: str, path: str) -> None:
        super().symlink(target, path)
        self._note("symlink", path)

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        super().unlink(path, dir_fd=dir_fd)
        self._note("unlink", path)

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        super().rmdir(path, dir_fd=dir_fd)
        self._note("rmdir", path)

    def _note(self, what: str, *paths: str) -> None:
        # A name is what it is, and not what it leads to.
        names = [os.path.relpath(os.path.abspath(path), self.root) for path in paths]
        self.noted.append(" ".join([what, *names]))
