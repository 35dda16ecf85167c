"""From the raw samples of a cell to the numbers of the tables. Pure.

Ranks save together, so a sample is that of the slowest rank. Every comparison of the two sides is made
pair by pair, see ``harness/pairs.py``.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.pairs import (
    difference_of_pairs,
    Estimate,
    growth,
    Growth,
    ratio_of_pairs,
    verdict,
    Verdict,
    verdict_on_change,
)
from benchmarks.harness.results import Result, slowest
from benchmarks.saving.cases import FULL, LIBRARY, MANAGER, OFF, PIECES, SIZE, WITH, WITHOUT

LIMIT = 1.05
"""What a manager may cost, over the library by itself."""

DIGEST_LIMIT = 1.10
"""What a save may take until it is durable, over one that takes no digests and leaves no manifest."""

LIBRARY_LIMITS = {"tc": 1.10}
"""The same for loads of a format for which the library has two ways, of which the faster one counts."""

CHECK_LIMITS = {FULL: 1.25, SIZE: 1.02}
"""What a load may take that checks this much, over one that checks nothing."""

NO_CHANGE = 1.0
"""A limit of what must not be seen to grow."""

_MEMORY_TOLERANCE_BYTES = 1 << 20
"""Over all saves of a measurement of growth; Python's own heap does not stand quite still."""

Sample = dict[str, float]


def _blocked(sample: Sample) -> float:
    return sample["call"] + sample["wait"]


