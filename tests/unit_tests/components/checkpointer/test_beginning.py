"""What stands for a save while a thread begins it."""

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest
from torchtitan.components.checkpointer import waiting
from torchtitan.components.checkpointer.beginning import Beginning, NotBegunError
from torchtitan.components.checkpointer.waiting import WaitExpiredError

STEP: ContextVar[int] = ContextVar("step")


@pytest.fixture
def begun() -> Iterator[Callable[[Any], Beginning]]:
    with ThreadPoolExecutor(1) as executor:

        def start(begin: Any) -> Beginning:
            beginning = Beginning(begin)
            beginning.start(executor)
            return beginning

        yield start


def test_it_ends_as_the_save_does_that_it_has_begun(begun: Callable[[Any], Beginning]) -> None:
    good, bad, given_up = Future[str](), Future[str](), Future[str]()
    beginnings = [begun(lambda save=save: save) for save in (good, bad, given_up)]
    for beginning, save in zip(beginnings, (good, bad, given_up), strict=True):
        beginning.join(60)
        assert beginning.is_over and beginning.result() is save and not beginning.durable.done()
    good.set_result("durable")
    bad.set_exception(OSError("full"))
    given_up.cancel()
    first, second, third = beginnings
    assert first.durable.result(60) == "durable"
    with pytest.raises(OSError, match="full"):
        second.durable.result(60)
    with pytest.raises(CancelledError):
        third.durable.result(60)


def test_a_save_that_is_over_or_was_not_begun_ends_at_once(
    begun: Callable[[Any], Beginning],
) -> None:
    def refuse() -> None:
        raise NotBegunError("not now")

    assert begun(lambda: None).durable.result(60) is None
    refused = begun(refuse)
    for told in (refused.result, lambda: refused.durable.result(60)):
        with pytest.raises(NotBegunError, match="not now"):
            told()


def test_it_is_waited_for_no_longer_than_the_limit(begun: Callable[[Any], Beginning]) -> None:
    may_end = Event()
    beginning = begun(lambda: may_end.wait(60) and None)
    with patch.object(waiting, "_has_given_up", False):
        with pytest.raises(WaitExpiredError, match="after 0 s"):
            beginning.join(0)
        assert waiting._has_given_up and not beginning.is_over
    may_end.set()
    beginning.join(60)
    assert beginning.is_over and beginning.durable.result(60) is None


def test_one_that_writes_by_itself_is_waited_for_as_long_as_it_takes(
    begun: Callable[[Any], Beginning],
) -> None:
    may_end, writes = Event(), Event()

    def write() -> None:
        beginning.is_writing = True
        writes.set()
        assert may_end.wait(60)

    beginning = Beginning(write)
    with ThreadPoolExecutor(2) as executor:
        beginning.start(executor)
        assert writes.wait(60)
        waits = executor.submit(beginning.join, 0.001)
        assert not wait([waits], timeout=0.1).done
        may_end.set()
        assert waits.result(60) is None


def test_one_that_was_never_started_has_not_begun_and_never_will(tmp_path: Path) -> None:
    calls: list[str] = []
    beginning = Beginning(lambda: calls.append("begun"))
    beginning.join(60)
    with ThreadPoolExecutor(1) as executor:
        beginning.start(executor)
    with pytest.raises(NotBegunError, match="stopped"):
        beginning.result()
    assert beginning.is_over and not calls


def test_what_the_thread_logs_bears_what_the_caller_does(
    begun: Callable[[Any], Beginning],
) -> None:
    STEP.set(7)
    seen: list[int] = []
    beginning = begun(lambda: seen.append(STEP.get()))
    STEP.set(8)  # training goes on
    beginning.join(60)
    assert seen == [7]
