"""A save that fails on one rank fails on all, once; a run that is killed in a save loses that save only.

The writers are steered, so a test can stop them at any point: no timing is involved.
"""

import os
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tests.ranks.pool import end_of_ranks, run_on_ranks
from tests.ranks.steering import (
    AFTER_DATA,
    await_end_of_save,
    BEFORE_DATA,
    COMMIT,
    disk_full,
    hang,
    Hold,
    POINTS,
    Steering,
)
from tests.unit_tests.components.checkpointer.runs import build_run, message_of, names
from tests.unit_tests.components.checkpointer.ways import (
    ASYNC,
    DISABLED,
    over,
    PINNED,
    TC,
    TC_WAITING,
    Way,
)

pytestmark = pytest.mark.ranks

# (rank, where its disk is full), one after the other in one run.
FAILURES = [(1, AFTER_DATA), (0, COMMIT), (0, BEFORE_DATA)]


def fail_in_the_background(folder: Path, way: Way) -> Any:
    """What ranks are told of three saves, of the last one by closing; each but it before a good save."""
    steering = Steering(way)
    run = build_run(folder, **steering.settings)
    messages = []
    for rank, at in FAILURES:
        run.train(run.step + 1)
        run.manager.maybe_wait_for_saving()
        if dist.get_rank() == rank:
            steering.set(at, disk_full)
        run.train(run.step + 1)
        await_end_of_save(run.manager)
        steering.stop()
        if (rank, at) == FAILURES[-1]:
            messages.append(message_of(run.manager.close))
            run.manager.close()
        else:
            messages.append(message_of(run.train, run.step + 1))
    # The group that saves use must still be in step on both ranks.
    dist.all_reduce(torch.ones(1))
    return messages


def fail_in_the_foreground(folder: Path, way: Way) -> list[str]:
    steering = Steering(way)
    run = build_run(folder, **steering.settings)
    messages = []
    for rank, at in FAILURES:
        run.train(run.step + 1)
        if dist.get_rank() == rank:
            steering.set(at, disk_full)
        messages.append(message_of(run.train, run.step + 1))
        steering.stop()
    run.train(run.step + 1)
    run.manager.close()
    return messages


def fail_to_make_ready(folder: Path, way: Way) -> str:
    """Rank 0 cannot move another history aside; the others learn of it without a disk of their own."""
    run = build_run(folder, **way.settings)
    run.manager.load(1)
    if dist.get_rank() == 0:

        def refuse(source: str, target: str) -> None:
            raise PermissionError(f"{source} is protected")

        patch.object(run.manager._storage, "move", refuse).start()
    message = message_of(run.train, 2)
    patch.stopall()
    run.train(3)
    run.manager.close()
    return message


def save_steps(folder: Path, way: Way, until: int) -> Any:
    run = build_run(folder, **way.settings)
    run.train(until)
    run.manager.close()
    return run.snapshot()


def be_killed_while_a_save_is_in_flight(folder: Path, way: Way, at: str) -> None:
    steering = Steering(way)
    run = build_run(folder, **steering.settings)
    run.train(2)
    run.manager.maybe_wait_for_saving()
    hold = Hold(folder, f"rank-{dist.get_rank()}").make()
    steering.set(at, hold.stop_here)
    there = ["0"] if at == COMMIT else ["0", "1"]
    # Of this thread alone: training's group is in use, and a client that waits serves nobody else.
    default: Any = _get_default_store()
    store = default.clone()

    def kill_all_once_they_are_there() -> None:
        if str(dist.get_rank()) in there:
            hold.await_reached()
            store.set(str(dist.get_rank()), "")
        store.wait(there)
        if dist.get_rank() == 0:  # which hosts the store
            store.wait(["1 has heard"])
        store.set(f"{dist.get_rank()} has heard", "")
        os.kill(os.getpid(), signal.SIGKILL)

    killer = threading.Thread(target=kill_all_once_they_are_there)
    killer.start()
    run.train(3)
    killer.join()


