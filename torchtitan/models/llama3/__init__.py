"""Llama 3 and its flavors, from a model for tests up to 405B."""

from collections.abc import Callable, Sequence

from torchtitan.models.llama3.model import FLAVORS, Llama3Model
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols import ModelSpec
from torchtitan.protocols.model import ModelConfigConverter

__all__ = [
    "Llama3Model",
    "Llama3StateDictAdapter",
    "llama3_configs",
    "model_registry",
    "parallelize_llama",
]

llama3_configs: dict[str, Callable[..., Llama3Model.Config]] = {
    name: flavor.build_config for name, flavor in FLAVORS.items()
}


def model_registry(
    flavor: str,
    attn_backend: str = "flex",
    converters: Sequence[ModelConfigConverter.Config] | None = None,
) -> ModelSpec:
    """A fresh spec of ``flavor``, changed by each of ``converters`` in turn.

    Raises ``ValueError`` for an unknown flavor or attention back end.
    """
    if flavor not in llama3_configs:
        raise ValueError(
            f"llama3 has no flavor {flavor!r}: choose one of {', '.join(sorted(llama3_configs))}."
        )
    model = llama3_configs[flavor](attn_backend=attn_backend)
    for converter in converters or ():
        converter.build().convert(model)
    return ModelSpec(
        name="llama3",
        flavor=flavor,
        model=model,
        parallelize_fn=parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=Llama3StateDictAdapter,
    )
