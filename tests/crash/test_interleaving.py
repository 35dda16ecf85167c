"""Orders of what ranks did: each rank keeps its own, meetings are kept, and nothing is left out."""

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from tests.crash.interleaving import History, interleaved_points, Order, orders
from tests.crash.model import DiskModel
from tests.crash.operations import FROM_RANK_ZERO, Kind, MEET, note, Operation, TO_RANK_ZERO
from tests.crash.points import crash_points
from tests.crash.test_model import do
from tests.crash.tree import from_values

START = from_values({"d": {}})


def stretch(rank: int, number: int, count: int) -> list[Operation]:
    return [do(Kind.CREATE, f"d/{rank}_{number}_{place}", rank=rank) for place in range(count)]


def history_of(*counts: Sequence[int]) -> list[Operation]:
    """Ranks that do so many operations before each meeting; recorded one rank after the other."""
    found: list[Operation] = []
    for number, of_ranks in enumerate(counts):
        for rank, count in enumerate(of_ranks):
            found += [*stretch(rank, number, count), note(rank, MEET)]
    return found


histories = st.integers(2, 3).flatmap(
    lambda ranks: st.lists(
        st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks), min_size=1, max_size=3
    ).map(lambda counts: history_of(*counts))
)


def cuts_of(order: Order, num_ranks: int) -> set[tuple[int, ...]]:
    """How much each rank has done, after each operation from the first that is looked at."""
    found, done = {(0,) * num_ranks}, [0] * num_ranks
    for number, operation in enumerate(order.operations, start=1):
        done[operation.rank] += 1
        if number >= order.first:
            found.add(tuple(done))
    return found


def without_notes(history: Sequence[Operation], cut: Sequence[int]) -> frozenset[Operation]:
    """What a cut means to a disk."""
    done: Counter[int] = Counter()
    found = set()
    for operation in history:
        if done[operation.rank] < cut[operation.rank] and operation.kind is not Kind.NOTE:
            found.add(operation)
        done[operation.rank] += 1
    return frozenset(found)


@given(histories)
def test_every_order_keeps_each_rank_and_every_meeting(history: list[Operation]) -> None:
    ranks = {each.rank for each in history}
    for order in orders(history):
        left = {rank: [each for each in history if each.rank == rank] for rank in ranks}
        for operation in order.operations:
            assert left[operation.rank].pop(0) == operation
            # What a rank does after a meeting comes after all that any other did before it.
            if operation.path != MEET:
                assert all(
                    stretch_of(other) >= stretch_of(operation)
                    for others in left.values()
                    for other in others
                    if other.path != MEET
                )


def stretch_of(operation: Operation) -> int:
    return int(operation.path.split("_")[1])


@given(histories.filter(lambda history: {each.rank for each in history} == {0, 1}))
def test_the_orders_of_two_ranks_pass_every_consistent_cut(history: list[Operation]) -> None:
    counts, recorded = Counter(each.rank for each in history), History(history)
    possible = {
        without_notes(history, cut)
        for cut in itertools.product(range(counts[0] + 1), range(counts[1] + 1))
        if recorded.is_consistent(dict(enumerate(cut)))
    }
    passed = {without_notes(history, cut) for order in orders(history) for cut in cuts_of(order, 2)}
    assert passed == possible


def test_a_cut_through_a_meeting_is_not_consistent() -> None:
    history = history_of((2, 2), (1, 1))
    assert History(history).is_consistent({0: 2, 1: 0})
    assert History(history).is_consistent({0: 4, 1: 2})
    assert not History(history).is_consistent({0: 4, 1: 1})


def test_what_needs_what_another_rank_has_made_stays_behind_it() -> None:
    """Both would have made the directory; only the first one is in the record."""
    history = [
        do(Kind.MKDIR, "new", rank=0),
        do(Kind.CREATE, "new/0", rank=0),
        do(Kind.CREATE, "new/1", rank=1),
        do(Kind.UNLINK, "new/0", rank=0),
        do(Kind.UNLINK, "new/1", rank=0),
        do(Kind.RMDIR, "new", rank=0),
    ]
    for order in orders(history):
        model = DiskModel()
        for operation in order.operations:
            model.apply(operation)
        assert len(order.operations) < len(history) or not model.tree().entries
    assert not History(history).is_consistent({0: 0, 1: 1})
    assert History(history).is_consistent({0: 1, 1: 1})
    assert not History(history).is_consistent({0: 4, 1: 0})


