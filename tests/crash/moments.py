"""A disk that acts at the n-th thing which one process does to it.

A moment that is counted and not slept for comes again: with the same seed something happens at the same
place of a save. It may be counted by a rank or by its writer process, which gets a copy of the disk.

    killing.py, failing_disks.py -> ActingDisk -> each operation -> is it the n-th? -> act
"""

import itertools
import os
import random
from abc import abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, cast

from torchtitan.components.checkpointer.integrity.digests import flat
from torchtitan.tools.disk import Disk

from tests.crash.open_file import OpenFile


class When(StrEnum):
    """Where around an operation something happens."""

    BEFORE = "before"
    HALFWAY = "halfway through"
    """Of a write, when half of it is there."""
    AFTER = "after"


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One place in what a run does to its disk."""

    who: str
    """The process whose operations are counted: ``rank 0``, ``writer 1``."""
    number: int
    """The first one is 1."""
    when: When
    of_writes: bool = False
    """Writes into files are counted, and else all other operations."""

    def __str__(self) -> str:
        what = "write" if self.of_writes else "operation"
        return f"{self.when} {what} {self.number} of {self.who}"


# About so many, so that moments are spread over the saves.
_OPERATIONS_PER_SAVE = {"rank 0": 24, "rank 1": 3, "writer 0": 14, "writer 1": 4}
_BESIDE_WRITERS = 10
"""Of rank 0 where writers do the rest: the deletions."""
_WRITES_PER_SAVE = 150
"""At least; with torch.distributed.checkpoint up to a thousand."""


def draw_moment(
    draw: random.Random, *, has_writer: bool, num_saves: float, who: str | None = None
) -> Moment:
    """Some moment of the first ``num_saves`` saves, about, of any process that writes, or of ``who``."""
    counters = ["rank 0", "rank 0", "rank 1"]
    if has_writer:
        counters = ["rank 0", "writer 0", "writer 0", "writer 1"]
    who = who or draw.choice(counters)
    # Rank 0 writes no files where writers do.
    of_writes = draw.random() < 0.2 and not (has_writer and who == "rank 0")
    per_save = _WRITES_PER_SAVE if of_writes else _OPERATIONS_PER_SAVE[who]
    if has_writer and who == "rank 0":
        per_save = _BESIDE_WRITERS
    return Moment(
        who=who,
        number=draw.randint(1, round(num_saves * per_save)),
        when=draw.choice(list(When) if of_writes else [When.BEFORE, When.AFTER]),
        of_writes=of_writes,
    )


# Of this process. A disk travels to others, and is to hold nothing that changes.
_operations, _writes = itertools.count(1), itertools.count(1)


class ActingDisk(Disk):
    """Does what it is asked for, and ``act`` at each of its moments, once in the whole run."""

    def __init__(
        self, marks: Path, rank: int, pids: tuple[int, ...], moments: Mapping[int, Moment]
    ) -> None:
        """
        Args:
            marks: a directory that gets a file for each moment that has come, named by its number.
            rank: the one that uses this disk, itself or through its writer.
            pids: those of all ranks.
            moments: when to act, by a number for each.
        """
        self._marks, self._rank, self._pids, self._moments = marks, rank, pids, moments

    @abstractmethod
    def act(self, number: int) -> None:
        """Do what is to be done at the moment of this number."""

    def act_once(self, number: int) -> None:
        """Do it, if no process of the run has done it before."""
        try:
            (self._marks / str(number)).open("x").close()
        except FileExistsError:
            return  # a process that replaces another one counts anew
        self.act(number)

    def create(self, path: str, *, exclusive: bool = False, mode: int = 0o666) -> BinaryIO:
        with self._operation():
            file = super().create(path, exclusive=exclusive, mode=mode)
        return cast(BinaryIO, _WatchedFile(file, self))

    def sync(self, file: BinaryIO) -> None:
        with self._operation():
            super().sync(file)

    def sync_directory(self, path: str) -> None:
        with self._operation():
            super().sync_directory(path)

    def mkdir(self, path: str) -> None:
        with self._operation():
            super().mkdir(path)

    def rename(self, src: str, dst: str) -> None:
        with self._operation():
            super().rename(src, dst)

    def link(self, src: str, dst: str) -> None:
        with self._operation():
            super().link(src, dst)

    def symlink(self, target: str, path: str) -> None:
        with self._operation():
            super().symlink(target, path)

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        with self._operation():
            super().unlink(path, dir_fd=dir_fd)

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        with self._operation():
            super().rmdir(path, dir_fd=dir_fd)

    def write(self, file: BinaryIO, content: bytes) -> int:
        """What a file of this disk does with ``content``."""
        number, rest = next(_writes), memoryview(content)
        self._come_to(number, When.BEFORE, of_writes=True)
        if self._moments_at(number, When.HALFWAY, of_writes=True):
            view = flat(rest)
            half, rest = view[: len(view) // 2], view[len(view) // 2 :]
            file.write(half)
            file.flush()
            self._come_to(number, When.HALFWAY, of_writes=True)
        file.write(rest)
        self._come_to(number, When.AFTER, of_writes=True)
        return memoryview(content).nbytes

    @contextmanager
    def _operation(self) -> Generator[None]:
        number = next(_operations)
        self._come_to(number, When.BEFORE, of_writes=False)
        try:
            yield
        finally:  # also if it was refused, as what is not there cannot be deleted
            self._come_to(number, When.AFTER, of_writes=False)

    def _moments_at(self, number: int, when: When, *, of_writes: bool) -> list[int]:
        found = [which for which, it in self._moments.items() if it.number == number]
        if not found:
            return []  # as for nearly all of the thousand writes of a save
        what = "rank" if os.getpid() == self._pids[self._rank] else "writer"
        at = Moment(who=f"{what} {self._rank}", number=number, when=when, of_writes=of_writes)
        return [which for which in found if self._moments[which] == at]

    def _come_to(self, number: int, when: When, *, of_writes: bool) -> None:
        for which in self._moments_at(number, when, of_writes=of_writes):
            self.act_once(which)


class _WatchedFile(OpenFile):
    """A file whose writes are counted."""

    def __init__(self, inner: BinaryIO, disk: ActingDisk) -> None:
        super().__init__(inner)
        self._disk = disk

    def write(self, content: bytes) -> int:
        return self._disk.write(self.inner, content)
