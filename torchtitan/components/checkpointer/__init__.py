"""Checkpoints: everything that makes a run survive.

The manager for another backend is not imported here, so that its package is needed only when it
is used.
"""

from torchtitan.components.checkpointer.base import (
    BaseCheckpointManager,
    CheckpointStorage,
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    ModelWrapper,
    OPTIMIZER,
    TRAIN_STATE,
)
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager

__all__ = [
    "AsyncMode",
    "BaseCheckpointManager",
    "CheckpointManager",
    "CheckpointStorage",
    "DATALOADER",
    "LR_SCHEDULER",
    "MODEL",
    "ModelWrapper",
    "OPTIMIZER",
    "TRAIN_STATE",
]
