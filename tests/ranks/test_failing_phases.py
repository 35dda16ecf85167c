"""One rank fails in some part of a save: no rank waits for it, and all of them tell what it met.

Whatever fails lies behind our own seams, at the one rank that is to fail; the other runs as ever.
"""

import functools
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan
from torchtitan.components.checkpointer import dcp
from torchtitan.components.checkpointer.dcp_writer import CopyingStager, DurableFileSystemWriter
from torchtitan.components.checkpointer.errors import CheckpointSaveError
from torchtitan.components.checkpointer.pinned.stager import SharedMemoryStager
from torchtitan.components.checkpointer.tc.library import Backend
from torchtitan.config import CommConfig
from torchtitan.distributed.failure import PeerFailureWatch
from torchtitan.distributed.utils import init_distributed, job_store
from torchtitan.tools.logging import init_logger

from tests.ranks.pinned_runs import PATIENCE
from tests.ranks.pool import end_of_ranks, run_on_ranks
from tests.ranks.steering import (
    AFTER_DATA,
    await_end_of_save,
    BEFORE_DATA,
    COMMIT,
    disk_full,
    Steering,
)
from tests.ranks.trouble import RankLog
from tests.unit_tests.components.checkpointer.runs import build_run, Run
from tests.unit_tests.components.checkpointer.ways import ASYNC, over, TC_WAITING, Way

pytestmark = pytest.mark.ranks

READY, MODEL_STATE, DATA_STATE, STAGING, PLAN = "ready", "model", "data", "staging", "plan"
# (phase, the rank that fails in it)
PHASES = [
    (READY, 0),
    (MODEL_STATE, 1),
    (DATA_STATE, 1),
    (STAGING, 1),
    (PLAN, 1),
    (BEFORE_DATA, 1),
    (AFTER_DATA, 1),
    (COMMIT, 0),
]
# A rank that is waited for in vain is no failure that a run goes on after.
LIMIT_SECONDS = 30


def trouble(phase: str) -> Any:
    raise OSError(5, f"trouble in: {phase}")


