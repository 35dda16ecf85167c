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
)
from benchmarks.harness.results import Result, slowest
from benchmarks.saving.cases import LIBRARY, MANAGER

LIMIT = 1.05
"""What a manager may cost, over the library by itself."""

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
    """The manager beside the library."""

    ratio: Estimate | None
    difference: Estimate
    """In seconds."""

    @property
    def verdict(self) -> Verdict:
        return Verdict.TOO_FEW if self.ratio is None else verdict(self.ratio, LIMIT)


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
        """What the metric cannot be below."""
        return self.limits.median(*METRICS[name].limits)

    def first(self, side: str, of: Callable[[Sample], float]) -> float:
        """The same of the first save, of which there is one."""
        return max(of(rank["first"][side]) for rank in self.result.by_rank)

    def comparison(self, name: str) -> Comparison | None:
        """Manager over library; None where there is nothing to compare."""
        if MANAGER not in self.sides:
            return None
        return _compare(self.samples(MANAGER, name), self.samples(LIBRARY, name))

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

    def memory(self, side: str, name: str) -> float:
        """Memory of the rank that took most, over its part of the state."""
        return max(rank["memory"][side][name] / rank["state_bytes"] for rank in self.result.by_rank)

    def _written(self, side: str) -> list[int]:
        written: list[int] = self.result.by_rank[0]["written"][side]
        return written


class Loads:
    """What was measured of the loads of a format."""

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

    def comparison(self, layout: str) -> Comparison | None:
        """Manager over library."""
        return _compare(self.samples(MANAGER, layout), self.samples(LIBRARY, layout))


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


def _compare(manager: Sequence[float], library: Sequence[float]) -> Comparison | None:
    if not manager:
        return None
    return Comparison(
        ratio=ratio_of_pairs(manager, library), difference=difference_of_pairs(manager, library)
    )
