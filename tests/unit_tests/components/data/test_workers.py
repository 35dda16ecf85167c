"""Worker processes give what one process gives, and their end is noticed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchtitan.components.data import (
    ConcatThenSplitPackingConfig,
    IndexedJsonlSource,
    SingleDatasetConfig,
    TextProcessor,
    workers,
)
from torchtitan.components.data.engine import ThreadReadAhead
from torchtitan.components.data.workers import Stripes

from tests.unit_tests.components.data.streams import LinesStream, MakeLoader, take


def numbers(stripe: int, num_stripes: int) -> Iterator[tuple[int, int]]:
    for number in range(stripe, 7, num_stripes):
        yield number, os.getpid()


def failing(stripe: int, num_stripes: int) -> Iterator[int]:
    yield from range(stripe, 3, num_stripes)
    raise OSError("disk gone")


def endless(stripe: int, num_stripes: int) -> Iterator[int]:
    yield os.getpid()
    signal.pause()


def test_items_come_in_the_order_of_one_process() -> None:
    for num_workers in (1, 3):
        stripes = Stripes(numbers, num_workers)
        found = list(stripes)
        stripes.close()
        assert [number for number, _ in found] == list(range(7))
        processes = {process for _, process in found}
        assert len(processes) == num_workers and os.getpid() not in processes


def test_an_error_is_raised_where_its_item_was_due() -> None:
    stripes = Stripes(failing, 2)
    assert [next(stripes) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="disk gone"):
        next(stripes)
    stripes.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that never notice the end are killed at once."""
    monkeypatch.setattr(workers, "_END_SECONDS", 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_killed_worker_is_named_and_not_waited_for() -> None:
    stripes = Stripes(endless, 2)
    os.kill(next(stripes), signal.SIGKILL)
    assert next(stripes) != os.getpid()
    with pytest.raises(RuntimeError, match="data worker 0 died with exit code -9"):
        next(stripes)
    stripes.close()


@pytest.mark.usefixtures("impatient")
def test_closing_ends_workers_and_whoever_waits_for_them() -> None:
    stripes = Stripes(endless, 1)
    ahead = ThreadReadAhead(stripes, 1, stripes.close)
    process = next(ahead)
    ahead.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert ahead._thread is not None and not ahead._thread.is_alive()


def test_workers_at_rest_end_by_themselves() -> None:
    # One that is killed would leave behind what libraries made for it in the system.
    stripes = Stripes(numbers, 2)
    next(stripes)
    stripes.close()
    assert [process.exitcode for process, _ in stripes._workers] == [0, 0]


def test_a_function_without_a_name_can_go_to_no_worker(
    make_loader: MakeLoader, corpus: Path
) -> None:
    from_lambda = TextProcessor.Config(text_fn=lambda fields: fields["text"])
    source = IndexedJsonlSource.Config(patterns=(str(corpus),))
    data = ConcatThenSplitPackingConfig(
        dataset=SingleDatasetConfig(source=source, processor=from_lambda)
    )
    # Documents of a corpus are in the cache; workers need no function.
    assert take(make_loader(dataset=data, num_workers=1), 1) == take(make_loader(), 1)
    stream = LinesStream.Config(path=str(corpus))
    data = ConcatThenSplitPackingConfig(
        dataset=SingleDatasetConfig(source=stream, processor=from_lambda)
    )
    with pytest.raises(ValueError, match="--dataloader.num_workers: .*Use functions with names"):
        make_loader(dataset=data, num_workers=1)
    make_loader(dataset=data)


@pytest.mark.parametrize("field", ["num_workers", "streaming_shuffle_buffer_size"])
def test_impossible_numbers_are_refused(make_loader: MakeLoader, field: str) -> None:
    with pytest.raises(ValueError, match=f"dataloader.{field} is -1"):
        make_loader(**{field: -1})
