"""One live run per folder, with real processes: who comes second is refused, who is dead is no obstacle."""

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torchtitan.components.checkpointer import lock_holder
from torchtitan.components.checkpointer.errors import CheckpointInUseError
from torchtitan.components.checkpointer.integrity.manifest import RunDescription
from torchtitan.components.checkpointer.lock_holder import Holder
from torchtitan.components.checkpointer.run_lock import hold, RUN_LOCK

from tests.ranks.pool import end_of_ranks, run_on_ranks
from tests.ranks.test_starts import start_again
from tests.unit_tests.components.checkpointer.locks import elsewhere, ended, leave
from tests.unit_tests.components.checkpointer.runs import build_run, names, Run
from tests.unit_tests.components.checkpointer.ways import ASYNC, DISABLED, over, TC, TC_WAITING, Way

pytestmark = pytest.mark.ranks

ROUNDS = 15


def start(folder: Path, way: Way, **settings: Any) -> Run:
    run = build_run(folder, **way.settings, **settings)
    run.manager.describe_run(RunDescription({}, {}))
    return run


def refusal_of(action: Any, *arguments: Any) -> str:
    try:
        action(*arguments)
    except CheckpointInUseError as error:
        return str(error)
    return "it was not refused"


def take_over_together(folder: Path, dead: list[Holder | None]) -> list[bool]:
    """Whether this process got the lock, for each of what another run has left."""
    got = []
    for number, holder in enumerate(dead):
        path = folder / str(number)
        if holder is not None and dist.get_rank() == 0:
            leave(path, holder)
        dist.barrier()
        try:
            lock = hold(str(path), timeout_seconds=300)
        except CheckpointInUseError:
            lock = None
        got.append(lock is not None)
        dist.barrier()
        if lock is not None:
            lock.require()
            lock.release()
    return got


def be_killed_while_it_runs(folder: Path, way: Way) -> None:
    run = start(folder, way)
    run.train(2)
    run.manager.maybe_wait_for_saving()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resume(folder: Path, way: Way) -> tuple[bool, int]:
    run = start(folder, way)
    is_loaded, step = run.manager.load(), run.step
    run.train(3)
    run.manager.close()
    return is_loaded, step


def be_refused(folder: Path, way: Way) -> list[str]:
    run = start(folder, way)
    told = [refusal_of(run.manager.load), refusal_of(run.train, 1)]
    run.manager.close()
    return told


def lose_the_folder(folder: Path, way: Way) -> list[str]:
    run = start(folder, way)
    run.train(2)
    run.manager.maybe_wait_for_saving()
    if dist.get_rank() == 0:
        leave(folder / "checkpoint", elsewhere())
    dist.barrier()
    told = [refusal_of(run.train, 3)]
    # Nobody is left behind: all ranks may still talk to each other.
    run.train(4, save=False)
    told.append(refusal_of(run.manager.save, 4, True))
    run.manager.close()
    return told


def start_where_another_rank_ran(folder: Path, way: Way, pid: int, started: str) -> int:
    """What rank 0 held before it was started again lies on the machine of rank 1."""
    if dist.get_rank() == 0:
        leave(folder / "checkpoint", elsewhere(boot_id="of rank 1", pid=pid, started=started))
    else:
        patch.object(lock_holder, "_boot_id", return_value="of rank 1").start()
    dist.barrier()
    run = start(folder, way)
    run.train(1)
    run.manager.close()
    return run.step


def test_of_several_that_come_at_once_exactly_one_gets_the_folder(tmp_path: Path) -> None:
    dead: list[Holder | None] = [ended() if number % 3 else None for number in range(ROUNDS)]
    per_rank = run_on_ranks(3, take_over_together, tmp_path, dead)
    winners = [sum(got) for got in zip(*per_rank, strict=True)]
    assert winners == [1] * ROUNDS
    assert not list(tmp_path.rglob(f"{RUN_LOCK}*"))


@over(ASYNC, TC)
def test_a_run_that_was_killed_is_started_again_without_waiting(tmp_path: Path, way: Way) -> None:
    ends = end_of_ranks(2, be_killed_while_it_runs, tmp_path, way, settle_seconds=20)
    assert [end.exit_code for end in ends] == [-signal.SIGKILL] * 2, [end.log for end in ends]
    assert (tmp_path / "checkpoint" / RUN_LOCK).exists()
    assert run_on_ranks(2, resume, tmp_path, way) == [(True, 2)] * 2
    assert names(tmp_path) == ["step-1", "step-2", "step-3"]


@over(ASYNC, TC_WAITING)
def test_a_second_run_is_refused_on_all_ranks_before_it_touches_anything(
    tmp_path: Path, way: Way
) -> None:
    lock = hold(str(tmp_path / "checkpoint"), timeout_seconds=300)
    try:
        for told in run_on_ranks(2, be_refused, tmp_path, way):
            for text in told:
                assert f"{tmp_path}/checkpoint is in use" in text, text
                assert f"process {os.getpid()} on host {lock.holder.host}" in text
        lock.require()
    finally:
        lock.release()
    assert os.listdir(tmp_path) == []


def test_a_second_run_in_a_new_folder_is_refused_before_it_has_trained(tmp_path: Path) -> None:
    first = start(tmp_path, DISABLED)
    try:
        assert not first.manager.load(), "it has begun, and will not save for long"
        for told in run_on_ranks(2, be_refused, tmp_path, ASYNC):
            assert all(f"{tmp_path}/checkpoint is in use" in text for text in told), told
    finally:
        first.manager.close()
    assert os.listdir(tmp_path) == []


@over(ASYNC, TC_WAITING)
def test_a_run_whose_folder_was_taken_over_saves_nothing_more_on_any_rank(
    tmp_path: Path, way: Way
) -> None:
    for told in run_on_ranks(2, lose_the_folder, tmp_path, way):
        assert all("belongs to another run now: process" in text for text in told), told
        assert "far-away" in told[0]
    assert names(tmp_path) == sorted([RUN_LOCK, "step-1", "step-2"])


def test_the_rank_that_is_on_the_machine_of_the_last_run_says_that_it_is_dead(
    tmp_path: Path,
) -> None:
    dead = ended()
    arguments = (tmp_path, ASYNC, dead.pid, dead.started)
    # Silence would have taken longer than the ranks have.
    assert run_on_ranks(2, start_where_another_rank_ran, *arguments) == [1, 1]
    assert names(tmp_path) == ["step-1"]


def test_a_trainer_is_refused_while_another_one_trains_into_the_folder(tmp_path: Path) -> None:
    lock = hold(str(tmp_path / "run/checkpoint"), timeout_seconds=300)
    try:
        for end in end_of_ranks(2, start_again, tmp_path, "run", 7, init=False):
            assert end.how == "raised" and "CheckpointInUseError" in end.detail, end
            assert f"process {os.getpid()} on host" in end.detail
    finally:
        lock.release()
