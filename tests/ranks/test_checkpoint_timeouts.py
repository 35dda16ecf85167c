"""A rank whose disk does not answer ends the wait of every rank, each with an error that says so."""

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torchtitan.components.checkpointer.errors import (
    CheckpointReadError,
    CheckpointSaveTimeoutError,
)
from torchtitan.components.checkpointer.waiting import leave_if_given_up
from torchtitan.config import CommConfig
from torchtitan.distributed import utils

from tests.ranks.pool import end_of_ranks, run_on_ranks
from tests.ranks.processes import children
from tests.ranks.steering import await_end_of_save, BEFORE_DATA, hang, Steering
from tests.unit_tests.components.checkpointer.runs import build_run, message_of, names, Run
from tests.unit_tests.components.checkpointer.ways import (
    ASYNC,
    DISABLED,
    over,
    PINNED,
    stager_of,
    TC,
    TC_WAITING,
    Way,
)

pytestmark = pytest.mark.ranks

WORDS = "has waited for 1 s, the limit of --checkpoint.timeout_seconds"


def begin(folder: Path, settings: dict[str, Any], limit_seconds: int = 1) -> tuple[Run, dist.Store]:
    """A run whose saves may take 1 second, in a job that waits for a minute."""
    utils.init_distributed(CommConfig(init_timeout_seconds=60))
    store = utils.job_store()
    assert store is not None
    store.set_timeout(timedelta(seconds=60))
    return build_run(folder, timeout_seconds=limit_seconds, **settings), store


def part_in_peace(store: dist.Store) -> None:
    """Both stay until both are done, and rank 0, which hosts the store, until rank 1 has heard of it."""
    if dist.get_rank() == 0:
        store.set("rank 0 is done", "")
        store.wait(["rank 1 is done, and has heard"])
    else:
        store.wait(["rank 0 is done"])
        store.set("rank 1 is done, and has heard", "")


def save_while_rank_1_hangs(folder: Path, way: Way) -> None:
    steering = Steering(way)
    run, store = begin(folder, steering.settings)
    run.train(1)
    run.manager.maybe_wait_for_saving()

    def wait_and_fail() -> None:
        store.wait(["rank 0 has given up"])
        raise OSError(5, "Input/output error")

    if dist.get_rank() == 1:
        steering.set(BEFORE_DATA, hang if way.is_background else wait_and_fail)
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


def go_on_while_rank_1_hangs(folder: Path, way: Way) -> None:
    """Rank 0 gives its save up; that of rank 1 ends later, and is a failure of another kind there."""
    steering = Steering(way)
    settings = {**steering.settings, "on_save_failure": "warn"}
    run, store = begin(folder, settings, limit_seconds=3)
    run.train(1)
    run.manager.maybe_wait_for_saving()
    may_write = threading.Event()
    if dist.get_rank() == 1:
        steering.set(BEFORE_DATA, lambda: may_write.wait(60))
    run.train(3)
    steering.stop()
    may_write.set()
    await_end_of_save(run.manager)
    run.train(5)
    run.manager.close()
    part_in_peace(store)


def save_while_a_writer_process_hangs(folder: Path, way: Way) -> Any:
    """That of rank 1, for which the one of rank 0 waits."""
    steering = Steering(way)
    run, store = begin(
        folder, steering.settings, limit_seconds=60
    )  # until the processes have started
    run.train(1)
    run.manager.maybe_wait_for_saving()
    stager = stager_of(run.manager)
    assert stager is not None and stager._process is not None
    stager._process._timeout = timedelta(seconds=1)
    if dist.get_rank() == 1:
        steering.set(BEFORE_DATA, hang)
    run.train(2)
    await_end_of_save(run.manager)
    steering.stop()
    message = message_of(run.train, 3)
    run.manager.close()
    part_in_peace(store)
    return message, children()


def load_while_rank_0_hangs(folder: Path, way: Way) -> None:
    run, store = begin(folder, way.settings)
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


def save_while_rank_1_is_late(folder: Path, way: Way) -> None:
    run, store = begin(folder, way.settings)
    run.train(1, save=False)
    if dist.get_rank() == 1:
        store.wait(["rank 0 has given up"])
    (folder / f"rank {dist.get_rank()}").write_text(message_of(run.manager.save, 1))
    store.set("rank 0 has given up", "")
    run.manager.close()
    part_in_peace(store)


@over(PINNED, TC, TC_WAITING)
def test_a_rank_that_is_late_for_a_save_is_waited_for_no_longer_than_the_limit(
    tmp_path: Path, way: Way
) -> None:
    end_of_ranks(2, save_while_rank_1_is_late, tmp_path, way, init=False)
    asked = f"step 1 to {tmp_path}/checkpoint/step-1"
    assert f"{asked} was given up: rank 0 {WORDS}" in (tmp_path / "rank 0").read_text()
    assert asked in (tmp_path / "rank 1").read_text()


def test_a_background_save_that_hangs_on_one_rank_is_given_up_on_all(tmp_path: Path) -> None:
    ends = end_of_ranks(2, save_while_rank_1_hangs, tmp_path, ASYNC, init=False)
    for rank in (0, 1):
        text = (tmp_path / f"rank {rank}").read_text()
        assert f"step 2 to {tmp_path}/checkpoint/step-2 was given up: rank {rank} {WORDS}" in text
    # Its thread still hangs, and the process has ended all the same.
    assert ends[1].exit_code == 7, ends[1].log


def test_ranks_that_go_on_after_failures_stay_in_step_when_one_has_given_a_save_up(
    tmp_path: Path,
) -> None:
    ends = end_of_ranks(2, go_on_while_rank_1_hangs, tmp_path, ASYNC, init=False)
    for end in ends:
        assert end.how == "returned", end.detail
        assert end.log.count("Training goes on, and the next save is tried") == 2
        # What it ended with on rank 1 may be known by the second time.
        assert f"step 2 to {tmp_path}/checkpoint/step-2 was given up" in end.log
        assert "has waited for 0 s" not in end.log
    # Nothing has begun beside it, and once it is over on both ranks they save again.
    assert ASYNC.complete(tmp_path) == ["step-1", "step-4", "step-5"]
    assert names(tmp_path) == ["step-1", "step-4", "step-5"]


def test_a_writer_process_that_hangs_is_ended_in_time(tmp_path: Path) -> None:
    ends = run_on_ranks(2, save_while_a_writer_process_hangs, tmp_path, TC, init=False)
    for message, left in ends:
        assert f"step 2 to {tmp_path}/checkpoint/step-2 failed" in message
        assert "did not finish within 1 s (--checkpoint.timeout_seconds)" in message
        assert left == []
    assert TC.complete(tmp_path) == ["step-1"]


@over(DISABLED, TC_WAITING)
def test_a_save_that_training_waits_for_is_given_up_before_the_limit_of_training(
    tmp_path: Path, way: Way
) -> None:
    end_of_ranks(2, save_while_rank_1_hangs, tmp_path, way, init=False)
    text = (tmp_path / "rank 0").read_text()
    assert f"step 2 to {tmp_path}/checkpoint/step-2 was given up: rank 0 {WORDS}" in text


@over(DISABLED, TC)
def test_a_load_is_given_up_by_the_ranks_that_wait_for_rank_0(tmp_path: Path, way: Way) -> None:
    end_of_ranks(2, load_while_rank_0_hangs, tmp_path, way, init=False)
    text = (tmp_path / "rank 1").read_text()
    assert f"Loading a checkpoint was given up: rank 1 {WORDS}" in text
    assert "Input/output error" in (tmp_path / "rank 0").read_text()
