"""Everything the trainer needs to know about one flavor of one model.

A model package makes it in ``model_registry``; a recipe puts it into ``Trainer.Config.model_spec``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter


@dataclass
class ModelSpec:
    """One model, ready to be built, with the functions that fit it to a job."""

    name: str
    """Name of the model's package, such as "llama3"."""

    flavor: str
    """Key of the size within the package, such as "8B"."""

    model: BaseModel.Config
    """Description of the model itself."""

    parallelize_fn: Callable[..., Any]
    """Shards the built model, still on the meta device."""

    pipelining_fn: Callable[..., Any] | None
    """Cuts the model into pipeline stages; None if the model cannot be cut."""

    post_optimizer_build_fn: Callable[..., Any] | None
    """Called as ``fn(optimizers, model_parts, parallel_dims)`` once the optimizers exist; None for nothing."""

    state_dict_adapter: type[BaseStateDictAdapter] | None
    """Translates checkpoints from and to Hugging Face names; None if there is no such format."""

    def traverse(
        self, config_cls: type, *, recurse: bool = False, _prefix: str = ""
    ) -> Iterator[tuple[str, Any, Any, str | int | None]]:
        """Walk the configs inside ``model`` like ``Configurable.Config.traverse``."""
        prefix = f"{_prefix}.model" if _prefix else "model"
        for fqn, config, parent, name in self.model.traverse(
            config_cls, recurse=recurse, _prefix=prefix
        ):
            # A config that matches at its own root knows no parent; its holder is this spec.
            yield (fqn, config, self, "model") if parent is None else (fqn, config, parent, name)
