"""What names stand for, apart from the names, and changes of names that are not durable yet.

DiskModel -> DirectoryInode -> FileInode, LinkInode
          -> Change
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Union


@dataclass(eq=False, slots=True)
class FileInode:
    """A file, whatever its names are."""

    written: bytes = b""
    synced: bytes = b""
    is_emptied: bool = False
    """Made empty since its last sync, so that ``written`` no longer begins with ``synced``."""
    num_names: int = 0
    number: int = 0
    """Not 0 once it has had more than one name."""

    @property
    def is_synced(self) -> bool:
        return not self.is_emptied and len(self.written) == len(self.synced)

    @property
    def kept(self) -> bytes:
        """What no power cut takes, if what has been emptied stays so."""
        return b"" if self.is_emptied else self.synced


@dataclass(eq=False, slots=True)
class DirectoryInode:
    """A directory, whatever its name is."""

    path: str
    """The name that it was made with."""
    names: dict[str, "Inode"] = field(default_factory=dict)
    durable: dict[str, "Inode"] = field(default_factory=dict)
    last_changes: dict[str, int] = field(default_factory=dict)
    """The number of the last change of each name."""


@dataclass(eq=False, slots=True)
class LinkInode:
    """A symbolic link: durable as a whole, with its name."""

    target: str


Inode = Union[FileInode, DirectoryInode, LinkInode]


@dataclass(frozen=True, eq=False, slots=True)
class Change:
    """Of the names of one directory, not durable yet."""

    number: int
    """Later changes have larger ones."""
    directory: DirectoryInode
    effect: Mapping[str, Inode | None]
    """What each name stands for afterwards; None if for nothing."""
    needs: frozenset[int]
    """The changes without which this one is not durable, if they are still pending."""
    words: str
