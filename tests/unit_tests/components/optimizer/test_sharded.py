"""The optimizer on FSDP's sharded parameters."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer

from tests.ranks.pool import run_on_ranks
from tests.unit_tests.components.optimizer.small import config_of, small_model

pytestmark = pytest.mark.ranks


def sharded(implementation: str, seed: int) -> tuple[nn.Module, OptimizersContainer]:
    model = small_model(seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    config = config_of((".*", "AdamW", {"lr": 0.1}), implementation=implementation)
    return model, config.build(model_parts=[model])


def steps(model: nn.Module, container: OptimizersContainer, numbers: range) -> None:
    for number in numbers:
        # The same data on both ranks: the mean of their gradients is the gradient of one.
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        model(x).square().sum().backward()
        container.step()
        container.zero_grad()


def whole(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


def resume_on_shards(implementation: str) -> tuple[bool, set[str], dict[str, Any]]:
    model, container = sharded(implementation, seed=0)
    steps(model, container, range(3))
    saved = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in container.state_dict().items()
    }
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    steps(model, container, range(3, 5))

    other, resumed = sharded(implementation, seed=1)
    other.load_state_dict(weights)
    resumed.load_state_dict(saved)
    steps(other, resumed, range(3, 5))
    found, expected = whole(other.state_dict()), whole(model.state_dict())
    found |= whole(resumed.state_dict())
    expected |= whole(container.state_dict())
    same = found.keys() == expected.keys() and all(
        torch.equal(v, found[k]) if isinstance(v, torch.Tensor) else v == found[k]
        for k, v in expected.items()
    )
    kinds = {type(v).__name__ for k, v in container.state_dict().items() if k.endswith("exp_avg")}
    return same, kinds, whole(model.state_dict())


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_resumed_run_on_shards_has_the_bits_of_the_uninterrupted_one(implementation: str) -> None:
    for same, kinds, weights in run_on_ranks(2, resume_on_shards, implementation):
        assert same and kinds == {"DTensor"}
        alone = small_model()
        container = config_of((".*", "AdamW", {"lr": 0.1})).build(model_parts=[alone])
        steps(alone, container, range(5))
        torch.testing.assert_close(weights, dict(alone.state_dict()), rtol=1e-4, atol=1e-5)
