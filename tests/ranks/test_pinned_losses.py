"""The mode async_with_pinned_mem when something is lost: a writer process, the disk, the memory."""

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
from torchtitan.components.checkpointer import AsyncMode
from torchtitan.components.checkpointer.pinned import memory
from torchtitan.components.checkpointer.pinned.stager import SharedMemoryStager

from tests.ranks.held_writer import DATA, fill_disk, Hold, hold_next_save
from tests.ranks.pinned_runs import children, load_newest, PATIENCE, PINNED, writer_pid
from tests.ranks.pool import run_on_ranks
from tests.unit_tests.components.checkpointer.runs import build_run, message_of

pytestmark = pytest.mark.ranks


def complete(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in (folder / "checkpoint").glob("*/.metadata"))


def lose_writers(folder: Path) -> Any:
    """Rank 1's writer is killed in a save; later its disk is full once."""
    run = build_run(folder, async_mode=PINNED, keep_latest_k=0)
    run.manager.states["ballast"] = torch.ones(2 * 2**20)
    hold = Hold(folder, f"rank-{dist.get_rank()}")
    held = hold_next_save(hold.make(), DATA)
    run.train(1)
    pids = [writer_pid(run)]
    hold.await_reached()
    held.stop()
    if dist.get_rank() == 1:
        os.kill(pids[0], signal.SIGKILL)
    else:
        hold.let_go()  # on to where the ranks wait for each other
    run.train(2)
    pids.append(writer_pid(run))
    run.manager.maybe_wait_for_saving()
    full = fill_disk() if dist.get_rank() == 1 else None
    run.train(3)
    if full is not None:
        full.stop()
    message = message_of(run.train, 4)
    run.train(5)
    pids.append(writer_pid(run))
    snapshot = run.snapshot()
    run.manager.close()
    return message, pids, snapshot, children()


def lose_a_starting_writer(folder: Path) -> Any:
    """Rank 1's writer is killed while it still imports; nobody may wait for it."""
    run = build_run(folder, async_mode=PINNED, keep_latest_k=0)
    start = SharedMemoryStager.start_writer

    def start_and_lose(stager: SharedMemoryStager) -> None:
        start(stager)
        if dist.get_rank() == 1 and stager.writer_pid is not None:
            os.kill(stager.writer_pid, signal.SIGKILL)

    with patch.object(SharedMemoryStager, "start_writer", start_and_lose):
        run.train(1)
    run.train(2)
    run.manager.close()
    return children()


def run_out_of_memory(folder: Path) -> Any:
    """On rank 1 there is too little for the first copy in one run, and for a larger one in another."""
    is_short = dist.get_rank() == 1
    never, later = folder / "never", folder / "later"
    run = build_run(never, async_mode=PINNED, keep_latest_k=0)
    with patch.object(memory, "available_bytes", lambda: 1000 if is_short else None):
        run.train(2)
    ends = [(run.manager.async_mode, children())]
    run.manager.close()
    run = build_run(later, async_mode=PINNED, keep_latest_k=0)
    run.train(1)
    assert children() == [writer_pid(run)]
    run.manager.states["ballast"] = torch.ones(2 * 2**20)
    full = OSError(errno.ENOSPC, "No space left on device") if is_short else None
    with patch.object(os, "posix_fallocate", side_effect=full):
        run.train(3)
    ends.append((run.manager.async_mode, children()))
    run.manager.close()
    return ends


def test_a_writer_that_died_is_replaced_on_all_ranks_and_costs_one_save(tmp_path: Path) -> None:
    ends = run_on_ranks(2, lose_writers, tmp_path, **PATIENCE)
    for message, pids, _, left in ends:
        assert f"step 3 to {tmp_path}/checkpoint/step-3 failed" in message
        assert "No space left on device" in message
        # A full disk is no reason for a new process.
        assert len(set(pids)) == 2 and pids[1] == pids[2]
        assert left == []
    assert complete(tmp_path) == ["step-2", "step-5"]
    ((step, snapshot),) = run_on_ranks(1, load_newest, tmp_path)
    assert step == 5 and snapshot == ends[0][2]


def test_a_writer_that_dies_while_it_starts_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The limit of the wait for a writer that never comes is 600 s, more than this has.
    assert run_on_ranks(2, lose_a_starting_writer, tmp_path, **PATIENCE) == [[], []]
    log = capsys.readouterr().out
    for rank in (0, 1):
        cause = rf"\[rank {rank}\] .* step 1 to .* of rank 1 was ended by SIGKILL"
        assert re.search(cause, log), log
    assert complete(tmp_path) == ["step-2"]


def test_a_rank_without_memory_fails_no_save_and_all_ranks_wait_from_then_on(
    tmp_path: Path,
) -> None:
    ends = run_on_ranks(2, run_out_of_memory, tmp_path, **PATIENCE)
    assert ends == [[(AsyncMode.DISABLED, [])] * 2] * 2
    assert complete(tmp_path / "never") == ["step-1", "step-2"]
    assert complete(tmp_path / "later") == ["step-1", "step-2", "step-3"]
