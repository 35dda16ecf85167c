"""The interfaces between the trainer, the checkpointer and the models."""

from torchtitan.config import Configurable
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter, StateDictAdapter

__all__ = [
    "BaseModel",
    "BaseStateDictAdapter",
    "Configurable",
    "ModelSpec",
    "Module",
    "StateDictAdapter",
]
