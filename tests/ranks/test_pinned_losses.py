"""Saves through a writer process when something is lost: the process, the disk, the memory."""

import errno
import os
import re
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torchtitan.components.checkpointer.pinned import memory
from torchtitan.components.checkpointer.pinned.stager import SharedMemoryStager

from tests.ranks.pinned_runs import load_newest, PATIENCE, writer_pid
from tests.ranks.pool import run_on_ranks
from tests.ranks.processes import children
from tests.ranks.steering import await_end_of_save, BEFORE_DATA, disk_full, Hold, Steering
from tests.unit_tests.components.checkpointer.runs import build_run, message_of
from tests.unit_tests.components.checkpointer.ways import over, PINNED, saves_in_background, TC, Way

pytestmark = pytest.mark.ranks


def lose_writers(folder: Path, way: Way) -> Any:
    """Rank 1's writer is killed in a save; later its disk is full once."""
    steering = Steering(way)
    run = build_run(folder, keep_latest_k=0, **steering.settings)
    # Not the same on both, or rank 0 would stage it alone.
    run.manager.states["ballast"] = torch.full((2 * 2**20,), float(dist.get_rank()))
    hold = Hold(folder, f"rank-{dist.get_rank()}").make()
    steering.set(BEFORE_DATA, hold.stop_here)
    run.train(1)
    pids = [writer_pid(run)]
    hold.await_reached()
    steering.stop()
    if dist.get_rank() == 1:
        os.kill(pids[0], signal.SIGKILL)
    else:
        hold.let_go()  # on to where the ranks wait for each other
    # Each rank knows by now, and none may end the run by itself.
    await_end_of_save(run.manager)
    run.train(2)
    pids.append(writer_pid(run))
    run.manager.maybe_wait_for_saving()
    if dist.get_rank() == 1:
        steering.set(BEFORE_DATA, disk_full)
    run.train(3)
    await_end_of_save(run.manager)
    steering.stop()
    message = message_of(run.train, 4)
    run.train(5)
    pids.append(writer_pid(run))
    snapshot = run.snapshot()
    run.manager.close()
    return message, pids, snapshot, children()


def lose_starting_writers(folder: Path, way: Way) -> Any:
    """Rank 1's writers are killed while they still import, twice; nobody may wait for them."""
    run = build_run(folder, keep_latest_k=0, **way.settings)
    start = SharedMemoryStager.start_writer

    def start_and_lose(stager: SharedMemoryStager) -> None:
        start(stager)
        if dist.get_rank() == 1 and stager.writer_pid is not None:
            os.kill(stager.writer_pid, signal.SIGKILL)

    with patch.object(SharedMemoryStager, "start_writer", start_and_lose):
        run.train(2)
        run.manager.maybe_wait_for_staging()
    message = message_of(run.train, 3)
    if message == "nothing was raised":
        message = message_of(run.manager.maybe_wait_for_saving)  # a thread has found it
    run.train(4)
    run.manager.close()
    return message, children()


def run_out_of_memory(folder: Path, way: Way) -> Any:
    """On rank 1 there is too little for the first copy in one run, and for a larger one in another."""
    is_short = dist.get_rank() == 1
    never, later = folder / "never", folder / "later"
    run = build_run(never, keep_latest_k=0, **way.settings)
    with patch.object(memory, "available_bytes", lambda: 1000 if is_short else None):
        run.train(2)
    ends = [(saves_in_background(run.manager), children())]
    run.manager.close()
    run = build_run(later, keep_latest_k=0, **way.settings)
    run.train(1)
    assert children() == [writer_pid(run)]
    # Not the same on both, or rank 0 would stage it alone.
    run.manager.states["ballast"] = torch.full((2 * 2**20,), float(dist.get_rank()))
    full = OSError(errno.ENOSPC, "No space left on device") if is_short else None
    with patch.object(os, "posix_fallocate", side_effect=full):
        run.train(3)
    ends.append((saves_in_background(run.manager), children()))
    run.manager.close()
    return ends


@over(PINNED, TC)
def test_a_writer_that_died_is_replaced_on_all_ranks_and_costs_one_save(
    tmp_path: Path, way: Way
) -> None:
    ends = run_on_ranks(2, lose_writers, tmp_path, way, **PATIENCE)
    for message, pids, _, left in ends:
        assert f"step 3 to {tmp_path}/checkpoint/step-3 failed" in message
        assert "No space left on device" in message
        # A full disk is no reason for a new process.
        assert len(set(pids)) == 2 and pids[1] == pids[2]
        assert left == []
    assert way.complete(tmp_path) == ["step-2", "step-5"]
    ((step, snapshot),) = run_on_ranks(1, load_newest, tmp_path, way)
    assert step == 5 and snapshot == ends[0][2]


@over(PINNED, TC)
def test_writers_that_die_while_they_start_are_not_waited_for_and_two_losses_in_a_row_are_too_many(
    tmp_path: Path, way: Way, capsys: pytest.CaptureFixture[str]
) -> None:
    # The limit of the wait for a writer that never comes is 600 s, more than this has.
    ends = run_on_ranks(2, lose_starting_writers, tmp_path, way, **PATIENCE)
    log = capsys.readouterr().out
    for rank, (message, left) in enumerate(ends):
        cause = rf"\[rank {rank}\] .* step 1 to .* of rank 1 was ended by SIGKILL"
        assert re.search(cause, log), log
        assert "step 2 to" in message and "of rank 1 was ended by SIGKILL" in message
        assert left == []
    assert way.complete(tmp_path) == ["step-4"]


def test_a_rank_without_memory_fails_no_save_and_all_ranks_wait_from_then_on(
    tmp_path: Path,
) -> None:
    # How ranks agree on it is one code for both managers.
    ends = run_on_ranks(2, run_out_of_memory, tmp_path, PINNED, **PATIENCE)
    assert ends == [[(False, [])] * 2] * 2
    assert PINNED.complete(tmp_path / "never") == ["step-1", "step-2"]
    assert PINNED.complete(tmp_path / "later") == ["step-1", "step-2", "step-3"]
