"""A save in the background, held at a gate while the world around it changes, with either manager."""

import logging
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
from torchtitan.tools.logging import logger

from tests.unit_tests.components.checkpointer.runs import build_run, names, Run
from tests.unit_tests.components.checkpointer.tc.stand_ins import Writers
from tests.unit_tests.components.checkpointer.ways import (
    ASYNC,
    DISABLED,
    over,
    PINNED,
    TC,
    TC_WAITING,
    Way,
)

pytestmark = pytest.mark.usefixtures("one_rank")


class Gate:
    """Writers stop here, their directory made and nothing written, while it is closed."""

    def __init__(self) -> None:
        self.may_go_on, self.reached = threading.Event(), threading.Event()
        self.may_go_on.set()

    def hold(self) -> None:
        self.reached.clear()
        self.may_go_on.clear()

    def let_go(self) -> None:
        self.may_go_on.set()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.may_go_on.wait(30)


class Watching(logging.Handler):
    """Notes what of a folder is complete at the moment when a save is called so."""

    def __init__(self, folder: Path, way: Way) -> None:
        super().__init__()
        self.seen: list[list[str]] = []
        self._folder, self._way = folder, way

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("Saved checkpoint of step"):
            self.seen.append(self._way.complete(self._folder))


@over(DISABLED, ASYNC, PINNED, TC, TC_WAITING)
def test_a_save_is_called_saved_when_it_is_complete_and_not_before(
    tmp_path: Path, way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run, watching = build_run(tmp_path, keep_latest_k=0, **way.settings), Watching(tmp_path, way)
    logger.addHandler(watching)
    try:
        run.train(2)
        run.manager.close()
    finally:
        logger.removeHandler(watching)
    assert watching.seen == [["step-1"], ["step-1", "step-2"]]


@pytest.fixture
def gate(way: Way, writers: Writers) -> Iterator[Gate | Writers]:
    """An open one, at which the writers of ``way`` stop once it is closed."""
    if way is TC:
        yield writers
        return
    barrier = Gate()

    class Gated(dcp.DurableFileSystemWriter):
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
            barrier.pass_through()
            return super().write_data(plan, planner)

    with patch.object(dcp, "DurableFileSystemWriter", Gated):
        yield barrier
        barrier.let_go()


def spoil(run: Run) -> None:
    """Change everything that a checkpoint holds, in place, as early as a run may."""
    with torch.no_grad():
        run.model.get_buffer("seen").fill_(-1)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 1.0
    run.progress.values["step"] = run.dataloader.values["row"] = 1000
    run.manager.maybe_wait_for_staging()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(100.0)
    for optimizer in run.optimizers:
        for state in optimizer.state.values():
            state["exp_avg"].fill_(9.0)
            state["step"].fill_(77.0)


def saved_at(folder: Path, way: Way, step: int) -> dict[str, Any]:
    run = build_run(folder, seed=5, load_only=True, **way.settings)
    run.manager.load(step)
    return run.snapshot()


@over(ASYNC, TC)
def test_what_changes_after_a_save_does_not_reach_the_file(
    tmp_path: Path, way: Way, gate: Gate
) -> None:
    run = build_run(tmp_path, **way.settings)
    for step in (1, 2):
        gate.hold()
        run.train(step, save=False)
        saved = run.snapshot()
        run.manager.save(step)
        spoil(run)
        gate.let_go()
        run.manager.maybe_wait_for_saving()
        assert saved_at(tmp_path, way, step) == saved
        run.manager.load(step)
    run.manager.close()


@over(ASYNC, TC)
def test_optimizer_state_that_is_replaced_between_saves_is_saved_as_it_is_now(
    tmp_path: Path, way: Way, gate: Gate
) -> None:
    run = build_run(tmp_path, **way.settings)
    run.train(1)
    for optimizer in run.optimizers:
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"] * 3.0
    run.train(2)
    saved = run.snapshot()
    run.manager.close()
    assert saved_at(tmp_path, way, 2) == saved


# The other manager makes its folder when it writes, so there is nothing to lose before.
@over(ASYNC)
def test_a_folder_that_vanishes_under_a_save_fails_it_and_the_next_one_works(
    tmp_path: Path, way: Way, gate: Gate
) -> None:
    run = build_run(tmp_path, **way.settings)
    gate.hold()
    run.train(1)
    assert gate.reached.wait(30)
    shutil.rmtree(tmp_path / "checkpoint")
    gate.let_go()
    with pytest.raises(CheckpointSaveError, match="step 1 to .*FileNotFoundError"):
        run.train(2)
    run.train(3)
    run.manager.close()
    assert names(tmp_path) == ["step-3"]


@over(ASYNC, TC)
def test_closing_waits_for_the_save_in_flight(tmp_path: Path, way: Way, gate: Gate) -> None:
    run = build_run(tmp_path, **way.settings)
    gate.hold()
    run.train(1)
    closing = threading.Thread(target=run.manager.close)
    closing.start()
    assert gate.reached.wait(30)
    assert closing.is_alive() and run.manager.newest_checkpoint() is None
    gate.let_go()
    closing.join(30)
    assert run.manager.newest_checkpoint() == str(tmp_path / "checkpoint/step-1")


@over(ASYNC, TC)
def test_k_minus_one_complete_checkpoints_stay_while_a_save_is_in_flight(
    tmp_path: Path, way: Way, gate: Gate
) -> None:
    run = build_run(tmp_path, keep_latest_k=2, **way.settings)
    run.train(2)
    run.manager.maybe_wait_for_saving()
    gate.hold()
    run.train(3)
    assert gate.reached.wait(30)
    run.manager.purge_queue.put(None)
    assert run.manager.purge_thread is not None
    run.manager.purge_thread.join(30)
    # One complete checkpoint is the least that must be there; the third is not complete yet.
    assert way.complete(tmp_path) == ["step-2"]
    assert set(names(tmp_path)) <= {"step-2", way.unfinished(3)}
    assert run.manager.newest_checkpoint() == str(tmp_path / "checkpoint/step-2")
    gate.let_go()
    run.manager.close()
    assert names(tmp_path) == way.complete(tmp_path) == ["step-2", "step-3"]
