"""A small Llama at sizes that divide by no number of ranks, with parameters that are easy to lose."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.tensor_parallel import NoParallel
from torchtitan.models.llama3 import model_registry, parallelize_llama
from torchtitan.models.llama3.model import Flavor, Llama3Model
from torchtitan.protocols import ModelSpec, Module

# Over four ranks 6 rows leave one with none and 7 leave one with a single row.
WIDTH, HIDDEN, VOCABULARY = 6, 7, 2051
# The heads have to divide among the tensor-parallel ranks.
_HEADS = Flavor(dim=16, n_layers=1, n_heads=8, n_kv_heads=4, ffn_dim=HIDDEN, vocab_size=VOCABULARY)


class Rarities(Module):
    """Parameters that no forward pass uses: 7 rows, none at all, and one that is frozen."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.empty(7, 3))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.empty(5), requires_grad=False)

    def reset_parameters(self) -> None:
        for parameter in (self.unused, self.empty, self.frozen):
            nn.init.normal_(parameter)


class OddModel(Llama3Model):
    """Llama 3 with ``rarities``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.rarities = Rarities.Config().build()


def odd_spec() -> ModelSpec:
    """The model as a recipe would name it."""
    plain = _HEADS.build_config()
    config = OddModel.Config(
        **{field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    )
    config.dim = config.tok_embeddings.embedding_dim = config.lm_head.in_features = WIDTH
    config.norm.normalized_shape = WIDTH
    for block in config.layers:
        qkv: Any = block.attention.qkv_linear
        qkv.wqkv.in_features = block.attention.wo.out_features = WIDTH
        block.feed_forward.w1.in_features = block.feed_forward.w3.in_features = WIDTH
        block.feed_forward.w2.out_features = WIDTH
        block.attention_norm.normalized_shape = block.ffn_norm.normalized_shape = WIDTH
    return dataclasses.replace(model_registry("jargon"), model=config, parallelize_fn=_parallelize)


def _parallelize(model: OddModel, *, parallel_dims: ParallelDims, **options: Any) -> OddModel:
    if parallel_dims.tp_enabled:
        parallelize_module(model.rarities, parallel_dims.get_mesh("tp"), NoParallel())
    parallelize_llama(model, parallel_dims=parallel_dims, **options)
    return model
