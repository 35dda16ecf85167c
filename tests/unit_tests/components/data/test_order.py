import pytest
from hypothesis import given, settings, strategies as st
from torchtitan.components.data.order import RowOrder, Share


@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(1, 100), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 1000))
def test_every_epoch_is_a_permutation_of_the_rows(num_rows: int, seed: int, epoch: int) -> None:
    order = RowOrder(num_rows, seed, shuffle=True)
    rows = [order.row_at(epoch * num_rows + index) for index in range(num_rows)]
    assert sorted(rows) == list(range(num_rows))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def epoch_order(seed: int, epoch: int) -> tuple[int, ...]:
        order = RowOrder(100, seed, shuffle=True)
        return tuple(order.row_at(epoch * 100 + index) for index in range(100))

    orders = {epoch_order(seed, epoch) for seed in (42, 43) for epoch in range(3)}
    assert len(orders) == 6


def test_without_shuffle_rows_come_as_they_lie() -> None:
    order = RowOrder(5, seed=42, shuffle=False)
    assert [order.row_at(position) for position in range(12)] == [0, 1, 2, 3, 4] * 2 + [0, 1]


def test_the_order_is_the_one_that_saved_positions_count_in() -> None:
    # Another order under the same state version would silently repeat and skip rows after a resume.
    order = RowOrder(23, seed=42, shuffle=True)
    assert [order.row_at(position) for position in range(8)] == [16, 9, 2, 17, 13, 11, 6, 22]
    assert [order.row_at(23 + position) for position in range(8)] == [1, 7, 17, 11, 0, 8, 4, 10]


def test_more_rows_than_can_be_shuffled_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be shuffled"):
        RowOrder(2**32, seed=0, shuffle=True)
    assert RowOrder(2**32, seed=0, shuffle=False).row_at(2**32 + 7) == 7


@settings(max_examples=40, deadline=None)
@given(
    start=st.integers(0, 50),
    rows=st.integers(1, 4),
    world=st.integers(1, 5),
    microbatches=st.integers(1, 5),
)
def test_shares_cover_each_position_once_in_blocks(
    start: int, rows: int, world: int, microbatches: int
) -> None:
    for microbatch in range(microbatches):
        items = range(microbatch * rows, (microbatch + 1) * rows)
        taken = [
            Share(rows, rank, world).position_of(start, item)
            for rank in range(world)
            for item in items
        ]
        first = start + microbatch * rows * world
        assert taken == list(range(first, first + rows * world))
