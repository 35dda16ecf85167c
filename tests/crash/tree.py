"""What a folder holds, as values: what a crash has left, to be compared and to be laid out on a disk.

Nothing in a tree changes once it is made, so trees share what they have in common, and a digest is
worked out once for each content. Owners, modes and times are not in it.

    model.py, read_tree -> Directory -> lay_out -> checking.py
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Union


@dataclass(frozen=True, eq=False)
class File:
    """A file."""

    content: bytes
    number: int = 0
    """The same for the names of one file, where there are several; 0 for a file with one name."""

    @cached_property
    def digest(self) -> bytes:
        """Of the content alone: two names of one file are like two files."""
        return hashlib.blake2b(self.content, digest_size=16, person=b"file").digest()


@dataclass(frozen=True, eq=False)
class Link:
    """A symbolic link."""

    target: str

    @cached_property
    def digest(self) -> bytes:
        name = os.fsencode(self.target)
        return hashlib.blake2b(name, digest_size=16, person=b"link").digest()


@dataclass(frozen=True, eq=False)
class Directory:
    """A directory; the one at the root is a whole tree."""

    entries: Mapping[str, "Node"]

    @cached_property
    def digest(self) -> bytes:
        """Equal for directories that hold the same names with the same contents."""
        found = hashlib.blake2b(digest_size=16, person=b"directory")
        for name in sorted(self.entries):
            # The digests are of one length, and no name holds a 0.
            found.update(os.fsencode(name) + b"\0" + self.entries[name].digest)
        return found.digest()

    def __str__(self) -> str:
        """One line for each entry, as a failed check shows it."""
        return "\n".join(_lines(self, "")) or "(nothing)"


Node = Union[File, Link, Directory]
Tree = Directory
EMPTY = Directory({})


def _lines(directory: Directory, above: str) -> Iterator[str]:
    for name, node in sorted(directory.entries.items()):
        path = f"{above}{name}"
        match node:
            case File(content=content):
                zeros = ", all zeros" if content and not content.strip(b"\0") else ""
                yield f"{path}  {len(content)} bytes{zeros}, {node.digest.hex()[:8]}"
            case Link(target=target):
                yield f"{path} -> {target}"
            case Directory():
                yield f"{path}/"
                yield from _lines(node, f"{path}/")


def from_values(values: Mapping[str, object]) -> Tree:
    """A tree of plain values: a mapping for a directory, bytes for a file, a ``Link`` as it is."""
    entries: dict[str, Node] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            entries[name] = from_values(value)
        elif isinstance(value, bytes):
            entries[name] = File(value)
        else:
            assert isinstance(value, Link)
            entries[name] = value
    return Directory(entries)


def to_values(tree: Tree) -> dict[str, object]:
    """The other way, to be compared in a test; a link as ``"-> target"``."""
    values: dict[str, object] = {}
    for name, node in tree.entries.items():
        match node:
            case File(content=content):
                values[name] = content
            case Link(target=target):
                values[name] = f"-> {target}"
            case Directory():
                values[name] = to_values(node)
    return values


def lay_out(tree: Tree, folder: str | Path) -> None:
    """Write ``tree`` below ``folder``, which may be missing and must hold none of its names."""
    os.makedirs(folder, exist_ok=True)
    _lay_out(tree, os.fspath(folder), {})


def _lay_out(directory: Directory, folder: str, made: dict[int, str]) -> None:
    for name, node in directory.entries.items():
        path = f"{folder}/{name}"
        match node:
            case Directory():
                os.mkdir(path)
                _lay_out(node, path, made)
            case Link(target=target):
                os.symlink(target, path)
            case File(content=content, number=number):
                if number and number in made:
                    os.link(made[number], path)
                    continue
                # Not open(), which takes three times as long; a suite writes many thousand files.
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                try:
                    _write(descriptor, content)
                finally:
                    os.close(descriptor)
                if number:
                    made[number] = path


def _write(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def read_tree(folder: str | Path) -> Tree:
    """What is on the disk below ``folder``."""
    entries: dict[str, Node] = {}
    with os.scandir(folder) as found:
        for entry in found:
            if entry.is_symlink():
                entries[entry.name] = Link(os.readlink(entry.path))
            elif entry.is_dir():
                entries[entry.name] = read_tree(entry.path)
            else:
                with open(entry.path, "rb") as file:
                    found_at = os.fstat(file.fileno())
                    number = found_at.st_ino if found_at.st_nlink > 1 else 0
                    entries[entry.name] = File(file.read(), number)
    return Directory(entries)
