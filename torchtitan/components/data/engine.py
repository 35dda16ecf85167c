"""Read ahead on a thread: the one door to grain for numbered rows, and a thread for what comes in turn.

The one fact to know: what was read ahead is nobody's position. The loader counts what it handed
out, and opens a new iterator wherever it wants to stand.

    numbered rows -> grain: read, batch, read ahead -> loader
    any iterator  -> ThreadReadAhead                -> loader
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from absl import logging as absl_logging

# Grain warns at its import that jax's profiler is missing, on every rank; nobody here asks for it.
_verbosity = absl_logging.get_verbosity()
absl_logging.set_verbosity(absl_logging.ERROR)

import grain.python as grain  # noqa: E402 (only once absl is quiet)

absl_logging.set_verbosity(_verbosity)

ReadOptions = grain.ReadOptions
index_shuffle = grain.experimental.index_shuffle


def read_in_turn() -> ReadOptions:
    """Rows come from mapped memory in microseconds; more threads only fight over the GIL."""
    return ReadOptions(num_threads=0, prefetch_buffer_size=0)


# A read that is not done by then waits for something that may never come.
_CLOSE_SECONDS = 10.0

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


class ThreadReadAhead(Generic[Batch]):
    """The items of an iterator in order, up to ``num_items`` of them made on a thread beforehand.

    An exception of the iterator is raised where its item was due.
    """

    def __init__(
        self, items: Iterator[Batch], num_items: int, interrupt: Callable[[], None]
    ) -> None:
        """``interrupt`` makes ``items`` end soon, whatever it waits for; called by ``close``."""
        self._items = items
        self._num_items = num_items
        self._interrupt = interrupt
        self._made: deque[tuple[str, Any]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        if num_items > 0:
            self._thread = threading.Thread(target=self._read, name="data-prefetch", daemon=True)
            self._thread.start()

    def _read(self) -> None:
        kind = "item"
        while kind == "item":
            kind, value = self._make()
            with self._changed:
                while len(self._made) >= self._num_items and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                self._made.append((kind, value))
                self._changed.notify_all()

    def _make(self) -> tuple[str, Any]:
        try:
            return "item", next(self._items)
        except StopIteration:
            return "end", None
        # Whatever it is belongs to whoever asks for the item.
        except BaseException as error:  # noqa: B036 raised again where the item was due
            return "error", error

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._thread is None:
            kind, value = self._make()
        else:
            with self._changed:
                while not self._made:
                    self._changed.wait()
                # The end and an error stay: there is nothing behind them.
                kind, value = self._made[0]
                if kind == "item":
                    self._made.popleft()
                self._changed.notify_all()
        if kind == "end":
            raise StopIteration
        if kind == "error":
            raise value
        return value

    def close(self) -> None:
        """End the thread and what it reads from."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._interrupt()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():
                # It waits for a network; as a daemon it ends with the process at the latest.
                return
        close = getattr(self._items, "close", None)
        if close is not None:
            close()