def test_another_order_has_states_that_the_recorded_one_has_not() -> None:
    history = history_of((2, 2))
    recorded = {point.tree.digest for point in crash_points(history, START)}
    ahead = from_values({"d": {"1_0_0": b"", "1_0_1": b""}})
    assert ahead.digest not in {
        point.tree.digest for point in crash_points(history, START) if point.variant == "killed"
    }
    points = list(interleaved_points(history, START))
    assert ahead.digest in {point.tree.digest for point in points if point.variant == "killed"}
    assert recorded <= {point.tree.digest for point in points}
    assert len({(point.tree.digest, point.notes) for point in points}) == len(points)


def test_a_limit_gives_the_recorded_order_first_and_no_more_than_it_says() -> None:
    history = history_of((6, 6))
    for limit in range(1, 12):
        found = list(orders(history, limit))
        assert found[0] == Order(history)
        assert len(found) <= limit
    assert list(orders(history, 20)) == list(orders(history, 20))
    assert list(orders(history, 20)) != list(orders(history, 20, seed=1))


@pytest.mark.parametrize(
    "direction, waits, does_not", [(TO_RANK_ZERO, 0, 1), (FROM_RANK_ZERO, 1, 0), ("", 0, None)]
)
def test_who_does_not_wait_at_a_meeting_may_be_ahead(
    direction: str, waits: int, does_not: int | None
) -> None:
    history = [
        *(operation for rank in (0, 1) for operation in stretch(rank, 0, 1)),
        *(note(rank, MEET, direction) for rank in (0, 1)),
        *(operation for rank in (0, 1) for operation in stretch(rank, 1, 1)),
    ]
    recorded = History(history)
    assert not recorded.is_consistent({waits: 3, 1 - waits: 0})
    assert recorded.is_consistent({waits: 3, 1 - waits: 1})
    if does_not is not None:
        assert recorded.is_consistent({does_not: 3, 1 - does_not: 0})


def test_meetings_of_two_threads_are_counted_apart() -> None:
    """The threads of the two ranks have come to their meetings in another order."""
    saving = [note(rank, MEET, content=b"saving") for rank in (0, 1)]
    training = [note(rank, MEET) for rank in (0, 1)]
    history = [saving[0], *stretch(0, 0, 1), *training, *stretch(1, 0, 1), saving[1]]
    history += stretch(1, 1, 1)
    recorded = History(history)
    # After its meeting in training rank 1 knows what rank 0 had done by then, and that is all.
    assert not recorded.is_consistent({0: 1, 1: 2})
    assert recorded.is_consistent({0: 2, 1: 4})


def test_a_meeting_holds_although_one_rank_noted_it_late() -> None:
    history = [
        *stretch(0, 0, 1),
        note(1, MEET),
        *stretch(1, 1, 1),
        note(0, MEET),
        *stretch(0, 1, 1),
    ]
    recorded = History(history)
    assert not recorded.is_consistent({0: 0, 1: 2})
    assert recorded.is_consistent({0: 1, 1: 2})
    assert list(orders(history))


def test_what_another_thread_does_at_a_meeting_is_not_waited_for() -> None:
    history = [*stretch(0, 0, 1), note(1, MEET), *stretch(1, 1, 1)]
    # The others have met by now; this rank has yet to note it, and does something else first.
    history += [*stretch(0, 7, 1), note(0, MEET)]
    recorded = History(history)
    assert recorded.is_consistent({0: 1, 1: 2})
    assert not recorded.is_consistent({0: 0, 1: 2})


def test_one_rank_has_one_order() -> None:
    history = stretch(0, 0, 3)
    assert list(orders(history)) == [Order(history)]
    assert list(orders([])) == [Order([])]
