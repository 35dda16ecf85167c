"""What was done to a disk, as values, and the log that several processes write of it.

An operation that failed is not in the log, only what has happened. A record is appended when its
operation has ended and before anybody hears of that, with one call of the system: so the order in the
log respects what caused what, whoever of the ranks wrote it.

    recording.py -> append -> read_log -> model.py, interleaving.py
"""

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What an operation does. The names are those of ``torchtitan.tools.disk.Disk``."""

    CREATE = "create"
    WRITE = "write"
    SYNC = "sync"
    SYNC_DIRECTORY = "sync_directory"
    MKDIR = "mkdir"
    RENAME = "rename"
    LINK = "link"
    SYMLINK = "symlink"
    UNLINK = "unlink"
    RMDIR = "rmdir"
    PUT = "put"
    """Of an object store: all of an object at once, in the place of what had the name."""
    DELETE = "delete"
    """Of an object store."""
    NOTE = "note"
    """Nothing was done to the disk; something was said that the state of the disk is judged by."""


MEET = "meet"
"""The path of a note that every rank leaves where all of them wait for each other, or, with one of the
next two as its target, where some wait. Its content tells kinds of meetings apart that have no order among
each other, as those of two threads; the k-th of a kind is the same meeting for all ranks."""
TO_RANK_ZERO, FROM_RANK_ZERO = "to rank 0", "from rank 0"
"""Rank 0 alone waits for all others; all others wait for rank 0."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One that has happened."""

    rank: int
    kind: Kind
    path: str
    """Below the root, ``""`` for the root itself. Of a write or a sync: the name that the file was
    created with, whatever it is called by now. Of a note: what is noted, such as ``acknowledged``."""
    target: str = ""
    """Of a rename or a link: the new name. Of a symlink: where it points. Of a note: the step."""
    content: bytes = b""
    """Of a write: what was appended. Of a put: all of it. Of a note: anything."""

    def __post_init__(self) -> None:
        if self.kind is Kind.NOTE:
            return
        named = [self.path]
        if self.kind in (Kind.RENAME, Kind.LINK):
            named.append(self.target)
        for path in named:
            if path and not {"", ".", ".."}.isdisjoint(path.split("/")):
                raise ValueError(
                    f"{path!r} is no path below the root of what is recorded; it has to be relative, "
                    "without dots, doubled slashes or one at its end."
                )

    def __str__(self) -> str:
        """Short enough for a line about a crash point."""
        words = [f"rank {self.rank}", str(self.kind), self.path or "the root"]
        if self.target:
            words.append(f"-> {self.target}")
        if self.content:
            words.append(f"({len(self.content)} bytes)")
        return " ".join(words)


def note(rank: int, what: str, step: int | str = "", content: bytes = b"") -> Operation:
    """Something said at this place of the history, such as ``note(0, "acknowledged", 10)``."""
    return Operation(rank, Kind.NOTE, what, str(step), content)


_KINDS = tuple(Kind)
_HEADER = struct.Struct("<IBIIQ")
"""Rank, number of the kind, lengths of path, target and content."""


def append(log: str, operations: Iterable[Operation]) -> None:
    """Add ``operations`` to the end of the file ``log``, in one piece and after all that is there."""
    record = b"".join(map(_encoded, operations))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        # Opened each time: what records can then be sent to another process, or be forked.
        if (written := os.write(descriptor, record)) != len(record):
            raise OSError(f"only {written} of {len(record)} bytes could be added to {log!r}")
    finally:
        os.close(descriptor)


def read_log(log: str) -> list[Operation]:
    """All that was added to ``log``, in order; none if there is no such file.

    Raises ValueError for a record that is cut off: a history that lacks its end tests less, silently.
    """
    try:
        with open(log, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return []
    operations = []
    position = 0
    while position < len(content):
        operation, position = _decoded(content, position, log)
        operations.append(operation)
    return operations


def _encoded(operation: Operation) -> bytes:
    # surrogateescape, as in names of files: any of them comes back as it was.
    path = operation.path.encode(errors="surrogateescape")
    target = operation.target.encode(errors="surrogateescape")
    number = _KINDS.index(operation.kind)
    sizes = (len(path), len(target), len(operation.content))
    return _HEADER.pack(operation.rank, number, *sizes) + path + target + operation.content


def _decoded(content: bytes, position: int, log: str) -> tuple[Operation, int]:
    """The operation at ``position``, and where the next one begins."""
    start = position + _HEADER.size
    if start <= len(content):
        rank, number, *sizes = _HEADER.unpack_from(content, position)
        middle, last = start + sizes[0], start + sizes[0] + sizes[1]
        end = last + sizes[2]
        if end <= len(content):
            path = content[start:middle].decode(errors="surrogateescape")
            target = content[middle:last].decode(errors="surrogateescape")
            return Operation(rank, _KINDS[number], path, target, content[last:end]), end
    raise ValueError(f"the record at byte {position} of {log!r} is cut off; its writer has died")
