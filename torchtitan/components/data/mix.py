"""Mix datasets by weight, or put them one behind the other.

A mixture takes rows of its parts in turns that depend on the weights alone. The one fact to know: a
weight is a share of the rows, and so of the tokens, and any place in the mixture is reached by
arithmetic: the table of one period says whose turn it is and how many turns each part had before.

    weights -> Turns (one period) -> position -> (part, position in the part)
    RowDataset, ...               -> MixedRows
    RowStream (one at least), ... -> MixedStream
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from torchtitan.components.data.corpus import TokenizedCorpus
from torchtitan.components.data.dataset import DatasetConfig, digest_of
from torchtitan.components.data.types import (
    DataFingerprint,
    DatasetBuildContext,
    DatasetIterationPolicy,
    RowDataset,
    RowStream,
    StreamPoint,
    TextSequence,
)
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.violations import reject

# A table of that many turns takes some megabytes; weights that need more are rounded to it.
_LONGEST_PERIOD = 2**17


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedDataset:
    """A part of a mixture."""

    dataset: DatasetConfig
    """What to mix in."""

    weight: float = 1.0
    """Its share of the rows, in relation to the other weights."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a mixture that was built, with the order that it was built for."""

    data: Any
    policy: DatasetIterationPolicy


@dataclass(frozen=True, slots=True)
class Mixture:
    """Documents of several datasets that are not packed yet."""

    parts: list[Part]
    weights: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetMixConfig(DatasetConfig):
    """Rows of several datasets, by weight. Without repeat it ends where the first of them does."""

    datasets: Sequence[WeightedDataset]
    """What to mix; number i is shuffled with the seed plus i."""

    def __post_init__(self) -> None:
        if not self.datasets:
            reject("a mix was asked for, but datasets is empty. Give at least one WeightedDataset.")
        wrong = {
            number: part.weight
            for number, part in enumerate(self.datasets)
            if not (math.isfinite(part.weight) and part.weight > 0)
        }
        if wrong:
            found = ", ".join(f"{weight} at number {number}" for number, weight in wrong.items())
            reject(
                f"a mix consists of positive-weight datasets with finite weights, but found {found}. "
                "Give each a weight above 0, or leave the dataset out."
            )

    def build(
        self, *, context: DatasetBuildContext, dataset_iteration_policy: DatasetIterationPolicy
    ) -> Mixture | RowDataset | RowStream:
        parts = []
        for number, part in enumerate(self.datasets):
            seed = dataset_iteration_policy.seed + number
            policy = replace(dataset_iteration_policy, seed=seed)
            built = part.dataset.build(context=context, dataset_iteration_policy=policy)
            parts.append(Part(built, policy))
        weights = [part.weight for part in self.datasets]
        packed = [isinstance(part.data, RowDataset | RowStream) for part in parts]
        if all(packed):
            rows = [part.data for part in parts]
            return mixed_rows(rows, weights, dataset_iteration_policy.repeat)
        if any(packed):
            raise ValueError(
                f"a mix of rows and documents: number {packed.index(True)} is packed, number "
                f"{packed.index(False)} is not. Pack the mix, or each of its datasets."
            )
        return Mixture(parts, weights)

    def check(self, tokenizer: BaseTokenizer | None = None) -> list[str]:
        found = [message for part in self.datasets for message in part.dataset.check(tokenizer)]
        return list(dict.fromkeys(found))

    def is_streamed(self) -> bool:
        return any(part.dataset.is_streamed() for part in self.datasets)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConcatConfig(DatasetConfig):
    """The documents of several datasets one behind the other, as if they were one."""

    datasets: Sequence[DatasetConfig]
    """What to put together, in this order; none of them may be a stream, a mix or packed."""

    def __post_init__(self) -> None:
        if not self.datasets:
            reject("a concatenation was asked for, but datasets is empty. Give at least one.")

    def build(
        self, *, context: DatasetBuildContext, dataset_iteration_policy: DatasetIterationPolicy
    ) -> TokenizedCorpus:
        """Raises TypeError for a part that is no corpus."""
        built = [
            part.build(context=context, dataset_iteration_policy=dataset_iteration_policy)
            for part in self.datasets
        ]
        corpora = [part for part in built if isinstance(part, TokenizedCorpus)]
        others = [
            f"{type(part).__name__} at number {number}"
            for number, part in enumerate(built)
            if not isinstance(part, TokenizedCorpus)
        ]
        if others:
            raise TypeError(_not_map_style(others))
        return TokenizedCorpus(
            stores=tuple(store for part in corpora for store in part.stores),
            digest=digest_of(*(part.digest for part in corpora)),
            tokenizer_digest=corpora[0].tokenizer_digest,
        )

    def check(self, tokenizer: BaseTokenizer | None = None) -> list[str]:
        found = [message for part in self.datasets for message in part.check(tokenizer)]
        streams = [
            f"a stream at number {number}"
            for number, part in enumerate(self.datasets)
            if part.is_streamed()
        ]
        if streams:
            found.insert(0, _not_map_style(streams))
        return list(dict.fromkeys(found))

    def is_streamed(self) -> bool:
        return any(part.is_streamed() for part in self.datasets)


def _not_map_style(found: Sequence[str]) -> str:
    return (
        "a concatenation needs map-style children, which can be read at any place, but found "
        f"{', '.join(found)}. Mix streams instead, and pack what is concatenated."
    )