def be_rank_1_and_die_while_a_save_is_in_flight(folder: Path, way: Way) -> None:
    """The writer of rank 0 has nobody left that could tell it."""
    steering = Steering(way)
    run = build_run(folder, **steering.settings)
    run.train(1)
    run.manager.maybe_wait_for_saving()
    if dist.get_rank() == 1:
        steering.set(BEFORE_DATA, hang)
    run.train(2)
    run.manager.maybe_wait_for_staging()
    store: Any = _get_default_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 asks for nothing more"])
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("rank 0 asks for nothing more", "")
    (folder / "told").write_text(message_of(run.manager.close))


def resume(folder: Path, way: Way) -> Any:
    run = build_run(folder, seed=5, **way.settings)
    assert run.manager.load()
    loaded = run.snapshot()
    before = names(folder)
    run.train(4)
    run.manager.close()
    return loaded, before


@pytest.fixture(scope="module")
def after_two_steps(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run that nobody disturbs is like after its second step."""
    return run_on_ranks(2, save_steps, tmp_path_factory.mktemp("straight"), DISABLED, 2)[0]


@over(ASYNC, TC)
def test_a_background_failure_of_one_rank_surfaces_once_on_all(tmp_path: Path, way: Way) -> None:
    for messages in run_on_ranks(2, fail_in_the_background, tmp_path, way):
        for step, message in zip((2, 5, 8), messages, strict=True):
            assert f"step {step} to {tmp_path}/checkpoint/step-{step} failed" in message
            assert "No space left on device" in message
    saved = ["step-1", "step-4", "step-7"]
    assert way.complete(tmp_path) == saved
    # No save has come to sweep what the last one left.
    assert names(tmp_path) == sorted([*saved, way.unfinished(8)])


@over(DISABLED, TC_WAITING)
def test_a_synchronous_failure_of_one_rank_is_one_of_all(tmp_path: Path, way: Way) -> None:
    for messages in run_on_ranks(2, fail_in_the_foreground, tmp_path, way):
        for step, message in zip((2, 4, 6), messages, strict=True):
            assert f"step {step} to" in message and "No space left on device" in message
    assert names(tmp_path) == ["step-1", "step-3", "step-5", "step-7"]


@over(ASYNC, TC_WAITING)
def test_a_folder_that_rank_0_cannot_get_ready_is_a_failed_save_on_all(
    tmp_path: Path, way: Way
) -> None:
    run_on_ranks(2, save_steps, tmp_path, way, 2)
    for message in run_on_ranks(2, fail_to_make_ready, tmp_path, way):
        assert "step 2 to" in message and "step-2 is protected" in message
    assert names(tmp_path) == ["step-1", "step-3", "superseded"]


@pytest.mark.parametrize(
    "way,at",
    [(way, at) for way in (ASYNC, TC_WAITING) for at in POINTS],
    ids=str,
)
def test_a_run_killed_in_a_save_resumes_from_the_one_before_and_sweeps_the_rest(
    tmp_path: Path, way: Way, at: str, after_two_steps: Any
) -> None:
    ends = end_of_ranks(
        2, be_killed_while_a_save_is_in_flight, tmp_path, way, at, settle_seconds=30
    )
    assert [end.exit_code for end in ends] == [-signal.SIGKILL] * 2, [end.log for end in ends]
    for loaded, before in run_on_ranks(2, resume, tmp_path, way):
        assert loaded == after_two_steps
        assert before == sorted(["step-1", "step-2", way.unfinished(3)])
    saved = ["step-1", "step-2", "step-3", "step-4"]
    assert names(tmp_path) == way.complete(tmp_path) == saved


@over(PINNED, TC)
def test_a_rank_that_is_killed_in_a_save_ends_the_wait_of_the_others(
    tmp_path: Path, way: Way
) -> None:
    end_of_ranks(2, be_rank_1_and_die_while_a_save_is_in_flight, tmp_path, way, settle_seconds=20)
    # Within the seconds that are left to a rank when another one has ended.
    assert "step 2" in (tmp_path / "told").read_text()
    if way is TC:
        assert names(tmp_path) == ["step-1", "tmp_step-2"]
