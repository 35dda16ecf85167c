"""What samples say: a median, the interval it lies in, and whether a limit was missed. Pure.

Two ways to do one thing are measured in turns, A B, B A, A B, ..., so that a machine that is slow for a
moment is slow for both. Of each pair the ratio is taken, and of the ratios the median. Its interval
reaches from one ordered ratio to another and needs no assumption about how times are distributed: the
true median lies outside only if almost all samples fell on one side of it, which coin tosses bound.

    samples -> estimate | ratio_of_pairs -> verdict
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

CONFIDENCE = 0.95
T = TypeVar("T")


class Verdict(str, Enum):
    """How a ratio stands to its limit."""

    MET = "met"
    """The whole interval is at or below the limit."""

    OPEN = "open"
    """The limit lies inside of the interval: these samples do not decide it."""

    MISSED = "missed"
    """The whole interval lies above the limit."""

    UNCHANGED = "unchanged"
    """Of what may not grow at all: there is no telling the two sides apart."""

    TOO_FEW = "too few pairs"
    """There are not enough samples for any interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A median with its interval."""

    median: float
    low: float | None
    """None, like ``high``, where the samples are too few for an interval."""

    high: float | None
    num: int

    def scaled(self, factor: float) -> "Estimate":
        """The same in another unit; ``factor`` is positive."""
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Estimate(median=self.median * factor, low=low, high=high, num=self.num)


def interval_position(num: int, confidence: float = CONFIDENCE) -> int | None:
    """The largest k for which the k-th smallest to the k-th largest of ``num`` samples will do.

    The true median lies below the k-th smallest only if fewer than k of ``num`` tosses of a fair coin
    show heads. None where even the extremes enclose it less often than ``confidence`` asks for.
    """
    outside, best = 0.0, None
    for k in range(1, num // 2 + 1):
        outside += 2 * math.comb(num, k - 1) / 2**num
        if outside > 1 - confidence:
            break
        best = k
    return best


def estimate(samples: Sequence[float]) -> Estimate:
    """The median of ``samples`` and its 95 % interval.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("a median of no samples was asked for")
    ordered, position = sorted(samples), interval_position(len(samples))
    low, high = (None, None) if position is None else (ordered[position - 1], ordered[-position])
    return Estimate(median=statistics.median(ordered), low=low, high=high, num=len(ordered))


def ratio_of_pairs(over: Sequence[float], under: Sequence[float]) -> Estimate | None:
    """The median of ``over[i] / under[i]``; None where something under the line is not positive."""
    if len(over) != len(under) or not over:
        raise ValueError(f"{len(over)} and {len(under)} samples are no pairs")
    if min(under) <= 0:
        return None
    return estimate([a / b for a, b in zip(over, under, strict=True)])


def difference_of_pairs(left: Sequence[float], right: Sequence[float]) -> Estimate:
    """The median of ``left[i] - right[i]``."""
    return estimate([a - b for a, b in zip(left, right, strict=True)])


def verdict(ratio: Estimate, limit: float) -> Verdict:
    """Whether ``ratio`` keeps to ``limit``; it is missed only if the whole interval lies above."""
    if ratio.low is None or ratio.high is None:
        return Verdict.TOO_FEW
    if ratio.low > limit:
        return Verdict.MISSED
    return Verdict.MET if ratio.high <= limit else Verdict.OPEN


def verdict_on_change(ratio: Estimate) -> Verdict:
    """Whether there is any growth to be seen, where the limit is that there should be none."""
    found = verdict(ratio, 1.0)
    return Verdict.UNCHANGED if found is Verdict.OPEN else found


def turns(sides: Sequence[T], pair: int) -> list[T]:
    """``sides`` in the order of the pair of that number: A B, B A, A B, ..., so neither is always first."""
    return list(sides if pair % 2 == 0 else reversed(sides))


NUM_BLOCKS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """How something that should stay the same went over a row of readings."""

    change: float
    """Median of the last block of readings minus that of the first."""

    grows: bool


def growth(readings: Sequence[float], tolerance: float) -> Growth:
    """Tell steady growth from a single jump and from noise.

    The readings are cut into five blocks. What leaks is higher in nearly each block than in the one
    before, by its share of ``tolerance``; memory that is taken once and kept is higher in one.

    Raises:
        ValueError: fewer readings than blocks.
    """
    if len(readings) < NUM_BLOCKS:
        raise ValueError(f"{len(readings)} readings make no {NUM_BLOCKS} blocks")
    size = len(readings) // NUM_BLOCKS
    # What is left over is at the front, where things still settle.
    first = len(readings) - NUM_BLOCKS * size
    medians = [
        statistics.median(readings[start : start + size])
        for start in range(first, len(readings), size)
    ]
    share = tolerance / (NUM_BLOCKS - 1)
    num_rises = sum(b - a > share for a, b in zip(medians, medians[1:], strict=False))
    return Growth(change=medians[-1] - medians[0], grows=num_rises >= NUM_BLOCKS - 2)
