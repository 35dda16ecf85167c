"""The one door to grain, which reads rows ahead on a thread.

The one fact to know: what grain has read ahead is nobody's position. The loader counts what it
handed out, and opens a new iterator wherever it wants to stand.

    numbered rows -> grain: read, batch, read ahead -> loader
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from absl import logging as absl_logging

# Grain warns at its import that jax's profiler is missing, on every rank; nobody here asks for it.
_verbosity = absl_logging.get_verbosity()
absl_logging.set_verbosity(absl_logging.ERROR)

import grain.python as grain  # noqa: E402 (only once absl is quiet)

absl_logging.set_verbosity(_verbosity)

ReadOptions = grain.ReadOptions
index_shuffle = grain.experimental.index_shuffle

Batch = TypeVar("Batch")
Batch_co = TypeVar("Batch_co", covariant=True)


class NumberedRows(Protocol):
    """What grain reads: rows by number, from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class ReadAhead(Protocol[Batch_co]):
    """An iterator whose ``close`` ends its threads."""

    def __iter__(self) -> Iterator[Batch_co]: ...

    def __next__(self) -> Batch_co: ...

    def close(self) -> None: ...


def read_ahead(
    rows: NumberedRows,
    collate: Callable[[Sequence[Any]], Batch],
    *,
    rows_per_batch: int,
    num_batches: int,
    read_options: grain.ReadOptions,
) -> ReadAhead[Batch]:
    """Batches of ``rows`` in order, up to ``num_batches`` made before they are asked for.

    An exception of a row or of ``collate`` is raised where its batch was due.
    """
    batches = (
        grain.MapDataset.source(rows)
        .to_iter_dataset(read_options)
        .batch(rows_per_batch, drop_remainder=True, batch_fn=collate)
    )
    threaded = grain.experimental.ThreadPrefetchIterDataset(
        batches, prefetch_buffer_size=num_batches
    )
    return iter(threaded)
