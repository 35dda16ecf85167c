"""How evenly the writing of real models is shared under HSDP, worked out without their bytes."""

from collections import Counter
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.harness.models import SIZES
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_checkpointing.default_resharder import compute_local_shard_info
from torch_checkpointing.distributed_metadata import GlobalObjectMetadata
from torch_checkpointing.dtensor_metadata import DTensorShardingMetadata
from torchtitan.components.checkpointer.tc.shares import Described, share_out
from torchtitan.models.llama3.model import Flavor, FLAVORS

from tests.ranks.pool import run_on_ranks

pytestmark = pytest.mark.ranks

MODELS = {
    "debugmodel": FLAVORS["debugmodel"],
    "50M": SIZES["50M"].flavor,
    "1B": FLAVORS["1B"],
}


def sharded_on_meta(flavor: Flavor) -> Any:
    """The model as two replicas of two shards, without memory."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model: Any = flavor.build_config().build()
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def bytes_by_rank(flavor: Flavor) -> tuple[dict[int, int], int]:
    """(what each rank writes of weights and both moments, what there is)."""
    parameters = dict(sharded_on_meta(flavor).named_parameters())
    described: Described = {"model": {}, "optimizer": {}}
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor)
        sharding = DTensorShardingMetadata.from_dtensor(parameter)
        group = [GlobalObjectMetadata(sharding, tuple(range(dist.get_world_size())))]
        described["model"][(name,)] = group
        for moment in ("exp_avg", "exp_avg_sq"):
            described["optimizer"][(f"state.{name}.{moment}",)] = group
    written: Counter[int] = Counter()
    for paths in share_out(described, [], lambda ranks: True).values():
        for (group,) in paths.values():
            for rank in group.ranks:
                assert isinstance(group.sharding_metadata, DTensorShardingMetadata)
                shape, _ = compute_local_shard_info(group.sharding_metadata, rank)
                written[rank] += 4 * prod(shape)
    total = 4 * 3 * sum(parameter.numel() for parameter in parameters.values())
    return dict(written), total


@pytest.mark.parametrize("name", list(MODELS))
def test_replicas_of_shards_share_the_writing_evenly_and_write_nothing_twice(name: str) -> None:
    by_rank = run_on_ranks(4, bytes_by_rank, MODELS[name], timeout_seconds=120.0)
    written, total = by_rank[0]
    assert all(found == by_rank[0] for found in by_rank)
    assert sum(written.values()) == total and len(written) == 4
    assert max(written.values()) / (total / 4) <= 1.1