class PlanlessWriter(DurableFileSystemWriter):
    """Fails where the ranks plan, in whatever process that is."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return trouble(PLAN)


def failing(run: Run, way: Way, steering: Steering, phase: str) -> AbstractContextManager[Any]:
    """The save that begins in there fails in ``phase`` on this rank."""
    fail = functools.partial(trouble, phase)

    def instead(owner: Any, name: str) -> AbstractContextManager[Any]:
        return patch.object(owner, name, lambda *args, **kwargs: fail())

    if phase == READY:
        return instead(run.manager, "_clear_path")
    if phase == MODEL_STATE:
        return instead(run.manager.states["model"], "state_dict")
    if phase == DATA_STATE:
        return instead(run.dataloader, "state_dict")
    if phase == STAGING:
        owner, name = (CopyingStager, "stage") if way == ASYNC else (SharedMemoryStager, "_copy")
        return instead(owner, name) if way.is_background else nullcontext()
    if phase == PLAN:
        if way.format.backend != "dcp":
            return instead(Backend, "look")
        return patch.object(dcp, "DurableFileSystemWriter", PlanlessWriter)
    return _steered(steering, phase, fail)


@contextmanager
def _steered(steering: Steering, phase: str, fail: Any) -> Generator[None]:
    steering.set(phase, fail)
    yield
    steering.stop()


GOING_ON = {"on_save_failure": "warn", "max_failed_saves": 2}


def save_in_trouble(
    folder: Path, way: Way, phases: list[tuple[str, int]], policy: dict[str, Any]
) -> Any:
    """Each second save fails; what all ranks log or raise of it, and whether the others are good."""
    steering = Steering(way)
    run = build_run(
        folder,
        timeout_seconds=LIMIT_SECONDS,
        keep_latest_k=0,
        **policy,
        **steering.settings,
    )
    log = RankLog()
    told: list[str] = []

    def train_one() -> None:
        try:
            run.train(run.step + 1)
        except CheckpointSaveError as error:
            log.lines.append(f"raised: {error}")

    for phase, rank in phases:
        run.train(run.step + 1)
        run.manager.maybe_wait_for_saving()
        log.lines.clear()
        is_here = dist.get_rank() == rank
        with failing(run, way, steering, phase) if is_here else nullcontext():
            train_one()
            await_end_of_save(run.manager)
        if policy != GOING_ON and run.manager.save_future is not None:
            train_one()  # where it is found out, before it would have saved
        else:
            run.train(run.step + 1)
            run.manager.maybe_wait_for_staging()  # until the ranks have told each other
        told.append("\n".join(log.lines))
    run.train(run.step + 1)
    run.manager.close()
    # Training's group must still be in step.
    dist.all_reduce(torch.ones(1))
    return told


def phases_of(way: Way) -> list[tuple[str, int]]:
    return [each for each in PHASES if way.is_background or each[0] != STAGING]


@over()
def test_a_rank_that_fails_in_any_phase_fails_the_save_on_all_and_training_goes_on(
    tmp_path: Path, way: Way
) -> None:
    phases = phases_of(way)
    told = run_on_ranks(2, save_in_trouble, tmp_path, way, phases, GOING_ON, **PATIENCE)
    for lines in told:
        for number, ((phase, _), text) in enumerate(zip(phases, lines, strict=True)):
            step = 3 * number + 2
            warned = [line for line in text.splitlines() if "Training goes on, and" in line]
            assert len(warned) == 1 and f"step {step} to" in warned[0], (phase, text)
            assert f"trouble in: {phase}" in warned[0], (phase, text)
            assert "Failed in a row: 1; the run ends with 2" in warned[0]
            assert f"that of step {step - 1}." in warned[0]
    lost = {3 * number + 2 for number in range(len(phases))}
    saved = {f"step-{step}" for step in range(1, 3 * len(phases) + 2) if step not in lost}
    assert set(way.complete(tmp_path)) == saved


@over(ASYNC, TC_WAITING)
def test_a_rank_that_fails_in_any_phase_is_told_by_an_error_on_all(
    tmp_path: Path, way: Way
) -> None:
    phases = phases_of(way)
    told = run_on_ranks(2, save_in_trouble, tmp_path, way, phases, {}, **PATIENCE)
    for lines in told:
        for (phase, _), text in zip(phases, lines, strict=True):
            raised = [line for line in text.splitlines() if line.startswith("raised: ")]
            assert len(raised) == 1 and f"trouble in: {phase}" in raised[0], (phase, text)


def watched() -> PeerFailureWatch:
    init_logger()
    world_size = init_distributed(CommConfig())
    store = job_store()
    assert store is not None
    return PeerFailureWatch(
        store, dist.get_rank(), world_size, grace_seconds=20.0, echo_seconds=10.0, poll_seconds=0.1
    )


def see_a_failed_save_on_rank_0_first(folder: Path, way: Way) -> None:
    watch = watched()
    steering = Steering(way)
    run = build_run(folder, interval=3, **steering.settings)
    try:
        run.train(2)
        if dist.get_rank() == 0:
            steering.set(BEFORE_DATA, disk_full)
        else:
            # As if this rank heard of it a moment later.
            patch.object(run.manager, "_look_back").start()
        run.train(3)
        await_end_of_save(run.manager)
        run.train(5)
    except Exception as error:
        watch.publish(error, step=run.step)
        raise


def load_with_trouble_on_rank_1(folder: Path, way: Way) -> None:
    watch = watched()
    run = build_run(folder, **way.settings)
    run.train(1)
    run.manager.close()
    run = build_run(folder, seed=3, **way.settings)
    try:
        if dist.get_rank() == 1:
            fail = patch.object(run.dataloader, "load_state_dict")
            fail.start().side_effect = ValueError("there is no such row")
        run.manager.load()
        run.train(3)
    except Exception as error:
        watch.publish(error, step=run.step)
        raise


def test_the_first_rank_that_finds_a_save_failed_ends_the_others(tmp_path: Path) -> None:
    ends = end_of_ranks(
        2, see_a_failed_save_on_rank_0_first, tmp_path, ASYNC, init=False, settle_seconds=30
    )
    for end in ends:
        assert end.how == "raised" and end.exit_code == 1, end
        assert "rank 0 failed first, at step 4" in end.log
        assert "step 3 to" in end.log and "No space left on device" in end.log


@over(ASYNC, TC_WAITING)
def test_a_rank_that_cannot_take_its_state_ends_the_others_with_its_error(
    tmp_path: Path, way: Way
) -> None:
    ends = end_of_ranks(
        2, load_with_trouble_on_rank_1, tmp_path, way, init=False, settle_seconds=30
    )
    for end in ends:
        assert end.how == "raised" and end.exit_code == 1, end
        assert "rank 1 failed first" in end.log and "there is no such row" in end.log
