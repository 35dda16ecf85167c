"""Turn rows into the microbatches of one rank, from a position on, and write the position down.

There are two kinds of feed, for rows that have numbers and for rows that come in turn. The one fact
to know: a microbatch carries the position behind it, so what was made ahead of time moves nothing.

    RowDataset -> IndexedFeed --- open(position) -> (microbatch, position behind it), ... -> loader
    RowStream  -> StreamFeed  --'
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from sys import maxsize
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from torchtitan.components.data.collators import Collator
from torchtitan.components.data.engine import read_ahead, ReadAhead, ThreadReadAhead
from torchtitan.components.data.order import Share
from torchtitan.components.data.position import (
    decode_position,
    decode_stream_position,
    encode_position,
    encode_stream_position,
    StreamPosition,
)
from torchtitan.components.data.types import (
    DatasetBuildContext,
    RowDataset,
    RowStream,
    TextSequence,
    TrainerBatch,
)
from torchtitan.components.data.workers import Stripes

Position = TypeVar("Position")
Opened: TypeAlias = ReadAhead[tuple[TrainerBatch, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedOptions:
    """How a feed is read."""

    repeat: bool
    num_workers: int
    num_prefetch_batches: int
    allow_changed_degree: bool


class Feed(ABC, Generic[Position]):
    """The microbatches of one rank from any position on."""

    @abstractmethod
    def start(self) -> Position:
        """Before the first row."""

    @abstractmethod
    def open(self, position: Position) -> Opened:
        """The microbatches from ``position`` on, each with the position behind it."""

    @abstractmethod
    def encode(self, position: Position) -> dict[str, Any]:
        """``position`` for a checkpoint."""

    @abstractmethod
    def decode(self, state: dict[str, Any] | None) -> Position:
        """The position of a checkpoint. Raises ValueError for one of other data."""

    @abstractmethod
    def end_of(self, position: Position) -> str:
        """One line for the log when the rows end at ``position``."""


@dataclass(frozen=True, slots=True)
class _RankRows:
    """The rows of one rank by number, counted from a global position."""

    rows: RowDataset
    share: Share
    start: int
    num_microbatches: int

    def __len__(self) -> int:
        return min(self.num_microbatches * self.share.rows_per_microbatch, maxsize)

    def __getitem__(self, index: int) -> TextSequence:
        return self.rows.row_at(self.share.position_of(self.start, index))


@dataclass(frozen=True, slots=True)
class _StripeOfMicrobatches:
    """Makes every n-th microbatch in a worker process; picklable."""

    mine: _RankRows
    collator: Collator.Config
    context: DatasetBuildContext

    def __call__(self, stripe: int, num_stripes: int) -> Iterator[Any]:
        torch.set_num_threads(1)
        collate: Collator = self.collator.build(context=self.context)
        per_batch = self.mine.share.rows_per_microbatch
        for number in range(stripe, self.mine.num_microbatches, num_stripes):
            rows = [self.mine[number * per_batch + row] for row in range(per_batch)]
            yield _to_arrays(collate(rows))


def _to_arrays(value: Any) -> Any:
    """Tensors as arrays: between processes a tensor would travel through shared memory and a file."""
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {key: _to_arrays(item) for key, item in value.items()}
    return tuple(_to_arrays(item) for item in value) if isinstance(value, tuple) else value


def _to_tensors(batch: Any) -> TrainerBatch:
    inputs, labels = batch
    return {key: _to_tensor(item) for key, item in inputs.items()}, torch.from_numpy(labels)


def _to_tensor(value: Any) -> Any:
    return torch.from_numpy(value) if hasattr(value, "__array_interface__") else value


class IndexedFeed(Feed[int]):
    """Microbatches of rows that have numbers. The position is the number of the next row."""

    def __init__(
        self,
        rows: RowDataset,
        share: Share,
        collator: Collator.Config,
        context: DatasetBuildContext,
        options: FeedOptions,
    ) -> None:
        if not options.repeat and len(rows) < share.global_rows:
            raise ValueError(
                f"without repeat the data makes no batch: found {len(rows)} rows, one batch over "
                f"{share.dp_world_size} ranks takes {share.global_rows}. Lower the batch size or "
                "drop --dataloader.no-repeat."
            )
        self._rows, self._share, self._options = rows, share, options
        self._collator, self._context = collator, context
        self._collate: Collator = collator.build(context=context)

    def start(self) -> int:
        return 0

    def open(self, position: int) -> Opened:
        mine = _RankRows(self._rows, self._share, position, self._microbatches_left(position))
        options = self._options
        if options.num_workers == 0:
            batches = read_ahead(
                mine,
                self._collate,
                rows_per_batch=self._share.rows_per_microbatch,
                num_batches=options.num_prefetch_batches,
                read_options=self._context.read_options,
            )
            return _Numbered(batches, position, self._share.global_rows)
        make = _StripeOfMicrobatches(mine, self._collator, self._context)
        stripes = Stripes(make, options.num_workers)
        made = ThreadReadAhead(
            map(_to_tensors, stripes), options.num_prefetch_batches, stripes.close
        )
        return _Numbered(made, position, self._share.global_rows)

    def _microbatches_left(self, position: int) -> int:
        if self._options.repeat:
            return maxsize
        return max(0, len(self._rows) - position) // self._share.global_rows

    def encode(self, position: int) -> dict[str, Any]:
        return encode_position(position, len(self._rows), self._rows.fingerprint)

    def decode(self, state: dict[str, Any] | None) -> int:
        return decode_position(state, len(self._rows), self._rows.fingerprint)

    def end_of(self, position: int) -> str:
        left = max(0, len(self._rows) - position)
        return (
            f"repeat is off and the {len(self._rows):,} rows are used up; {left} rows "
            f"that fill no batch of {self._share.global_rows} are left out"
        )


class _Numbered:
    """Microbatches with the number of the row behind each."""

    def __init__(self, batches: ReadAhead[TrainerBatch], position: int, step: int) -> None:
        self._batches, self._position, self._step = batches, position, step

    def __iter__(self) -> Iterator[tuple[TrainerBatch, int]]:
        return self

    def __next__(self) -> tuple[TrainerBatch, int]:
        batch = next(self._batches)
        self._position += self._step
        return batch, self._position

    def close(self) -> None:
        self._batches.close()


class StreamFeed(Feed[StreamPosition]):
    """Microbatches of rows that come in turn. Every rank reads all of them and keeps its own."""

    def __init__(
        self, rows: RowStream, share: Share, collate: Collator, options: FeedOptions
    ) -> None:
        self._rows, self._share, self._options = rows, share, options
        self._collate = collate

    def start(self) -> StreamPosition:
        return StreamPosition(0, self._rows.start())

    def open(self, position: StreamPosition) -> Opened:
        batches = self._batches_from(position)
        return ThreadReadAhead(batches, self._options.num_prefetch_batches, self._rows.interrupt)

    def _batches_from(
        self, position: StreamPosition
    ) -> Iterator[tuple[TrainerBatch, StreamPosition]]:
        share = self._share
        first = share.dp_rank * share.rows_per_microbatch
        mine: list[TextSequence] = []
        count, num_rows = 0, position.num_rows
        for row, point in self._rows.rows_from(position.point):
            if first <= count < first + share.rows_per_microbatch:
                mine.append(row)
            count += 1
            # Also a rank whose rows are there waits for the others': all end at the same batch.
            if count == share.global_rows:
                num_rows += count
                yield self._collate(mine), StreamPosition(num_rows, point)
                mine, count = [], 0
        if num_rows == 0:
            raise ValueError(
                f"without repeat the data makes no batch: the stream ended after {count} rows, one "
                f"batch over {share.dp_world_size} ranks takes {share.global_rows}. Lower the batch "
                "size or drop --dataloader.no-repeat."
            )

    def encode(self, position: StreamPosition) -> dict[str, Any]:
        return encode_stream_position(position, self._share.dp_world_size, self._rows.fingerprint)

    def decode(self, state: dict[str, Any] | None) -> StreamPosition:
        return decode_stream_position(
            state,
            self.start(),
            self._share.dp_world_size,
            self._rows.fingerprint,
            allow_changed_degree=self._options.allow_changed_degree,
        )

    def end_of(self, position: StreamPosition) -> str:
        return (
            f"repeat is off and the stream ended after {position.num_rows:,} rows; rows that fill no "
            f"batch of {self._share.global_rows} are left out"
        )


def feed_of(
    rows: RowDataset | RowStream | Sequence[Any],
    share: Share,
    collator: Collator.Config,
    context: DatasetBuildContext,
    options: FeedOptions,
) -> Feed[Any]:
    """The feed for what a dataset config made. Raises ValueError when that is not rows."""
    if isinstance(rows, RowDataset):
        return IndexedFeed(rows, share, collator, context, options)
    if isinstance(rows, RowStream):
        return StreamFeed(rows, share, collator.build(context=context), options)
    raise ValueError(
        f"dataloader.dataset makes {type(rows).__name__}, not rows of one length. Wrap it "
        "in ConcatThenSplitPackingConfig or FirstFitPackingConfig."
    )