class Turns:
    """Whose turn it is at each position of a mixture."""

    def __init__(self, weights: Sequence[float]) -> None:
        counts = _counts(weights)
        self._counts = counts
        self._order = _spread(counts)

    @cached_property
    def _before(self) -> list[np.ndarray]:
        """For each part, how many turns it had before each position of a period."""
        turns = np.array(self._order)
        return [np.cumsum(turns == part) - (turns == part) for part in range(len(self._counts))]

    def at(self, position: int) -> tuple[int, int]:
        """The part whose turn ``position`` is, and how many turns it had before."""
        period, place = divmod(position, len(self._order))
        part = self._order[place]
        return part, period * self._counts[part] + int(self._before[part][place])

    def position_of(self, part: int, turn: int) -> int:
        """Where ``part`` has its turn number ``turn``, counted from 0."""
        period, number = divmod(turn, self._counts[part])
        places = [place for place, each in enumerate(self._order) if each == part]
        return period * len(self._order) + places[number]


def _counts(weights: Sequence[float]) -> list[int]:
    """Turns of each part in one period: exact where weights are short decimals, else nearly so."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    counts = [number // divisor for number in whole]
    if sum(counts) <= _LONGEST_PERIOD:
        return counts
    total = sum(exact)
    return [max(1, round(weight / total * _LONGEST_PERIOD)) for weight in exact]


def _spread(counts: Sequence[int]) -> list[int]:
    """Each part as often as ``counts`` says, its turns as evenly spaced as can be."""
    turns = [
        ((turn + 0.5) / count, part) for part, count in enumerate(counts) for turn in range(count)
    ]
    return [part for _, part in sorted(turns)]


def mixed_rows(
    parts: Sequence[RowDataset | RowStream], weights: Sequence[float], repeat: bool
) -> RowDataset | RowStream:
    """The mixture of packed ``parts``: rows by number, or a stream when one of them is one."""
    indexed = [part for part in parts if isinstance(part, RowDataset)]
    if len(indexed) == len(parts):
        return MixedRows(indexed, weights)
    streams = [
        IndexedStream(part, repeat) if isinstance(part, RowDataset) else part for part in parts
    ]
    return MixedStream(streams, weights)


def _fingerprint(
    parts: Sequence[RowDataset | RowStream], weights: Sequence[float]
) -> DataFingerprint:
    packing = "; ".join(part.fingerprint.packing for part in parts)
    return DataFingerprint(
        corpus=digest_of(*(part.fingerprint.corpus for part in parts)),
        tokenizer=parts[0].fingerprint.tokenizer,
        packing=f"mix {list(weights)} of ({packing})",
    )


def _summary(parts: Sequence[RowDataset | RowStream], weights: Sequence[float]) -> str:
    total = sum(weights)
    described = [
        f"{weight / total:.1%} {part.summary()}"
        for part, weight in zip(parts, weights, strict=True)
    ]
    return f"a mix of {len(parts)}: " + "; ".join(described)


class MixedRows(RowDataset):
    """Rows of several datasets in turns; each has epochs of its own."""

    def __init__(self, parts: Sequence[RowDataset], weights: Sequence[float]) -> None:
        self._parts = list(parts)
        self._weights = list(weights)
        self._turns = Turns(weights)
        self.fingerprint = _fingerprint(parts, weights)
        # Where the first part has no row left that it did not give before.
        self._num_rows = min(
            self._turns.position_of(number, len(part)) for number, part in enumerate(parts)
        )

    def __len__(self) -> int:
        return self._num_rows

    def row_at(self, position: int) -> TextSequence:
        part, turn = self._turns.at(position)
        return self._parts[part].row_at(turn)

    def summary(self) -> str:
        return _summary(self._parts, self._weights)


class IndexedStream(RowStream):
    """A RowDataset read forward, so that it can be mixed with streams."""

    def __init__(self, rows: RowDataset, repeat: bool) -> None:
        self._rows = rows
        self._repeat = repeat
        self.fingerprint = rows.fingerprint

    def start(self) -> StreamPoint:
        return {"position": 0}

    def rows_from(self, point: StreamPoint) -> Iterator[tuple[TextSequence, StreamPoint]]:
        position = point["position"]
        while self._repeat or position < len(self._rows):
            yield self._rows.row_at(position), {"position": position + 1}
            position += 1

    def interrupt(self) -> None:
        """It never waits."""

    def summary(self) -> str:
        return self._rows.summary()


class MixedStream(RowStream):
    """Rows of several streams in turns; ends with the first that ends."""

    def __init__(self, parts: Sequence[RowStream], weights: Sequence[float]) -> None:
        self._parts = list(parts)
        self._weights = list(weights)
        self._turns = Turns(weights)
        self.fingerprint = _fingerprint(parts, weights)

    def start(self) -> StreamPoint:
        return {"position": 0, "parts": [part.start() for part in self._parts]}

    def rows_from(self, point: StreamPoint) -> Iterator[tuple[TextSequence, StreamPoint]]:
        position, points = point["position"], list(point["parts"])
        with ExitStack() as opened:
            rows: list[Any] = []
            for part, start in zip(self._parts, points, strict=True):
                rows.append(part.rows_from(start))
                opened.callback(rows[-1].close)
            while True:
                turn, _ = self._turns.at(position)
                found = next(rows[turn], None)
                if found is None:
                    return
                row, points[turn] = found
                position += 1
                yield row, {"position": position, "parts": list(points)}

    def interrupt(self) -> None:
        for part in self._parts:
            part.interrupt()

    def summary(self) -> str:
        return _summary(self._parts, self._weights)
