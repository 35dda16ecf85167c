"""A small model and a few steps of it, for the tests of the optimizer package."""

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def wrapped_model(seed: int = 0) -> nn.Sequential:
    """``small_model`` with activation checkpointing around its first layer."""
    model = small_model(seed)
    model[0] = checkpoint_wrapper(model[0])
    return model


def config_of(
    *groups: tuple[str, str, dict], implementation: Any = "for-loop", **kwargs
) -> OptimizersContainer.Config:
    """A config of (pattern, optimizer name, settings) groups."""
    return OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs=settings)
            for pattern, name, settings in groups
        ],
        implementation=implementation,
        **kwargs,
    )


def train(model: nn.Module, container: OptimizersContainer, steps: range) -> None:
    """Steps whose data depends on the number of the step alone."""
    for step in steps:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        container.step()
        container.zero_grad()


def bits(value: object) -> object:
    """``value`` in a form that equals only the same bits."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        return value.dtype, tuple(value.shape), plain.reshape(-1).view(torch.uint8).tolist()
    return type(value), value


def bits_of(state: dict[str, object]) -> dict[str, object]:
    return {key: bits(value) for key, value in state.items()}
