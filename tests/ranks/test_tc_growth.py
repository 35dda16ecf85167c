"""Many saves of many small tensors use up neither memory nor descriptors nor shared memory."""

import gc
import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.harness import usage
from benchmarks.harness.pairs import growth
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Replicate, Shard

from tests.ranks.pool import run_on_ranks
from tests.ranks.traps import Held
from tests.unit_tests.components.checkpointer.runs import build_run
from tests.unit_tests.components.checkpointer.ways import TC

NUM_SAVES, NUM_TENSORS, NUM_DESCRIPTORS = 50, 1500, 256
# What Python and the C library take and give back from one save to the next.
TOLERANCES = {"memory": 4 << 20, "shared": 1 << 20, "descriptors": 0}


@contextmanager
def few_descriptors(limit: int) -> Generator[None]:
    """In this process, and in those that it starts meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def small_tensors() -> dict[str, Any]:
    """A third of them in shards, a third held alike by all ranks, a third plain."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.arange(8.0)
    kinds = [[Shard(0)], [Replicate()], None]
    return {
        str(number): (
            values + number
            if (kind := kinds[number % 3]) is None
            else distribute_tensor(values + number, mesh, kind)
        )
        for number in range(NUM_TENSORS)
    }


def save_often(folder: Path) -> list[dict[str, int]]:
    """What this rank and its writer use after each save."""
    readings = []
    with few_descriptors(NUM_DESCRIPTORS):
        run = build_run(folder, interval=1, keep_latest_k=2, **TC.settings)
        run.manager.states["small"] = Held(small_tensors())
        for step in range(1, NUM_SAVES + 1):
            run.train(step)
            run.manager.maybe_wait_for_saving()
            gc.collect()
            usage.give_back_freed_memory()
            dist.barrier()
            now = usage.read()
            readings.append(
                {
                    "memory": now.total_bytes,
                    "shared": now.shared_bytes,
                    "descriptors": now.descriptors,
                }
            )
        run.manager.close()
    return readings


@pytest.mark.ranks
def test_fifty_saves_of_many_small_tensors_leave_nothing_behind(tmp_path: Path) -> None:
    for readings in run_on_ranks(2, save_often, tmp_path, timeout_seconds=240.0):
        settled = readings[5:]
        for name, tolerance in TOLERANCES.items():
            found = growth([reading[name] for reading in settled], tolerance)
            assert not found.grows, (name, found, [reading[name] for reading in settled])
        # Two processes, each of which may have no more.
        assert max(reading["descriptors"] for reading in readings) < 2 * NUM_DESCRIPTORS
