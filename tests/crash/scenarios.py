"""Which histories are recorded, and the points of each at which a crash can fall.

Real managers save on real ranks, with their writer processes where the way has some. What is recorded once
serves all tests of a session; a history is recorded when the first of its kind is asked for.

    CASES -> Histories.points_of -> ranks of the pool -> a log for each story -> points.py
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torchtitan.tools import disk

from tests.crash.interleaving import interleaved_points
from tests.crash.meetings import meetings
from tests.crash.operations import append, Operation, read_log
from tests.crash.points import crash_points, CrashPoint, KILLED
from tests.crash.promises import Promises
from tests.crash.recording import RecordingDisk
from tests.crash.stories import Stage, STORIES
from tests.crash.tree import Directory, EMPTY, File, lay_out, read_tree, Tree
from tests.ranks.pool import run_on_ranks
from tests.unit_tests.components.checkpointer.ways import PINNED, TC, Way, WAYS

T = TypeVar("T")

RESUMED = "resumed"
_OF_ONE_RANK = ("first saves", "saved again", "last save", "last weights", "gone back", "expired")
_OF_TWO_RANKS = ("first saves", "saved again", "gone back")
_WITH_A_WRITER = {PINNED: ("first saves", "saved again"), TC: ("first saves",)}
"""Each takes seconds to start the process that writes."""


def _num_resumed(way: Way) -> tuple[int, int]:
    """How many kills of each story are gone on from, and how many power cuts."""
    if way.has_writer:
        return 1, 0
    return (1, 1) if way.is_background else (2, 2)


_FEW_ORDERS = 6
_TIMEOUT_SECONDS = 280.0
_UNIQUE = re.compile("[0-9a-f]{32}")
"""What makes the name of a temporary file one of its own."""


@dataclass(frozen=True)
class Case:
    """One kind of history, of one way to save."""

    story: str
    way: Way
    num_ranks: int = 1

    def __str__(self) -> str:
        ranks = "" if self.num_ranks == 1 else f", {self.num_ranks} ranks"
        return f"{self.story}, {self.way}{ranks}"


def _stories_of(way: Way, all_of_them: tuple[str, ...]) -> tuple[str, ...]:
    return _WITH_A_WRITER[way] if way.has_writer else all_of_them


def _of_two_ranks(way: Way) -> tuple[str, ...]:
    return _OF_TWO_RANKS[:1] if way.has_writer else _OF_TWO_RANKS


CASES = [
    *(Case(story, way) for way in WAYS for story in _stories_of(way, _OF_ONE_RANK)),
    *(Case(RESUMED, way) for way in WAYS),
    *(Case(story, way, 2) for way in WAYS for story in _of_two_ranks(way)),
]


@dataclass(frozen=True)
class Earlier:
    """What was there when a history began."""

    operations: tuple[Operation, ...] = ()
    """Of the run that was killed: what it had not synced may still be lost."""
    start: Tree = EMPTY
    """What was on the disk before all of ``operations``."""
    left: Tree = EMPTY
    """What was there after them."""


@dataclass(frozen=True)
class History:
    """What happened, and what was on the disk in the end."""

    operations: list[Operation]
    earlier: Earlier
    end: Tree

    def points(self) -> Iterator[CrashPoint]:
        """What crashes leave, without those of the earlier run."""
        begun = len(self.earlier.operations)
        return crash_points(self.operations, self.earlier.start, first=begun + 1)


@dataclass(frozen=True)
class Judged:
    """A point that is like no other one of its case, and what it is judged by."""

    point: CrashPoint
    promises: Promises

    @property
    def key(self) -> object:
        """Equal for points that differ in nothing but names and times of runs, whatever case they are of."""
        return _without_runs(self.point.tree), self.promises


class Histories:
    """Records in ``place``, once each."""

    def __init__(self, place: Path, ways: Iterable[Way] = WAYS) -> None:
        """``ways`` are those of which most histories will be asked for."""
        self._place = place
        self._ways = tuple(ways)
        self._recorded: dict[Case, list[History]] = {}
        self._num_places = 0

    def of(self, case: Case) -> list[History]:
        """The histories of ``case``; of one that goes on from crashes, one for each of these."""
        if case not in self._recorded:
            # Processes are what takes time, so all that can be done in one set of them is.
            together = [each for each in CASES if _group(each) == _group(case)]
            wanted = [each for each in together if each.way in (*self._ways, case.way)]
            self._record([each for each in wanted if each not in self._recorded], case.num_ranks)
        return self._recorded[case]

    def points_of(self, case: Case, *, all_orders: bool = False) -> list[Judged]:
        """All points of ``case``; with several ranks of a few orders, unless all are wanted."""
        found: dict[tuple[bytes, Promises], Judged] = {}
        for history in self.of(case):
            points = history.points()
            if case.num_ranks > 1 and not case.way.has_writer:
                limit = None if all_orders else _FEW_ORDERS
                points = interleaved_points(history.operations, limit=limit)
            notes: tuple[Operation, ...] = ()
            promises = Promises()
            for point in points:
                if point.notes != notes:
                    notes, promises = point.notes, Promises().after(point.notes)
                key = point.tree.digest, promises
                found.setdefault(key, Judged(point, promises))
        return list(found.values())

    def _record(self, cases: Sequence[Case], num_ranks: int) -> None:
        parts: list[tuple[Case, Path, Earlier]] = []
        for case in cases:
            for earlier in self._earlier(case):
                self._num_places += 1
                place = self._place / f"{self._num_places}-{_group(case)}"
                parts.append((case, place, earlier))
                _prepare(parts[-1][1], earlier)
        scenes = [(case.story, case.way, str(place)) for case, place, _ in parts]
        run_on_ranks(num_ranks, _play, scenes, timeout_seconds=_TIMEOUT_SECONDS)
        for case, place, earlier in parts:
            history = History(read_log(str(place / "log")), earlier, read_tree(place / "root"))
            self._recorded.setdefault(case, []).append(history)

    def _earlier(self, case: Case) -> list[Earlier]:
        if case.story != RESUMED:
            return [Earlier()]
        found: list[Earlier] = []
        for first in CASES:
            if (first.way, first.num_ranks) == (case.way, 1) and first.story != RESUMED:
                found += _crashes(self.of(first)[0], *_num_resumed(case.way))
        return found


def _group(case: Case) -> str:
    return f"{'resumed' if case.story == RESUMED else 'first'}-{case.num_ranks}"


def _crashes(history: History, num_kills: int, num_cuts: int) -> Iterator[Earlier]:
    """So many kills in the middle of ``history``, and so many power cuts."""
    points = list(history.points())
    killed = [each for each in points if each.variant == KILLED]
    others = [each for each in points if each.variant != KILLED]
    for point in _inside(killed, num_kills):
        yield Earlier(tuple(history.operations[: point.number]), left=point.tree)
    for point in _inside(others, num_cuts):
        # After a power cut nothing is pending.
        yield Earlier(point.notes, start=point.tree, left=point.tree)


def _prepare(place: Path, earlier: Earlier) -> None:
    lay_out(earlier.left, place / "root")
    if earlier.operations:
        append(str(place / "log"), earlier.operations)


def _play(scenes: list[tuple[str, Way, str]]) -> None:
    """On each rank: all of these, one after the other."""
    for story, way, place in scenes:
        recording = RecordingDisk(os.path.join(place, "root"), f"{place}/log", dist.get_rank())
        noted = meetings(recording) if dist.get_world_size() > 1 else nullcontext()
        with disk.using(recording), noted:
            STORIES[story](Stage(way, recording))
        dist.barrier()


def _without_runs(directory: Directory) -> frozenset[tuple[str, object]]:
    """What a tree holds; of JSON and pickles, which tell of the run, only whether they are whole."""
    found: set[tuple[str, object]] = set()
    for name, node in directory.entries.items():
        if isinstance(node, Directory):
            what: object = _without_runs(node)
        else:
            what = node.digest
            if isinstance(node, File) and not node.content.strip(b"\0"):
                what = "zeros" if node.content else "empty"
            elif isinstance(node, File) and node.content[:1] in (b"{", b"\x80"):
                what = "whole" if node.content.rstrip()[-1:] in (b"}", b".") else "a part"
        found.add((_UNIQUE.sub("*", name), what))
    return frozenset(found)


def evenly(items: Sequence[T], count: int) -> list[T]:
    """``count`` of ``items``, or all if there are no more, from the first on and evenly chosen."""
    if count >= len(items):
        return list(items)
    return [items[number * len(items) // count] for number in range(count)]


def _inside(points: Sequence[CrashPoint], count: int) -> list[CrashPoint]:
    """As ``evenly``, but none at the beginning, when nothing was saved yet."""
    return evenly(points[len(points) // 3 :], count)
