import os
import random
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor, DTensor, Partial, Shard
from torchtitan.config import CommConfig, DebugConfig
from torchtitan.distributed import utils
from torchtitan.distributed.parallel_dims import ParallelDims

from tests.ranks.pool import end_of_ranks, run_on_ranks

pytestmark = pytest.mark.ranks


def _dims(**degrees: int) -> ParallelDims:
    defaults = {"dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
    return ParallelDims(**{**defaults, **degrees}, world_size=dist.get_world_size())


def _reductions() -> list[float]:
    mesh = _dims().get_mesh("batch")
    x = torch.tensor(dist.get_rank() + 1, dtype=torch.int64)
    world = dist.group.WORLD
    return [
        utils.dist_sum(x, mesh),
        utils.dist_max(x, mesh),
        utils.dist_mean(x, mesh),
        utils.dist_sum(x, extra_pg=world),
        utils.dist_mean(x, mesh, world),
        float(utils.dist_sum_tensor(x, mesh)),
        float(x),
    ]


def _reductions_of_dtensors() -> tuple[float, list[str]]:
    mesh = _dims().get_mesh("fsdp")
    partial = DTensor.from_local(torch.tensor(1.5), mesh, [Partial()])
    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    messages = []
    for x, group in ((partial, dist.group.WORLD), (sharded, None)):
        try:
            utils.dist_sum(x, extra_pg=group)
        except ValueError as error:
            messages.append(str(error))
    return utils.dist_sum(partial), messages


def _draws(
    seed: int | None, degrees: dict[str, int], distinct: list[str]
) -> tuple[list[float], int, str]:
    torch.manual_seed(100 + dist.get_rank())  # ranks start out different
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    debug = DebugConfig(seed=seed)
    utils.set_determinism(_dims(**degrees), torch.device("cpu"), debug, distinct)
    numbers = [torch.rand(()).item(), random.random(), float(np.random.random())]
    return numbers, torch.initial_seed(), os.environ["PYTHONHASHSEED"]


def _wait_for_a_rank_that_never_comes() -> float:
    """Seconds until rank 0 gives up on the mesh's group, with 1 second allowed after the start."""
    utils.init_distributed(CommConfig(init_timeout_seconds=60))
    dims = _dims()
    group = dims.get_mesh("fsdp").get_group()
    dist.all_reduce(torch.ones(1), group=group)
    utils.set_pg_timeouts(timedelta(seconds=1), dims)
    store = utils.job_store()
    assert store is not None
    seconds = 0.0
    if dist.get_rank() == 0:
        started = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            assert "timed out" in str(error).lower(), error
        seconds = time.monotonic() - started
    _part_in_peace(store)
    return seconds


def _wait_for_a_slow_disk() -> str:
    """How a wait twice the usual timeout ends on rank 0, in a block that has patience and then outside."""
    utils.init_distributed(CommConfig(init_timeout_seconds=60))
    utils.set_pg_timeouts(timedelta(seconds=1), _dims())
    store = utils.job_store()
    assert store is not None
    with utils.patience(timedelta(seconds=30)):
        if dist.get_rank() == 1:
            # Being late is what this is about: the disk of this rank takes 2 seconds.
            time.sleep(2)
        dist.barrier()
    outcome = "no timeout"
    if dist.get_rank() == 0:
        try:
            dist.barrier()
        except RuntimeError as error:
            outcome = str(error).lower()
    _part_in_peace(store)
    return outcome


def _part_in_peace(store: dist.Store) -> None:
    """Rank 1 stays until rank 0 gave up, and rank 0, which hosts the store, until rank 1 heard of it."""
    if dist.get_rank() == 0:
        store.set("gave up", "")
        store.wait(["heard"])
    else:
        store.wait(["gave up"])
        store.set("heard", "")


def _alone_without_a_launcher() -> tuple[int, str, float, bool]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    world_size = utils.init_distributed(CommConfig())
    again = utils.init_distributed(CommConfig())
    total = torch.ones(1)
    dist.all_reduce(total, group=_dims().get_mesh("fsdp", include_singleton_axes=True).get_group())
    dist.destroy_process_group()
    return world_size, os.environ["WORLD_SIZE"], float(total), again == world_size


def _half_a_launcher() -> str:
    os.environ.pop("MASTER_PORT")
    try:
        utils.init_distributed(CommConfig())
    except ValueError as error:
        return str(error)
    return "started"


def test_reductions_over_a_mesh_and_a_further_group() -> None:
    assert run_on_ranks(2, _reductions) == [
        [3.0, 2.0, 1.5, 3.0, 1.5, 3.0, 1.0],
        [3.0, 2.0, 1.5, 3.0, 1.5, 3.0, 2.0],
    ]


def test_dtensors_are_unwrapped_when_they_hold_one_value_and_refused_otherwise() -> None:
    for total, (with_group, sharded) in run_on_ranks(2, _reductions_of_dtensors):
        assert total == 3.0
        assert "further process group" in with_group and "Shard(dim=0)" in sharded


@pytest.mark.parametrize("seed", [None, 7])
def test_seeds_are_equal_over_the_data_parallel_ranks(seed: int | None) -> None:
    answers = run_on_ranks(2, _draws, seed, {}, ["pp"])
    assert answers[0] == answers[1]
    assert answers[0][1] == (100 if seed is None else seed)
    assert answers[0][2] == str(answers[0][1])


def test_seeds_differ_along_the_axes_that_ask_for_it() -> None:
    answers = run_on_ranks(4, _draws, 2**64 - 1, {"pp": 2}, ["pp"])
    assert [seed for _, seed, _ in answers] == [2**64 - 1, 2**64 - 1, 0, 0]
    assert all(one != other for one, other in zip(answers[0][0], answers[2][0], strict=True))


def test_the_training_timeout_replaces_the_one_of_the_start() -> None:
    assert 0.5 < run_on_ranks(2, _wait_for_a_rank_that_never_comes, init=False)[0] < 10


def test_who_waits_for_disks_has_patience_and_only_there() -> None:
    assert "timed out" in run_on_ranks(2, _wait_for_a_slow_disk, init=False)[0]


def test_without_a_launcher_the_process_is_the_only_rank() -> None:
    assert run_on_ranks(1, _alone_without_a_launcher, init=False) == [(1, "1", 1.0, True)]


def test_a_launcher_s_variables_that_are_incomplete_are_named() -> None:
    for end in end_of_ranks(2, _half_a_launcher, init=False):
        assert "MASTER_PORT is not set" in end.value
