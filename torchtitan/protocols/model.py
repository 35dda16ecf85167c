"""What the trainer asks of any model, and of the description it is built from.

Trainer.Config.model_spec.model -> update_from_config -> build -> verify_module_protocol -> init_weights
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from torchtitan.config import Configurable
from torchtitan.protocols.module import Module


class BaseModel(Module):
    """A whole model: the root ``Module`` that the trainer builds, shards, fills and trains."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config, ABC):
        @abstractmethod
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Fit this description to the job's ``config``, in place, before the model is built.

            Raises ``ValueError`` when the two cannot go together.
            """

        @abstractmethod
        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters of the whole model, and FLOPs of forward and backward per token."""

    def init_weights(self, *, buffer_device: torch.device | str | None = None) -> None:
        """The trainer's name for ``init_states``."""
        self.init_states(buffer_device=buffer_device)

    def verify_module_protocol(self) -> None:
        """Raise ``RuntimeError`` naming every submodule that ``init_states`` could not fill."""
        foreign = sorted(
            f"{fqn} ({type(module).__name__})"
            for fqn, module in self.named_modules()
            if not isinstance(module, Module)
        )
        if foreign:
            raise RuntimeError(
                f"every submodule of {type(self).__name__} must be a torchtitan.protocols.Module, "
                f"these are not: {', '.join(foreign)}. Derive their classes from Module as well."
            )


def split_inputs(
    model: nn.Module, input_dict: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The tokens of a microbatch, and the keywords that ``model`` takes beside them.

    A model with ``get_attention_masks`` gets the masks made from the positions, once for all layers.
    """
    extra_kwargs: dict[str, Any] = dict(input_dict)
    tokens = extra_kwargs.pop("input")
    build_masks = getattr(model, "get_attention_masks", None)
    if "positions" in extra_kwargs and callable(build_masks):
        extra_kwargs["attention_masks"] = build_masks(extra_kwargs["positions"])
    return tokens, extra_kwargs


class ModelConfigConverter(Configurable, ABC):
    """A change to a model's Config, such as another kind of linear layer, made before it is built."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    @abstractmethod
    def convert(self, model_config: BaseModel.Config) -> None:
        """Change ``model_config`` in place."""
