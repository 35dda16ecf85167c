"""Orders of what ranks did: each rank keeps its own, meetings are kept, and nothing is left out."""

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from tests.crash.interleaving import interleaved_points, is_consistent, orders
from tests.crash.model import DiskModel
from tests.crash.operations import Kind, MEET, note, Operation
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


def cuts_of(order: Sequence[Operation], num_ranks: int) -> set[tuple[int, ...]]:
    """How much each rank has done, after each operation."""
    found, done = {(0,) * num_ranks}, [0] * num_ranks
    for operation in order:
        done[operation.rank] += 1
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
        assert sorted(order, key=lambda each: each.rank) == sorted(history, key=lambda each: each.rank)
        for rank in ranks:
            own = [each for each in history if each.rank == rank]
            assert [each for each in order if each.rank == rank] == own
        met: Counter[int] = Counter()
        left = Counter(each.rank for each in history if each.path != MEET)
        assert left.total() == len(history) - len([each for each in history if each.path == MEET])
        for operation in order:
            if operation.path == MEET:
                met[operation.rank] += 1
            else:
                # Whoever does something after a meeting knows that no other one has to come to it.
                stretch_of = int(operation.path.split("_")[1])
                assert met[operation.rank] == stretch_of
                assert all(
                    int(other.path.split("_")[1]) >= stretch_of
                    for other in order[order.index(operation) + 1 :]
                    if other.path != MEET
                )


@given(histories.filter(lambda history: {each.rank for each in history} == {0, 1}))
def test_the_orders_of_two_ranks_pass_every_consistent_cut(history: list[Operation]) -> None:
    counts = Counter(each.rank for each in history)
    possible = {
        without_notes(history, cut)
        for cut in itertools.product(range(counts[0] + 1), range(counts[1] + 1))
        if is_consistent(history, dict(enumerate(cut)))
    }
    passed = {
        without_notes(history, cut) for order in orders(history) for cut in cuts_of(order, 2)
    }
    assert passed == possible


def test_a_cut_through_a_meeting_is_not_consistent() -> None:
    history = history_of((2, 2), (1, 1))
    assert is_consistent(history, {0: 2, 1: 0})
    assert is_consistent(history, {0: 4, 1: 2})
    assert not is_consistent(history, {0: 4, 1: 1})


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
        for operation in order:
            model.apply(operation)
        assert not model.tree().entries
    assert not is_consistent(history, {0: 0, 1: 1})
    assert is_consistent(history, {0: 1, 1: 1})
    assert not is_consistent(history, {0: 4, 1: 0})


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
        assert found[0] == history
        assert len(found) <= limit
    assert list(orders(history, 5)) == list(orders(history, 5))
    assert list(orders(history, 5)) != list(orders(history, 5, seed=1))


def test_one_rank_has_one_order() -> None:
    history = stretch(0, 0, 3)
    assert list(orders(history)) == [history]
    assert list(orders([])) == [[]]


def test_ranks_that_did_not_wait_for_each_other_are_told() -> None:
    history = [note(0, MEET), *stretch(0, 1, 1), *stretch(1, 0, 1), note(1, MEET), *stretch(1, 1, 1)]
    with pytest.raises(ValueError, match="noted that they met without waiting"):
        list(orders(history))
