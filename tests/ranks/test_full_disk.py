"""A disk that is full, for a while: what is said, what is left, and that the run saves again.

On real small disks, for all ways to save. The steering of the writers fills the disk when the save has
been found to fit; test_room_check.py has the rest, with what a storage is made to say.
"""

import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torchtitan.components.checkpointer.space import state_bytes

from tests.ranks.pool import run_on_ranks
from tests.ranks.steering import await_end_of_save, BEFORE_DATA, Steering
from tests.unit_tests.components.checkpointer.runs import build_run, message_of, names
from tests.unit_tests.components.checkpointer.ways import ASYNC, DISABLED, over, TC, TC_WAITING, Way
from tests.unit_tests.small_disk import fill, small_disk

pytestmark = pytest.mark.ranks


def try_and_tell(run: Any) -> str:
    """What a step with a save fails with, then or in the step after it."""
    message = message_of(run.train, run.step + 1)
    await_end_of_save(run.manager)
    if message == "nothing was raised":
        message = message_of(run.train, run.step + 1)
    return message


def fill_up(disk: Path) -> None:
    fill(disk)


def become_full_while_saving(disk: Path, way: Way, rank: int) -> Any:
    steering = Steering(way)
    run = build_run(disk, keep_latest_k=0, **steering.settings)
    run.train(1)
    run.manager.maybe_wait_for_saving()
    dist.barrier()
    if dist.get_rank() == rank:
        steering.set(BEFORE_DATA, partial(fill_up, disk))
    messages = [try_and_tell(run)]
    steering.stop()
    left = [names(disk)]
    dist.barrier()  # one rank may be about to look while another goes on
    message = message_of(run.train, run.step + 1)
    if message == "nothing was raised":
        message = message_of(run.manager.maybe_wait_for_saving)  # a thread has begun that save
    messages.append(message)
    left.append(names(disk))
    dist.barrier()
    if dist.get_rank() == rank:
        (disk / "ballast").unlink()
    dist.barrier()
    run.train(run.step + 1)
    run.manager.close()
    again = build_run(disk, seed=5, keep_latest_k=0, load_only=True, **way.settings)
    is_resumed = again.manager.load() and again.snapshot() == run.snapshot()
    again.manager.close()
    return messages, left, is_resumed


@over()
def test_a_disk_that_is_full_in_a_save_costs_that_save_and_no_other(
    tmp_path: Path, way: Way
) -> None:
    rank = 1 if way.has_writer else 0
    with small_disk(tmp_path / "disk", 4096) as disk:
        told = run_on_ranks(2, become_full_while_saving, disk, way, rank)
        for (failed, refused), (after, swept), is_resumed in told:
            assert f"step 2 to {disk}/checkpoint/step-2 failed" in failed
            assert "No space left on device" in failed
            assert f"The disk of {disk}/checkpoint is full: " in failed
            assert " of 4.0 MiB are free now. " in failed
            assert "was not begun: it takes 0." in refused
            # What the failed save had taken is free again.
            assert re.search(rf"the disk of {disk}/checkpoint has 0\.[012] MiB free", refused)
            # Nobody else would delete it: all checkpoints are kept.
            assert swept == ["step-1"] and set(after) <= {"step-1", way.unfinished(2)}
            assert is_resumed
        saved = names(disk)
        assert saved[0] == "step-1" and len(saved) == 2


def train_through_a_full_disk(disk: Path, way: Way) -> tuple[int, list[str]]:
    steering = Steering(way)
    run = build_run(disk, on_save_failure="warn", **steering.settings)
    run.train(1)
    run.manager.maybe_wait_for_saving()
    dist.barrier()
    if dist.get_rank() == 1:
        steering.set(BEFORE_DATA, partial(fill_up, disk))
    run.train(2)
    await_end_of_save(run.manager)
    steering.stop()
    run.train(3)
    run.manager.maybe_wait_for_staging()
    dist.barrier()
    left = names(disk)
    dist.barrier()
    if dist.get_rank() == 1:
        (disk / "ballast").unlink()
    dist.barrier()
    run.train(4)
    run.manager.close()
    return run.step, left


@over(ASYNC, TC)
def test_a_run_that_may_go_on_trains_through_a_full_disk(tmp_path: Path, way: Way) -> None:
    with small_disk(tmp_path / "disk", 4096) as disk:
        assert run_on_ranks(2, train_through_a_full_disk, disk, way) == [(4, ["step-1"])] * 2
        assert names(disk) == ["step-1", "step-4"]


def save_where_nothing_may_be_written(disk: Path, way: Way) -> list[str]:
    run = build_run(disk, **way.settings)
    run.train(1)
    run.manager.maybe_wait_for_saving()
    dist.barrier()
    if dist.get_rank() == 0:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    dist.barrier()
    message = try_and_tell(run)
    message_of(run.manager.close)
    return [message]


def sizes_said_and_real(folder: Path, way: Way) -> tuple[int, int]:
    run = build_run(folder, width=301, **way.settings)
    run.train(1)
    run.manager.close()
    step_1 = folder / "checkpoint" / "step-1"
    said = state_bytes(run.manager.states, world_size=2)
    return said, sum(path.stat().st_size for path in step_1.iterdir())


@over(DISABLED, TC_WAITING)
def test_every_rank_knows_what_all_of_them_write(tmp_path: Path, way: Way) -> None:
    for said, real in run_on_ranks(2, sizes_said_and_real, tmp_path, way):
        # What is not elements takes up to a quarter of a MiB in so small a state.
        assert real <= said < real + 2**18


@over(TC)
def test_a_disk_that_became_read_only_is_called_so(tmp_path: Path, way: Way) -> None:
    with small_disk(tmp_path / "disk", 4096) as disk:
        for (message,) in run_on_ranks(2, save_where_nothing_may_be_written, disk, way):
            assert "Read-only file system" in message
            assert f"The disk of {disk}/checkpoint is mounted read-only" in message
        assert names(disk) == ["step-1"]
