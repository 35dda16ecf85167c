"""A disk that fails at one operation of a history: for once or from then on, and in several ways.

The place of a fault is what is done, to which path, and for which time. It is no number in the whole
history: threads that write beside each other come in another order each time. A disk without a fault
notes the places that there are.

    FaultyDisk(root).faults.seen -> faults_at -> Fault -> FaultyDisk(root, Faults(fault)) -> OSError
                                                       -> object_store.Bucket(faults=Faults(fault))

It holds state and so never travels to a writer process: it is for saves that training waits for.
"""

import errno
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, BinaryIO, cast, TypeVar

from torchtitan.tools.disk import Disk

from tests.crash.open_file import OpenFile
from tests.crash.operations import Kind

T = TypeVar("T")

TAKES_ROOM = {Kind.CREATE, Kind.WRITE, Kind.MKDIR, Kind.LINK, Kind.SYMLINK, Kind.PUT}
"""What a full disk refuses from then on; names are changed and deleted on it all the same."""

_UNIQUE = re.compile(r"\.[0-9a-f]{32}(?=$|/)")
"""What makes the name of a temporary file one of its own."""


class How(StrEnum):
    """What has happened when the error comes."""

    REFUSED = "refused"
    """Nothing."""

    DONE = "done"
    """What was asked for, all of it."""

    HALF = "half"
    """Of a write: half of it."""

    LOST = "lost"
    """Of a sync: what was written is gone, and a later sync says nothing of it. Linux marks pages that it
    could not write as clean, so this is what a sync that is tried again meets."""

    FULL = "full"
    """Nothing, as to all operations from then on that take room."""

    GONE = "gone"
    """Nothing, as to all operations from then on."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One operation of a history, the same in each run of it."""

    kind: Kind
    path: str
    """Below the root; what is unique to a run is a star."""

    time: int = 1
    """For the how-manyth time this is done to this path."""

    def __str__(self) -> str:
        return f"{self.kind} {self.path or 'the root'}" + (
            f" for the time {self.time}" if self.time > 1 else ""
        )


@dataclass(frozen=True, slots=True)
class Fault:
    """What fails, and how."""

    at: Place
    how: How
    number: int
    """Of the error of the system."""

    again: int = 0
    """So many operations later one more is refused: where a failed save cleans up. 0 is none."""

    def __str__(self) -> str:
        again = f", and the {self.again}. operation after it" if self.again else ""
        return f"{errno.errorcode[self.number]} at {self.at} ({self.how}){again}"


def faults_at(place: Place) -> Iterator[Fault]:
    """All that can go wrong at ``place``, once each."""
    for number in (errno.EIO, errno.ENOSPC):
        yield Fault(place, How.REFUSED, number)
    yield Fault(place, How.DONE, errno.EIO)
    if place.kind is Kind.WRITE:
        yield Fault(place, How.HALF, errno.ENOSPC)
    if place.kind is Kind.SYNC:
        yield Fault(place, How.LOST, errno.EIO)
    if place.kind is Kind.SYNC_DIRECTORY:
        # As of a file system that cannot do it.
        yield Fault(place, How.REFUSED, errno.EINVAL)
    yield Fault(place, How.FULL, errno.ENOSPC)
    yield Fault(place, How.GONE, errno.EIO)


