"""What samples may be taken to say, on samples whose truth is known."""

import itertools
import math
import random

import pytest
from benchmarks.harness.pairs import (
    difference_of_pairs,
    estimate,
    Estimate,
    growth,
    interval_position,
    ratio_of_pairs,
    turns,
    Verdict,
    verdict,
)
from hypothesis import given, strategies as st

TIMES = st.floats(min_value=1e-6, max_value=1e3)


def coverage(num: int, position: int) -> float:
    """By trying all outcomes: how often the median is between the position-th from either end."""
    outcomes = [sum(sides) for sides in itertools.product((0, 1), repeat=num)]
    return sum(position <= below <= num - position for below in outcomes) / len(outcomes)


@pytest.mark.parametrize("num", range(6, 16))
def test_the_interval_holds_in_95_of_100_cases_and_a_narrower_one_does_not(num: int) -> None:
    position = interval_position(num)
    assert position is not None
    assert coverage(num, position) >= 0.95
    assert position + 1 > num - position or coverage(num, position + 1) < 0.95


def test_fewer_than_six_samples_have_no_interval() -> None:
    assert [interval_position(num) for num in range(7)] == [None] * 6 + [1]
    assert estimate([1.0, 2.0]) == Estimate(median=1.5, low=None, high=None, num=2)


def test_the_interval_of_15_samples_goes_from_the_fourth_to_the_twelfth() -> None:
    samples = [float(number) for number in range(1, 16)]
    random.Random(1).shuffle(samples)
    assert estimate(samples) == Estimate(median=8.0, low=4.0, high=12.0, num=15)


def test_the_interval_encloses_the_truth_as_often_as_it_says() -> None:
    draw = random.Random(2)
    found = [estimate([draw.lognormvariate(0, 2) for _ in range(15)]) for _ in range(2000)]
    enclosed = sum(one.low <= 1.0 <= one.high for one in found if one.low and one.high)
    # 96.5 % by theory; five standard deviations below.
    assert enclosed / len(found) > 0.945


@given(st.lists(TIMES, min_size=6, max_size=40), st.floats(min_value=0.1, max_value=10))
def test_an_interval_is_in_order_and_keeps_to_the_unit(samples: list[float], unit: float) -> None:
    found = estimate(samples)
    assert found.low is not None and found.high is not None
    assert min(samples) <= found.low <= found.median <= found.high <= max(samples)
    scaled = found.scaled(unit)
    assert math.isclose(scaled.median, found.median * unit) and scaled.num == len(samples)


def test_the_ratio_is_that_of_the_pairs_so_a_machine_that_slows_down_changes_nothing() -> None:
    under = [1.0 + number for number in range(15)]
    over = [1.1 * value for value in under]
    found = ratio_of_pairs(over, under)
    assert found is not None and found.low is not None and found.high is not None
    assert math.isclose(found.low, 1.1) and math.isclose(found.high, 1.1)
    assert math.isclose(difference_of_pairs(over, under).median, 0.8)


def test_there_is_no_ratio_to_nothing_and_no_pair_of_different_counts() -> None:
    assert ratio_of_pairs([1.0], [0.0]) is None
    with pytest.raises(ValueError, match="1 and 2 samples are no pairs"):
        ratio_of_pairs([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no samples"):
        estimate([])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.9, 1.0, Verdict.MET),
        (1.0, 1.05, Verdict.MET),
        (1.0, 1.051, Verdict.OPEN),
        (1.05, 1.2, Verdict.OPEN),
        (1.051, 1.2, Verdict.MISSED),
        (None, None, Verdict.TOO_FEW),
    ],
)
def test_a_limit_is_missed_only_when_the_whole_interval_lies_above(
    low: float | None, high: float | None, expected: Verdict
) -> None:
    assert verdict(Estimate(median=1.04, low=low, high=high, num=15), 1.05) is expected


def test_neither_side_is_always_first() -> None:
    assert [turns("AB", pair) for pair in range(3)] == [["A", "B"], ["B", "A"], ["A", "B"]]


def noisy(num: int, per_save: float = 0.0, jump_at: int | None = None) -> list[float]:
    draw = random.Random(3)
    jump = [0.0 if jump_at is None or number < jump_at else 5.0 for number in range(num)]
    return [per_save * number + jump[number] + draw.uniform(0, 0.1) for number in range(num)]


def test_what_leaks_a_little_with_each_save_grows() -> None:
    found = growth(noisy(50, per_save=0.05), tolerance=1.0)
    assert found.grows
    assert found.change == pytest.approx(40 * 0.05, abs=0.2)


@pytest.mark.parametrize("jump_at", [None, 5, 15, 25, 38, 49])
def test_noise_does_not_grow_and_memory_taken_once_does_not_either(jump_at: int | None) -> None:
    assert not growth(noisy(50, jump_at=jump_at), tolerance=1.0).grows


def test_a_descriptor_in_each_save_grows_and_a_steady_number_does_not() -> None:
    assert growth([float(20 + number) for number in range(12)], tolerance=0).grows
    assert growth([20.0] * 12, tolerance=0).grows is False
    with pytest.raises(ValueError, match="4 readings"):
        growth([1.0] * 4, tolerance=0)
