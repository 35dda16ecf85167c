"""A save in the background, held at a gate while the world around it changes."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torchtitan.components.checkpointer import dcp
from torchtitan.components.checkpointer.errors import CheckpointSaveError

from tests.unit_tests.components.checkpointer.runs import build_run, names, Run

pytestmark = pytest.mark.usefixtures("one_rank")


class Gate:
    """Writers stop here, their directory made and nothing written, until it opens."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.reached = threading.Event()

    def close(self) -> None:
        self.is_open.clear()
        self.reached.clear()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.is_open.wait(30)


@pytest.fixture
def gate() -> Iterator[Gate]:
    barrier = Gate()

    class Gated(dcp.DurableFileSystemWriter):
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
            barrier.pass_through()
            return super().write_data(plan, planner)

    with patch.object(dcp, "DurableFileSystemWriter", Gated):
        yield barrier
        barrier.is_open.set()


def spoil(run: Run) -> None:
    """Change everything that a checkpoint holds, in place."""
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(100.0)
        run.model.get_buffer("seen").fill_(-1)
    for optimizer in run.optimizers:
        for state in optimizer.state.values():
            state["exp_avg"].fill_(9.0)
            state["step"].fill_(77.0)
        for group in optimizer.param_groups:
            group["lr"] = 1.0
    run.progress.values["step"] = run.dataloader.values["row"] = 1000


def saved_at(folder: Path, step: int) -> dict[str, Any]:
    run = build_run(folder, seed=5, keep_latest_k=0)
    run.manager.load(step)
    return run.snapshot()


def test_what_changes_after_a_save_does_not_reach_the_file(tmp_path: Path, gate: Gate) -> None:
    run = build_run(tmp_path, async_mode="async")
    for step in (1, 2):
        gate.close()
        run.train(step, save=False)
        saved = run.snapshot()
        run.manager.save(step)
        spoil(run)
        gate.is_open.set()
        run.manager.maybe_wait_for_saving()
        assert saved_at(tmp_path, step) == saved
        run.manager.load(step)
    run.manager.close()


def test_optimizer_state_that_is_replaced_between_saves_is_saved_as_it_is_now(
    tmp_path: Path, gate: Gate
) -> None:
    run = build_run(tmp_path, async_mode="async")
    gate.is_open.set()
    run.train(1)
    for optimizer in run.optimizers:
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"] * 3.0
    run.train(2)
    saved = run.snapshot()
    run.manager.close()
    assert saved_at(tmp_path, 2) == saved


def test_a_folder_that_vanishes_under_a_save_fails_it_and_the_next_one_works(
    tmp_path: Path, gate: Gate
) -> None:
    run = build_run(tmp_path, async_mode="async")
    run.train(1)
    assert gate.reached.wait(30)
    shutil.rmtree(tmp_path / "checkpoint")
    gate.is_open.set()
    with pytest.raises(CheckpointSaveError, match="step 1 to .*FileNotFoundError"):
        run.train(2)
    run.train(3)
    run.manager.close()
    assert names(tmp_path) == ["step-3"]


def test_closing_waits_for_the_save_in_flight(tmp_path: Path, gate: Gate) -> None:
    run = build_run(tmp_path, async_mode="async")
    run.train(1)
    closing = threading.Thread(target=run.manager.close)
    closing.start()
    assert gate.reached.wait(30)
    assert closing.is_alive() and run.manager.newest_checkpoint() is None
    gate.is_open.set()
    closing.join(30)
    assert run.manager.newest_checkpoint() == str(tmp_path / "checkpoint/step-1")


def test_k_minus_one_complete_checkpoints_stay_while_a_save_is_in_flight(
    tmp_path: Path, gate: Gate
) -> None:
    run = build_run(tmp_path, async_mode="async", keep_latest_k=2)
    gate.is_open.set()
    run.train(2)
    run.manager.maybe_wait_for_saving()
    gate.close()
    run.train(3)
    assert gate.reached.wait(30)
    run.manager.purge_queue.put(None)
    assert run.manager.purge_thread is not None
    run.manager.purge_thread.join(30)
    # One complete checkpoint is the least that must be there; the third is not complete yet.
    assert names(tmp_path) == ["step-2", "step-3"]
    assert run.manager.newest_checkpoint() == str(tmp_path / "checkpoint/step-2")
    gate.is_open.set()
    run.manager.close()