def few_writes(places: Iterable[Place]) -> list[Place]:
    """``places``, but of the writes to one file only the first, one in the middle and the last."""
    places = list(places)
    num_writes = Counter(each.path for each in places if each.kind is Kind.WRITE)

    def stays(place: Place) -> bool:
        last = num_writes[place.path]
        return place.kind is not Kind.WRITE or place.time in {1, (last + 1) // 2, last}

    return [place for place in places if stays(place)]


class Faults:
    """Decides of one operation after the other whether it fails."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.seen: list[Place] = []
        self.raised: list[Place] = []
        """Where an error was raised."""

        self._times: Counter[tuple[Kind, str]] = Counter()
        self._since: int | None = None
        """How many operations have come since the fault, once it has."""

        self._lock = threading.Lock()

    @property
    def has_come(self) -> bool:
        """Whether the operation was met that fails."""
        return bool(self.raised)

    def end(self) -> None:
        """Let nothing fail from now on: there is room again, or another disk."""
        self.fault = None

    def carry_out(
        self,
        kind: Kind,
        path: str,
        act: Callable[[], T],
        *,
        half: Callable[[], object] = lambda: None,
        lose: Callable[[], object] = lambda: None,
    ) -> T:
        """``act``, unless it is its time to fail.

        Args:
            half: does half of it.
            lose: does away with what it was to make durable.
        """
        how, number = self._decide(kind, path)
        if how is None:
            return act()
        if how is How.DONE:
            act()
        elif how is How.HALF:
            half()
        elif how is How.LOST:
            lose()
        raise OSError(number, os.strerror(number), path)

    def _decide(self, kind: Kind, path: str) -> tuple[How | None, int]:
        path = _UNIQUE.sub(".*", path)
        with self._lock:
            self._times[kind, path] += 1
            place = Place(kind, path, self._times[kind, path])
            self.seen.append(place)
            found = self._how(place)
            if found is None:
                return None, 0
            self.raised.append(place)
            return found

    def _how(self, place: Place) -> tuple[How, int] | None:
        fault = self.fault
        if fault is None:
            return None
        if self._since is None:
            if place != fault.at:
                return None
            self._since = 0
            return fault.how, fault.number
        self._since += 1
        if fault.how is How.GONE or (fault.how is How.FULL and place.kind in TAKES_ROOM):
            return How.REFUSED, fault.number
        if self._since == fault.again:
            return How.REFUSED, fault.number
        return None


class FaultyDisk(Disk):
    """Carries out below ``root`` what ``faults`` let pass, and everything elsewhere."""

    def __init__(self, root: str, faults: Faults | None = None, inner: Disk | None = None) -> None:
        self._root = os.path.abspath(root)
        self._inner = inner or Disk()
        self.faults = faults or Faults()

    def create(self, path: str, *, exclusive: bool = False, mode: int = 0o666) -> BinaryIO:
        def act() -> BinaryIO:
            return self._inner.create(path, exclusive=exclusive, mode=mode)

        file = self._carry_out(Kind.CREATE, path, act)
        return cast(BinaryIO, _File(file, path, self._carry_out))

    def sync(self, file: BinaryIO) -> None:
        assert isinstance(file, _File), "it was made past the disk"
        inner = file.inner

        def lose() -> None:
            inner.flush()
            size = os.fstat(inner.fileno()).st_size
            os.pwrite(inner.fileno(), bytes(size), 0)

        self._carry_out(Kind.SYNC, file.path, lambda: self._inner.sync(inner), lose=lose)

    def sync_directory(self, path: str) -> None:
        self._carry_out(Kind.SYNC_DIRECTORY, path, lambda: self._inner.sync_directory(path))

    def mkdir(self, path: str) -> None:
        self._carry_out(Kind.MKDIR, path, lambda: self._inner.mkdir(path))

    def rename(self, src: str, dst: str) -> None:
        self._carry_out(Kind.RENAME, src, lambda: self._inner.rename(src, dst))

    def link(self, src: str, dst: str) -> None:
        self._carry_out(Kind.LINK, src, lambda: self._inner.link(src, dst))

    def symlink(self, target: str, path: str) -> None:
        self._carry_out(Kind.SYMLINK, path, lambda: self._inner.symlink(target, path))

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        self._carry_out(Kind.UNLINK, path, lambda: self._inner.unlink(path, dir_fd=dir_fd))

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        self._carry_out(Kind.RMDIR, path, lambda: self._inner.rmdir(path, dir_fd=dir_fd))

    def _carry_out(
        self,
        kind: Kind,
        path: str,
        act: Callable[[], T],
        **parts: Callable[[], object],
    ) -> T:
        inside = os.path.relpath(os.path.abspath(path), self._root)
        if inside == ".." or inside.startswith("../"):
            return act()
        return self.faults.carry_out(kind, "" if inside == "." else inside, act, **parts)


class _File(OpenFile):
    """A file whose writes may fail."""

    def __init__(self, inner: BinaryIO, path: str, carry_out: Callable[..., Any]) -> None:
        super().__init__(inner)
        self.path = path
        self._carry_out = carry_out

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B") if memoryview(content).nbytes else memoryview(b"")

        def half() -> None:
            self.inner.write(view[: len(view) // 2])

        return self._carry_out(Kind.WRITE, self.path, lambda: self.inner.write(view), half=half)

    def flush(self) -> None:
        if self.closed:
            # As any file; DCP asks this of one that has failed, whenever that is thrown away.
            raise ValueError("flush of a closed file")
        super().flush()
