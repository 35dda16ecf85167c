"""Optimizers, their learning rates, and their state as checkpoints see it."""

from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer.optimizer import (
    default_adamw,
    OptimizersContainer,
    ParamGroupConfig,
)

__all__ = ["LRSchedulersContainer", "OptimizersContainer", "ParamGroupConfig", "default_adamw"]