def _durable(sample: Sample) -> float:
    return sample["done"] + sample["debt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """Something that every save has."""

    title: str
    cycle: str
    of: Callable[[Sample], float]
    limits: tuple[str, ...] = ()
    """It cannot be below the smallest of these."""

    is_compared: bool = True
    """Whether the managers are held to the limit in it."""


METRICS: dict[str, Metric] = {
    "call": Metric(
        title="inside of save()",
        cycle="idle",
        of=lambda sample: sample["call"],
        limits=("copy",),
        is_compared=False,
    ),
    "blocked": Metric(
        title="blocked, nothing to overlap", cycle="idle", of=_blocked, limits=("copy",)
    ),
    "overlapped": Metric(
        title="blocked, forward and backward to overlap",
        cycle="busy",
        of=_blocked,
        limits=("copy",),
    ),
    "wait_beside": Metric(
        title="wait after a forward and backward",
        cycle="busy",
        of=lambda sample: sample["wait"],
        is_compared=False,
    ),
    "durable": Metric(
        title="durable, nothing beside it", cycle="idle", of=_durable, limits=("cached", "direct")
    ),
    "durable_beside": Metric(
        title="durable, training beside it",
        cycle="busy",
        of=_durable,
        limits=("cached", "direct"),
    ),
    "lost": Metric(
        title="training time lost in all",
        cycle="busy",
        of=lambda sample: sample["lost"],
        limits=("copy",),
        is_compared=False,
    ),
    "slow": Metric(
        title="steps slower while writing",
        cycle="busy",
        of=lambda sample: sample["slow"],
        is_compared=False,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One side beside another."""

    ratio: Estimate | None
    difference: Estimate
    """In seconds."""

    limit: float = LIMIT

    @property
    def verdict(self) -> Verdict:
        if self.ratio is None:
            return Verdict.TOO_FEW
        if self.limit == NO_CHANGE:
            return verdict_on_change(self.ratio)
        return verdict(self.ratio, self.limit)


class Limits:
    """The limits of the machine in one cell."""

    def __init__(self, by_rank: Sequence[Any]) -> None:
        samples = [rank["limits"] for rank in by_rank]
        names = samples[0][0] if samples and samples[0] else ()
        self.samples = {
            name: slowest([[sample[name] for sample in rank] for rank in samples]) for name in names
        }

    def median(self, *names: str) -> float | None:
        """The smallest median of ``names``, of those that could be measured."""
        found = [statistics.median(self.samples[name]) for name in names if name in self.samples]
        return min(found, default=None)


class Saves:
    """What was measured of the saves of a case."""

    OVER, UNDER = MANAGER, LIBRARY
    """Which side is compared with which."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.limits = Limits(result.by_rank)
        self.sides: list[str] = list(result.by_rank[0]["idle"])
        self.state_bytes = sum(rank["state_bytes"] for rank in result.by_rank)

    def samples(self, side: str, name: str) -> list[float]:
        """One number per pair; empty where the case has no such thing."""
        metric = METRICS[name]
        return slowest(
            [[metric.of(one) for one in rank[metric.cycle][side]] for rank in self.result.by_rank]
        )

    def median(self, side: str, name: str) -> float | None:
        samples = self.samples(side, name)
        return statistics.median(samples) if samples else None

    def limit(self, name: str) -> float | None:
        """What the metric cannot be below on this machine."""
        return self.limits.median(*METRICS[name].limits)

    def first(self, side: str, of: Callable[[Sample], float]) -> list[float]:
        """The same of first saves, each of another object; they are no pairs."""
        return slowest([[of(one) for one in rank["first"][side]] for rank in self.result.by_rank])

    def comparison(self, name: str) -> Comparison | None:
        """One side over the other; None where there is nothing to compare."""
        limit = self._limit_of_ratio(name)
        if limit is None or self.OVER not in self.sides:
            return None
        return _compare(self.samples(self.OVER, name), self.samples(self.UNDER, name), limit)

    def _limit_of_ratio(self, name: str) -> float | None:
        return LIMIT if METRICS[name].is_compared else None

    def quiet_steps(self) -> list[float]:
        """Seconds of a step without a save in flight; empty where training waits for saves."""
        samples = slowest([rank["quiet_step"] for rank in self.result.by_rank])
        return [step for step in samples if step > 0]

    def written_share(self, side: str) -> float:
        """Bytes of the checkpoint over bytes of the state."""
        return sum(self._written(side)) / self.state_bytes

    def imbalance(self, side: str) -> float:
        """Bytes of the rank that wrote most over the mean."""
        written = self._written(side)
        return max(written) / statistics.mean(written)

    def memory(self, side: str, *names: str) -> list[float]:
        """Memory of the rank that took most, over its part of the state; one number for each second save.

        Training itself takes a little more or less at times, so a single one may say too much.
        """
        by_rank = [
            [sum(one[name] for name in names) / rank["state_bytes"] for one in rank["memory"][side]]
            for rank in self.result.by_rank
        ]
        return slowest(by_rank)

    def _written(self, side: str) -> list[int]:
        written: list[int] = self.result.by_rank[0]["written"][side]
        return written


class Digests(Saves):
    """What was measured of the saves of a case with digests and without."""

    OVER, UNDER = WITH, WITHOUT

    def _limit_of_ratio(self, name: str) -> float | None:
        if not METRICS[name].is_compared:
            return None
        if METRICS[name].of is _durable:
            return DIGEST_LIMIT
        # A save that training waits for blocks until it is durable, which is compared already.
        return NO_CHANGE if self.samples(self.OVER, "overlapped") else None


class Loads:
    """What was measured of the loads of a format."""

    LIMITS: dict[str, float] = {MANAGER: LIMIT}
    """Which sides are compared, and what each of them may take over the fastest of ``UNDER``."""

    UNDER: tuple[str, ...] = (LIBRARY, PIECES)

    def __init__(self, result: Result) -> None:
        self.result = result
        self.limits = Limits(result.by_rank)
        self.layouts: list[str] = list(result.by_rank[0]["load"])
        self.sides: list[str] = list(result.by_rank[0]["load"][self.layouts[0]])

    def samples(self, side: str, layout: str) -> list[float]:
        """Seconds, one number per pair."""
        return slowest([rank["load"][layout][side] for rank in self.result.by_rank])

    def median(self, side: str, layout: str) -> float:
        return statistics.median(self.samples(side, layout))

    def under(self, layout: str) -> str:
        """The side that the others are compared with."""
        there = [side for side in self.UNDER if side in self.sides]
        return min(there, key=lambda side: self.median(side, layout))

    def comparisons(self, layout: str) -> dict[str, Comparison]:
        """Of each side that is compared."""
        under = self.samples(self.under(layout), layout)
        found = {
            side: _compare(self.samples(side, layout), under, self._limit(side, limit))
            for side, limit in self.LIMITS.items()
        }
        return {side: one for side, one in found.items() if one is not None}

    def _limit(self, side: str, limit: float) -> float:
        return LIBRARY_LIMITS.get(self.result.cell.case, limit) if side == MANAGER else limit


class Checks(Loads):
    """What was measured of the loads of a format that check more or less."""

    LIMITS, UNDER = CHECK_LIMITS, (OFF,)


class Growths:
    """What was measured of the growth over many saves."""

    TOLERANCES = {
        "memory": _MEMORY_TOLERANCE_BYTES,
        "shared": _MEMORY_TOLERANCE_BYTES,
        "descriptors": 0,
    }

    def __init__(self, result: Result) -> None:
        self.result = result
        self.sides: list[str] = list(result.by_rank[0]["readings"])

    def num_saves(self, side: str) -> int:
        return len(self.result.by_rank[0]["readings"][side])

    def growth(self, side: str, name: str) -> Growth:
        """That of the rank whose use of ``name`` changed most."""
        by_rank = [
            growth([reading[name] for reading in rank["readings"][side]], self.TOLERANCES[name])
            for rank in self.result.by_rank
        ]
        return max(by_rank, key=lambda found: (found.grows, found.change))


def _compare(
    over: Sequence[float], under: Sequence[float], limit: float = LIMIT
) -> Comparison | None:
    if not over:
        return None
    return Comparison(
        ratio=ratio_of_pairs(over, under),
        difference=difference_of_pairs(over, under),
        limit=limit,
    )
