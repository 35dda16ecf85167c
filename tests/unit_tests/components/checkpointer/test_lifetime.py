"""Nothing piles up: not threads, not memory, not files."""

import gc
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchtitan.tools.utils import resident_memory_bytes

from tests.unit_tests.components.checkpointer.runs import build_run, names
from tests.unit_tests.components.checkpointer.ways import ASYNC, DISABLED, over, TC, TC_WAITING, Way

pytestmark = pytest.mark.usefixtures("one_rank", "writers")


@over(ASYNC, TC)
def test_managers_that_are_closed_leave_no_thread_of_ours(tmp_path: Path, way: Way) -> None:
    before = set(threading.enumerate())
    for _ in range(20):
        run = build_run(tmp_path, keep_latest_k=2, **way.settings)
        run.train(1)
        run.manager.close()
    left = set(threading.enumerate()) - before
    # The executor of the last save ends by itself a moment after its future is done.
    for thread in left:
        thread.join(10)
    assert not [thread for thread in left if thread.is_alive()]


@over(DISABLED, TC, TC_WAITING)
def test_a_manager_that_was_forgotten_ends_its_thread_when_it_dies(
    tmp_path: Path, way: Way
) -> None:
    run = build_run(tmp_path, **way.settings)
    thread = run.manager.purge_thread
    assert thread is not None and thread.is_alive()
    del run
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@over(ASYNC, TC, TC_WAITING)
def test_memory_stays_level_over_twenty_saves(tmp_path: Path, way: Way) -> None:
    run = build_run(tmp_path, keep_latest_k=2, **way.settings)
    run.manager.states["ballast"] = torch.zeros(2 * 2**20)  # 8 MiB
    run.train(3)
    run.manager.maybe_wait_for_saving()
    before = resident_memory_bytes()
    run.train(23)
    run.manager.maybe_wait_for_saving()
    assert resident_memory_bytes() - before < 24 * 2**20
    run.manager.close()
    assert names(tmp_path) == ["step-22", "step-23"]


@over(ASYNC, TC, TC_WAITING)
def test_closing_twice_is_closing_once(tmp_path: Path, way: Way) -> None:
    run = build_run(tmp_path, **way.settings)
    run.train(1)
    run.manager.close()
    run.manager.close()
    assert way.complete(tmp_path) == ["step-1"]
    assert dist.is_initialized()
