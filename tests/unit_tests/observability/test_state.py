"""The step and its tags reach threads, and tasks keep theirs apart."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torchtitan.observability import structured_logger as sl
from torchtitan.observability.structured_logger import state

pytestmark = pytest.mark.usefixtures("fresh_structured_logger")


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_before_the_first_step_there_is_none():
    assert (sl.get_step(), sl.get_relative_step(), sl.get_step_tags()) == (None, None, ())


def test_a_new_step_drops_the_tags_and_the_relative_step():
    sl.set_step(3, relative_step=1)
    sl.add_step_tag("gc")
    sl.add_step_tag("eval")
    sl.add_step_tag("gc")
    assert (sl.get_step(), sl.get_relative_step()) == (3, 1)
    assert sl.get_step_tags() == ("gc", "eval")
    sl.set_step(4)
    assert (sl.get_step(), sl.get_relative_step(), sl.get_step_tags()) == (4, None, ())


def test_a_background_thread_sees_where_the_training_loop_is():
    sl.set_step(3, relative_step=1)
    sl.add_step_tag("checkpoint_save")
    seen = in_thread(lambda: (sl.get_step(), sl.get_relative_step(), sl.get_step_tags()))
    assert seen == (3, 1, ("checkpoint_save",))


def test_a_thread_that_added_a_tag_does_not_keep_it_beyond_the_step():
    sl.set_step(1)
    wake, told = threading.Event(), threading.Event()
    seen: list[tuple[str, ...]] = []

    def work() -> None:
        sl.add_step_tag("from_thread")
        told.set()
        wake.wait(timeout=30)
        seen.append(sl.get_step_tags())

    thread = threading.Thread(target=work)
    thread.start()
    assert told.wait(timeout=30)
    assert sl.get_step_tags() == ("from_thread",)
    sl.set_step(2)
    wake.set()
    thread.join()
    assert seen == [()]


def test_tasks_tag_their_own_records_only():
    sl.set_step(1)
    sl.add_step_tag("outer")

    async def tag(name: str) -> tuple[str, ...]:
        sl.add_step_tag(name)
        await asyncio.sleep(0)
        return sl.get_step_tags()

    async def both() -> list[tuple[str, ...]]:
        return list(await asyncio.gather(tag("a"), tag("b")))

    assert asyncio.run(both()) == [("outer", "a"), ("outer", "b")]
    assert sl.get_step_tags() == ("outer",) and state._TAGS_GLOBAL == ("outer",)


def test_tasks_may_work_on_different_steps():
    async def enter(step: int) -> int | None:
        sl.set_step(step)
        await asyncio.sleep(0)
        return sl.get_step()

    async def both() -> list[int | None]:
        return list(await asyncio.gather(enter(1), enter(2)))

    assert asyncio.run(both()) == [1, 2]
