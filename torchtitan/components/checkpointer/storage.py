"""Where the checkpointer asks about paths.

Paths stay ``str`` from end to end, because ``pathlib`` would fold the two slashes of a URI.
Protocols say what is asked: a few questions to find and expire checkpoints, more to move, measure
and check them. So a test can answer from memory and another backend from its own storage.
"""

import os
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from torchtitan.tools import filesystem

DELETED = "manifest.deleted"
"""A file of this name says that the deletion of its directory has begun."""


@runtime_checkable
class CheckpointStorage(Protocol):
    """The questions that finding and expiring checkpoints ask."""

    def isdir(self, path: str) -> bool:
        """Whether ``path`` is a directory."""
        ...

    def isfile(self, path: str) -> bool:
        """Whether ``path`` is a file."""
        ...

    def listdir(self, path: str) -> list[str]:
        """The names (not paths) of the entries of ``path``."""
        ...

    def remove(self, path: str) -> None:
        """Delete the directory ``path`` with all it holds."""
        ...


class MovingStorage(CheckpointStorage, Protocol):
    """A storage that can also rename directories, measure them and files, and read and write small files."""

    def move(self, source: str, target: str) -> None:
        """Rename the directory ``source`` to ``target``, whose parent is created."""
        ...

    def size_bytes(self, path: str) -> int:
        """Bytes of the file ``path``, or of all files below that directory."""
        ...

    def file_sizes(self, path: str, names: Iterable[str]) -> dict[str, int]:
        """Bytes of each of the files ``names`` below the directory ``path``; without those not there."""
        ...

    def read_bytes(self, path: str) -> bytes:
        """All of the file ``path``. Raises FileNotFoundError when it is not there."""
        ...

    def write_bytes(self, path: str, content: bytes) -> None:
        """Make ``content`` all of the small file ``path``, in one go and durably."""
        ...


class Files(Protocol):
    """What a deletion consists of, as the functions of ``tools/filesystem.py`` do it."""

    def isfile(self, path: str, /) -> bool: ...

    def rename(self, src: str, dst: str, /) -> None: ...

    def remove_file(self, path: str, /) -> None: ...

    def rmtree(self, path: str, /, *, last: str) -> None: ...


def delete_in_order(files: Files, path: str, markers: Iterable[str]) -> None:
    """Delete the checkpoint ``path`` so that whenever that is cut short, no complete one seems to be left.

    The first of ``markers`` that is there becomes the file ``DELETED``, by which the rest is known for what
    it is; the others go, then all else, and ``DELETED`` last.

    Args:
        markers: the files that make it complete, the commit record first.
    """
    tombstone = f"{path}/{DELETED}"
    for marker in markers:
        file = f"{path}/{marker}"
        if files.isfile(tombstone) or not files.isfile(file):
            files.remove_file(file)
        else:
            # Renamed and not written: a full disk is what deletions are mostly for.
            files.rename(file, tombstone)
    files.rmtree(path, last=DELETED)


class FilesystemStorage:
    """``MovingStorage`` on a local path or any fsspec URI.

    A backend names the files that make a checkpoint complete in ``markers``, the commit record first.
    """

    markers: tuple[str, ...] = ()
    has_files = True
    """Its paths are those of the system or URIs: what must be made by one process alone can be."""

    def isdir(self, path: str) -> bool:
        return filesystem.isdir(path)

    def isfile(self, path: str) -> bool:
        return filesystem.isfile(path)

    def listdir(self, path: str) -> list[str]:
        return filesystem.listdir(path)

    def remove(self, path: str) -> None:
        if os.path.islink(path):
            # What it leads to lies in another folder and belongs to somebody else.
            filesystem.remove_file(path)
            return
        delete_in_order(filesystem, path, self.markers)
        # The local rmtree goes on past entries it cannot delete.
        if filesystem.exists(path):
            raise OSError(f"{path} could not be deleted completely; check its permissions")

    def move(self, source: str, target: str) -> None:
        # Atomic on local disks; an object store copies and deletes.
        filesystem.makedirs(target.rpartition("/")[0])
        if os.path.islink(source):
            # A relative link would lead nowhere from its new place.
            filesystem.symlink(os.path.realpath(source), target)
            filesystem.remove_file(source)
            return
        filesystem.rename(source, target)

    def size_bytes(self, path: str) -> int:
        return filesystem.tree_size_bytes(path)

    def file_sizes(self, path: str, names: Iterable[str]) -> dict[str, int]:
        return filesystem.file_sizes(path, names)

    def free_bytes(self, path: str) -> int | None:
        """How much may still be written around ``path``; None where nobody can tell."""
        return filesystem.free_bytes(path)

    def read_bytes(self, path: str) -> bytes:
        return filesystem.read_bytes(path)

    def write_bytes(self, path: str, content: bytes) -> None:
        filesystem.write_bytes(path, content)
