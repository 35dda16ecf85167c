"""The orders in which several ranks can have done what each of them did.

A recorded history has one order; a crash may fall where one rank is far ahead of another one. Each rank
keeps its own order. Where ranks wait for others these have done all that comes before. Else any order
could have been, except of two operations of which one makes or takes a name that the other one uses.

    operations, with notes MEET -> orders -> crash_points
"""

import random
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.crash.operations import FROM_RANK_ZERO, Kind, MEET, Operation, TO_RANK_ZERO
from tests.crash.points import crash_points, CrashPoint
from tests.crash.tree import EMPTY, Tree

_BY_CHANCE_IN, _BY_CHANCE = 8, 8
"""One of so many orders goes back and forth by chance, and so many of them where there is no limit."""


@dataclass(frozen=True, slots=True)
class Order:
    """Operations of several ranks, all or as many as there are before they stop."""

    operations: list[Operation]
    first: int = 1
    """What was before this one comes in another order as well."""


def interleaved_points(
    operations: Sequence[Operation], start: Tree = EMPTY, limit: int | None = None, seed: int = 0
) -> Iterator[CrashPoint]:
    """What crashes leave in any of the ``orders``; what several of them have in common comes once."""
    seen: set[object] = set()
    for order in orders(operations, limit, seed):
        yield from crash_points(order.operations, start, seen, order.first)


def orders(
    operations: Sequence[Operation], limit: int | None = None, seed: int = 0
) -> Iterator[Order]:
    """The recorded order, others that pass each consistent cut of two ranks, and some by chance.

    A cut says how much each rank has done. For each operation of each rank there is an order in which
    nobody does what need not be done before it, and then the others all they can without that rank.

    Args:
        limit: so many orders at most, evenly chosen, of which the recorded one is the first.
    """
    history = History(operations)
    yield Order(list(operations))
    ranks = sorted(history.of_ranks)
    if len(ranks) < 2:
        return
    plans = [(rank, done) for rank in ranks for done in range(len(history.of_ranks[rank]) + 1)]
    if limit is not None:
        plans = _evenly(plans, limit - 1)
    chance = random.Random(seed)
    for number, (rank, done) in enumerate(plans, start=1):
        if number % _BY_CHANCE_IN == 0 and limit is not None:
            yield Order(history.shuffled(chance))
        else:
            yield history.ahead(rank, done)
    if limit is None:
        for _ in range(_BY_CHANCE):
            yield Order(history.shuffled(chance))


def _evenly(plans: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    if count >= len(plans):
        return plans
    return [plans[number * len(plans) // count] for number in range(count)]


class History:
    """What of a recorded history has to come before what."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations
        self.of_ranks: dict[int, list[int]] = defaultdict(list)
        """The numbers of the operations of each rank."""
        for number, operation in enumerate(operations):
            self.of_ranks[operation.rank].append(number)
        self.before: list[set[int]] = [set() for _ in operations]
        """Of each operation: what of others it cannot be without, but not all that this needs in turn."""
        self._note_collisions()
        self._note_meetings()

    def is_consistent(self, cut: dict[int, int]) -> bool:
        """Whether the ranks can have done just so many of their operations at one moment."""
        done = {number for rank, count in cut.items() for number in self.of_ranks[rank][:count]}
        return all(self.before[number] <= done for number in done)

    def needs(self, number: int, other: int) -> bool:
        """Whether the operation of this number cannot have been without the other one."""
        return other in self._closed([number])

    def ahead(self, rank: int, count: int) -> Order:
        """No more than this rank needs to do so much, and then all that the others can do."""
        done = self._closed(self.of_ranks[rank][:count])
        order = sorted(done)
        first = max(len(order), 1)
        blocked = {rank}
        for number, operation in enumerate(self.operations):
            if number in done or operation.rank in blocked:
                continue
            if self.before[number] <= done:
                done.add(number)
                order.append(number)
            else:
                blocked.add(operation.rank)
        return Order([self.operations[number] for number in order], first)

    def shuffled(self, chance: random.Random) -> list[Operation]:
        """All operations, now of this rank and now of that."""
        queues = {rank: list(reversed(numbers)) for rank, numbers in self.of_ranks.items()}
        done: set[int] = set()
        order = []
        while queues:
            # The recorded order keeps all that has to be kept, so its first one left can always be.
            ready = [rank for rank, queue in queues.items() if self.before[queue[-1]] <= done]
            rank = chance.choice(ready)
            number = queues[rank].pop()
            done.add(number)
            order.append(self.operations[number])
            if not queues[rank]:
                del queues[rank]
        return order

    def _closed(self, numbers: Iterable[int]) -> set[int]:
        """With all that these need."""
        counts: dict[int, int] = dict.fromkeys(self.of_ranks, 0)
        places = {
            number: place for own in self.of_ranks.values() for place, number in enumerate(own)
        }
        left = list(numbers)
        while left:
            number = left.pop()
            rank = self.operations[number].rank
            for each in self.of_ranks[rank][counts[rank] : places[number] + 1]:
                left += self.before[each]
            counts[rank] = max(counts[rank], places[number] + 1)
        return {number for rank, count in counts.items() for number in self.of_ranks[rank][:count]}

    def _note_collisions(self) -> None:
        uses = [_used(each) for each in self.operations]
        for number, operation in enumerate(self.operations):
            for earlier in range(number):
                if self.operations[earlier].rank != operation.rank:
                    if _collide(uses[earlier], uses[number]):
                        self.before[number].add(earlier)

    def _note_meetings(self) -> None:
        """Whoever has waited for others knows that they have done all that is before the meeting."""
        before: dict[tuple[bytes, int, int], int] = {}
        """Kind and number of a meeting and a rank: so many operations it had done."""
        kinds: dict[int, tuple[bytes, int]] = {}
        counts: Counter[tuple[bytes, int]] = Counter()
        for rank, numbers in self.of_ranks.items():
            for place, number in enumerate(numbers):
                operation = self.operations[number]
                if operation.kind is Kind.NOTE and operation.path == MEET:
                    kind = operation.content
                    kinds[number] = kind, counts[kind, rank]
                    before[kind, counts[kind, rank], rank] = place
                    counts[kind, rank] += 1
        for rank, numbers in self.of_ranks.items():
            for number, following in zip(numbers, numbers[1:], strict=False):
                if number in kinds:
                    for other in self._others_waited_for(rank, self.operations[number].target):
                        place = before.get((*kinds[number], other), 0)
                        # Of what another thread of that rank did meanwhile some may have come later.
                        own = self.of_ranks[other]
                        if count := min(place, bisect_left(own, following)):
                            self.before[following].add(own[count - 1])

    def _others_waited_for(self, rank: int, direction: str) -> list[int]:
        others = [other for other in self.of_ranks if other != rank]
        if direction == TO_RANK_ZERO:
            return others if rank == 0 else []
        if direction == FROM_RANK_ZERO:
            return [other for other in others if other == 0]
        return others


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
