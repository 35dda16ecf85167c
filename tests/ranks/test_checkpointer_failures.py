"""A save that fails on one rank fails on all, once; a run that is killed in a save loses that save only.

The writer is ours, so a test can stop it at any point: no timing is involved.
"""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torchtitan.components.checkpointer import dcp
from torchtitan.components.checkpointer.dcp_writer import DurableFileSystemWriter

from tests.ranks.pool import end_of_ranks, run_on_ranks
from tests.unit_tests.components.checkpointer.runs import build_run, message_of, names

pytestmark = pytest.mark.ranks

POINTS = ["before the data", "after the data", "before the index has its name"]


def stop_writers(at: str, act: Callable[[], None]) -> None:
    """From now on every writer of this process calls ``act`` at the point ``at``."""

    class Stopping(DurableFileSystemWriter):
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
            if at == "before the data":
                act()
            written = super().write_data(plan, planner)
            if at == "after the data":
                act()
            return written

        def finish(self, metadata: Metadata, results: Any) -> None:
            rename = self.fs.rename

            def rename_later(*paths: Any) -> None:
                act()
                rename(*paths)

            if at == "before the index has its name":
                patch.object(self.fs, "rename", rename_later).start()
            super().finish(metadata, results)

    patch.object(dcp, "DurableFileSystemWriter", Stopping).start()


def run_freely() -> None:
    patch.stopall()


def disk_full() -> None:
    raise OSError(28, "No space left on device")


def fail_in_the_background(folder: Path, rank: int, at: str, surfaces_at: str) -> Any:
    run = build_run(folder, async_mode="async")
    run.train(2)
    run.manager.maybe_wait_for_saving()
    if dist.get_rank() == rank:
        stop_writers(at, disk_full)
    run.train(3)
    run_freely()
    run.train(4, save=False)
    if surfaces_at == "the next save":
        message = message_of(run.manager.save, 4)
        run.train(6)
        run.manager.close()
    else:
        message = message_of(run.manager.close)
        run.manager.close()
    # The group that saves use must still be in step on both ranks.
    dist.all_reduce(torch.ones(1))
    return message


def fail_in_the_foreground(folder: Path) -> str:
    run = build_run(folder)
    run.train(1)
    if dist.get_rank() == 1:
        stop_writers("after the data", disk_full)
    message = message_of(run.train, 2)
    run_freely()
    run.train(3)
    run.manager.close()
    return message


def fail_to_make_ready(folder: Path) -> str:
    """Rank 0 cannot move another history aside; the others learn of it without a disk of their own."""
    run = build_run(folder, async_mode="async")
    run.manager.load(1)
    if dist.get_rank() == 0:

        def refuse(source: str, target: str) -> None:
            raise PermissionError(f"{source} is protected")

        patch.object(run.manager._storage, "move", refuse).start()
    message = message_of(run.train, 2)
    run_freely()
    run.train(3)
    run.manager.close()
    return message


def save_steps(folder: Path, until: int) -> Any:
    run = build_run(folder)
    run.train(until)
    run.manager.close()
    return run.snapshot()


def be_killed_while_a_save_is_in_flight(folder: Path, at: str) -> None:
    run = build_run(folder, async_mode="async")
    run.train(2)
    run.manager.maybe_wait_for_saving()
    is_there = threading.Event()

    def wait_for_the_end() -> None:
        is_there.set()
        threading.Event().wait()

    stop_writers(at, wait_for_the_end)
    run.train(3)
    # Only rank 0 writes the index.
    if dist.get_rank() == 0 or at != POINTS[-1]:
        assert is_there.wait(30)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resume(folder: Path) -> Any:
    run = build_run(folder, async_mode="async", seed=5)
    assert run.manager.load()
    loaded = run.snapshot()
    before = names(folder)
    run.train(4)
    run.manager.close()
    return loaded, before


@pytest.fixture(scope="module")
def after_two_steps(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run that nobody disturbs is like after its second step."""
    return run_on_ranks(2, save_steps, tmp_path_factory.mktemp("straight"), 2)[0]


@pytest.mark.parametrize(
    "rank,at,surfaces_at",
    [
        (1, "after the data", "the next save"),
        (0, "before the data", "close"),
        (0, "before the index has its name", "the next save"),
    ],
)
def test_a_background_failure_of_one_rank_surfaces_once_on_all(
    tmp_path: Path, rank: int, at: str, surfaces_at: str
) -> None:
    messages = run_on_ranks(2, fail_in_the_background, tmp_path, rank, at, surfaces_at)
    for message in messages:
        assert f"step 3 to {tmp_path}/checkpoint/step-3 failed" in message
        assert "No space left on device" in message
    saved = ["step-1", "step-2"]
    if surfaces_at == "the next save":
        assert names(tmp_path) == [*saved, "step-5", "step-6"]
    else:
        assert names(tmp_path) == [*saved, "step-3"]
    assert all((tmp_path / "checkpoint" / name / ".metadata").is_file() for name in saved)
    assert not (tmp_path / "checkpoint/step-3/.metadata").exists()


def test_a_synchronous_failure_of_one_rank_is_one_of_all(tmp_path: Path) -> None:
    for message in run_on_ranks(2, fail_in_the_foreground, tmp_path):
        assert "step 2 to" in message and "No space left on device" in message
    assert names(tmp_path) == ["step-1", "step-3"]


def test_a_folder_that_rank_0_cannot_get_ready_is_a_failed_save_on_all(tmp_path: Path) -> None:
    run_on_ranks(2, save_steps, tmp_path, 2)
    for message in run_on_ranks(2, fail_to_make_ready, tmp_path):
        assert "step 2 to" in message and "step-2 is protected" in message
    assert names(tmp_path) == ["step-1", "step-3", "superseded"]


@pytest.mark.parametrize("at", POINTS)
def test_a_run_killed_in_a_save_resumes_from_the_one_before_and_sweeps_the_rest(
    tmp_path: Path, at: str, after_two_steps: Any
) -> None:
    ends = end_of_ranks(2, be_killed_while_a_save_is_in_flight, tmp_path, at, settle_seconds=30)
    assert [end.exit_code for end in ends] == [-signal.SIGKILL] * 2, [end.log for end in ends]
    for loaded, before in run_on_ranks(2, resume, tmp_path):
        assert loaded == after_two_steps
        assert before == ["step-1", "step-2", "step-3"]
    assert names(tmp_path) == ["step-1", "step-2", "step-3", "step-4"]
    everything = [path.name for path in (tmp_path / "checkpoint/step-3").iterdir()]
    assert sorted(everything) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
