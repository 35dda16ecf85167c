"""A rank whose disk does not answer ends the wait of every rank, each with an error that says so."""

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torchtitan.components.checkpointer import dcp
from torchtitan.components.checkpointer.dcp_writer import DurableFileSystemWriter
from torchtitan.components.checkpointer.errors import (
    CheckpointReadError,
    CheckpointSaveTimeoutError,
)
from torchtitan.components.checkpointer.waiting import leave_if_given_up
from torchtitan.config import CommConfig
from torchtitan.distributed import utils

from tests.ranks.pool import end_of_ranks
from tests.unit_tests.components.checkpointer.runs import build_run, message_of, Run

pytestmark = pytest.mark.ranks

WORDS = "has waited for 1 s, the limit of --checkpoint.timeout_seconds"


def begin(folder: Path, mode: str) -> tuple[Run, dist.Store]:
    """A run whose saves may take 1 second, in a job that waits for a minute."""
    utils.init_distributed(CommConfig(init_timeout_seconds=60))
    store = utils.job_store()
    assert store is not None
    store.set_timeout(timedelta(seconds=60))
    return build_run(folder, async_mode=mode, timeout_seconds=1), store


def part_in_peace(store: dist.Store) -> None:
    """Both stay until both are done, and rank 0, which hosts the store, until rank 1 has heard of it."""
    if dist.get_rank() == 0:
        store.set("rank 0 is done", "")
        store.wait(["rank 1 is done, and has heard"])
    else:
        store.wait(["rank 0 is done"])
        store.set("rank 1 is done, and has heard", "")


def save_while_rank_1_hangs(folder: Path, mode: str) -> None:
    run, store = begin(folder, mode)
    run.train(1)
    run.manager.maybe_wait_for_saving()

    class Hanging(DurableFileSystemWriter):
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
            if mode == "disabled":
                store.wait(["rank 0 has given up"])
                raise OSError(5, "Input/output error")
            threading.Event().wait()

    if dist.get_rank() == 1:
        patch.object(dcp, "DurableFileSystemWriter", Hanging).start()
    try:
        run.train(3)
    except CheckpointSaveTimeoutError as error:
        (folder / f"rank {dist.get_rank()}").write_text(str(error))
    except Exception as error:  # What the other rank feels once this one has gone on.
        (folder / f"rank {dist.get_rank()}").write_text(repr(error))
    store.set("rank 0 has given up", "")
    run.manager.close()
    part_in_peace(store)
    try:
        raise SystemExit(7)
    finally:
        leave_if_given_up()


def load_while_rank_0_hangs(folder: Path) -> None:
    run, store = begin(folder, "disabled")
    if dist.get_rank() == 0:

        def isdir(path: str) -> bool:
            store.wait(["rank 1 has given up"])
            raise OSError(5, "Input/output error")

        patch.object(run.manager._storage, "isdir", isdir).start()
    try:
        run.manager.load()
    except (CheckpointReadError, OSError) as error:
        (folder / f"rank {dist.get_rank()}").write_text(str(error))
    store.set("rank 1 has given up", "")
    part_in_peace(store)


def save_while_rank_1_is_late(folder: Path) -> None:
    run, store = begin(folder, "async_with_pinned_mem")
    run.train(1, save=False)
    if dist.get_rank() == 1:
        store.wait(["rank 0 has given up"])
    (folder / f"rank {dist.get_rank()}").write_text(message_of(run.manager.save, 1))
    store.set("rank 0 has given up", "")
    run.manager.close()
    part_in_peace(store)


def test_a_rank_that_is_late_for_a_staged_save_is_waited_for_no_longer_than_the_limit(
    tmp_path: Path,
) -> None:
    end_of_ranks(2, save_while_rank_1_is_late, tmp_path, init=False)
    asked = f"step 1 to {tmp_path}/checkpoint/step-1"
    assert f"{asked} was given up: rank 0 {WORDS}" in (tmp_path / "rank 0").read_text()
    assert asked in (tmp_path / "rank 1").read_text()


def test_a_background_save_that_hangs_on_one_rank_is_given_up_on_all(tmp_path: Path) -> None:
    ends = end_of_ranks(2, save_while_rank_1_hangs, tmp_path, "async", init=False)
    for rank in (0, 1):
        text = (tmp_path / f"rank {rank}").read_text()
        assert f"step 2 to {tmp_path}/checkpoint/step-2 was given up: rank {rank} {WORDS}" in text
    # Its thread still hangs, and the process has ended all the same.
    assert ends[1].exit_code == 7, ends[1].log


def test_a_save_that_training_waits_for_is_given_up_before_the_limit_of_training(
    tmp_path: Path,
) -> None:
    end_of_ranks(2, save_while_rank_1_hangs, tmp_path, "disabled", init=False)
    text = (tmp_path / "rank 0").read_text()
    assert f"step 2 to {tmp_path}/checkpoint/step-2 was given up: rank 0 {WORDS}" in text


def test_a_load_is_given_up_by_the_ranks_that_wait_for_rank_0(tmp_path: Path) -> None:
    end_of_ranks(2, load_while_rank_0_hangs, tmp_path, init=False)
    text = (tmp_path / "rank 1").read_text()
    assert f"Loading a checkpoint was given up: rank 1 {WORDS}" in text
    assert "Input/output error" in (tmp_path / "rank 0").read_text()
