"""The orders in which several ranks can have done what each of them did.

A recorded history has one order; a crash may fall where one rank is far ahead of another one. Each rank
keeps its own order. Between two meetings of all ranks they know nothing of each other, so there any
order could have been, except of two operations of which one makes a name that the other one uses.

    operations, with notes MEET -> orders -> crash_points
"""

import random
from collections.abc import Iterator, Sequence

from tests.crash.operations import Kind, MEET, Operation
from tests.crash.points import crash_points, CrashPoint
from tests.crash.tree import EMPTY, Tree

_ORDERS_BY_CHANCE = 4


def interleaved_points(
    operations: Sequence[Operation], start: Tree = EMPTY, limit: int | None = None, seed: int = 0
) -> Iterator[CrashPoint]:
    """What crashes leave in any of the ``orders``; what several of them have in common comes once."""
    seen: set[object] = set()
    for order in orders(operations, limit, seed):
        yield from crash_points(order, start, seen)


def orders(
    operations: Sequence[Operation], limit: int | None = None, seed: int = 0
) -> Iterator[list[Operation]]:
    """The recorded order; others in which each consistent cut of two ranks is passed; some by chance.

    A cut says how much each rank has done. In the k-th order one rank does k operations after each
    meeting and then waits until the others have come to the next one.

    Args:
        limit: so many orders at most, evenly chosen, of which the recorded one is the first.
    """
    history = _History(operations)
    ranks = sorted({each.rank for each in operations})
    longest = max(history.longest_stretch(rank) for rank in ranks) if operations else 0
    plans = [(rank, count) for rank in ranks for count in range(longest + 1)]
    if len(ranks) == 2:
        # One that lags behind is one that the other has left.
        plans = [(rank, count) for rank, count in plans if rank == ranks[0]]
    if len(ranks) < 2:
        plans = []
    by_chance = _ORDERS_BY_CHANCE if plans else 0
    if limit is not None:
        by_chance = min(by_chance, max(limit - 1, 0) // 2)
        plans = _evenly(plans, max(limit - 1, 0) - by_chance)
    yield list(operations)
    for rank, count in plans:
        yield history.ordered(history.ahead(rank, count))
    chance = random.Random(seed)
    for _ in range(by_chance):
        yield history.ordered([chance.random() for _ in operations])


def is_consistent(operations: Sequence[Operation], cut: dict[int, int]) -> bool:
    """Whether the ranks can have done just so many of their operations at one moment."""
    history = _History(operations)
    done = {
        number
        for number, operation in enumerate(operations)
        if history.places[number] < cut[operation.rank]
    }
    return all(history.before[number] <= done for number in done)


def _evenly(plans: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    if count >= len(plans):
        return plans
    return [plans[number * len(plans) // count] for number in range(count)]


class _History:
    """What has to come before what."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations
        self.places: list[int] = []
        """Of each operation: how many of its rank came before."""
        self.stretches: list[tuple[int, int]] = []
        """Of each operation: how many meetings of its rank came before, and how many of its rank since."""
        self.before: list[set[int]] = []
        """Of each operation: those without which it cannot be, but not all that follows from these."""
        self._note_places()
        self._note_causes()

    def longest_stretch(self, rank: int) -> int:
        """The most operations of the rank between two meetings."""
        own = (
            since
            for operation, (_, since) in zip(self.operations, self.stretches, strict=True)
            if operation.rank == rank
        )
        return 1 + max(own, default=-1)

    def ahead(self, rank: int, count: int) -> list[float]:
        """What should come first: so many of this rank after each meeting, then all of the others."""
        wanted = []
        for operation, (_, since) in zip(self.operations, self.stretches, strict=True):
            others = operation.rank != rank
            wanted.append(1.0 if others else 0.0 if since < count else 2.0)
        return wanted

    def ordered(self, wanted: Sequence[float]) -> list[Operation]:
        """All operations, those first that are ``wanted`` first, as far as the causes allow."""
        queues: dict[int, list[int]] = {}
        for number, operation in enumerate(self.operations):
            queues.setdefault(operation.rank, []).append(number)
        for queue in queues.values():
            queue.reverse()
        done: set[int] = set()
        order = []
        while queues:
            # The recorded order keeps all that has to be kept, so its first one left can always be.
            heads = [queue[-1] for queue in queues.values() if self.before[queue[-1]] <= done]
            # Within a stretch; what follows the next meeting is wanted after all that precedes it.
            number = min(heads, key=lambda each: (self.stretches[each][0], wanted[each], each))
            done.add(number)
            order.append(self.operations[number])
            rank = self.operations[number].rank
            queues[rank].pop()
            if not queues[rank]:
                del queues[rank]
        return order

    def _note_places(self) -> None:
        counts: dict[int, int] = {}
        meetings: dict[int, int] = {}
        since: dict[int, int] = {}
        for operation in self.operations:
            rank = operation.rank
            self.places.append(counts.get(rank, 0))
            self.stretches.append((meetings.get(rank, 0), since.get(rank, 0)))
            counts[rank] = counts.get(rank, 0) + 1
            since[rank] = since.get(rank, 0) + 1
            if operation.kind is Kind.NOTE and operation.path == MEET:
                meetings[rank] = meetings.get(rank, 0) + 1
                since[rank] = 0

    def _note_causes(self) -> None:
        uses = [_used(each) for each in self.operations]
        ends: dict[tuple[int, int], int] = {}
        """The last operation of a rank before its meeting of a number."""
        last: dict[int, int] = {}
        ranks = {each.rank for each in self.operations}
        for number, operation in enumerate(self.operations):
            if _is_meeting(operation) and operation.rank in last:
                ends[operation.rank, self.stretches[number][0]] = last[operation.rank]
            last[operation.rank] = number
        for number, operation in enumerate(self.operations):
            found = {
                earlier
                for earlier in range(number)
                if self.operations[earlier].rank != operation.rank
                and _collide(uses[earlier], uses[number])
            }
            # Whoever is beyond a meeting has seen all others come to it, with all they had done.
            meetings = self.stretches[number][0]
            for rank in ranks - {operation.rank} if meetings else ():
                if (end := ends.get((rank, meetings - 1))) is not None:
                    _check_meeting(operation, number, self.operations[end], end)
                    found.add(end)
            self.before.append(found)


def _check_meeting(operation: Operation, number: int, other: Operation, end: int) -> None:
    if end > number:
        raise ValueError(
            f"{other} is number {end} of the history, and {operation} number {number}, though a "
            "meeting lies between them; ranks have noted that they met without waiting for each other."
        )


def _is_meeting(operation: Operation) -> bool:
    return operation.kind is Kind.NOTE and operation.path == MEET


def _used(operation: Operation) -> tuple[tuple[str, bool], ...]:
    """Each path that the operation deals with, and whether what it stands for is changed."""
    match operation.kind:
        case Kind.NOTE:
            return ()
        case Kind.RENAME | Kind.LINK:
            return ((operation.path, True), (operation.target, True))
        case Kind.SYNC_DIRECTORY:
            return ((operation.path, False),)
        case _:
            return ((operation.path, True),)


def _collide(one: tuple[tuple[str, bool], ...], other: tuple[tuple[str, bool], ...]) -> bool:
    """Whether the order of two operations matters to whether they can be at all."""
    return any(
        (first_changes or second_changes)
        and (
            first == second
            or (second.startswith(f"{first}/") and first_changes)
            or (first.startswith(f"{second}/") and second_changes)
        )
        for first, first_changes in one
        for second, second_changes in other
    )
