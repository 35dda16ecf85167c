"""Short ways to write the Configs of a decoder's parts.

Init functions are named: they appear in a model's Config and decide the weights of a fresh run.
"""

from functools import partial

import torch.nn as nn

from torchtitan.models.common.attention import (
    FlexAttention,
    GQAttention,
    InnerAttentionConfig,
    QKVLinear,
    VarlenAttention,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.fused_qkv import FusedQKVLinear
from torchtitan.models.common.layers import FeedForward, Linear, RMSNorm
from torchtitan.models.common.rope import RoPE
from torchtitan.protocols import ModelSpec
from torchtitan.protocols.module import ParamInit


def get_attention_config(backend: str) -> InnerAttentionConfig:
    """The inner attention of the back end's name; raises ``ValueError`` for one that does not exist."""
    if backend in ("flex", "flex_flash"):
        return FlexAttention.Config(backend=backend)
    if backend == "varlen":
        return VarlenAttention.Config()
    if backend == "sdpa":
        raise ValueError(
            "attention back end 'sdpa' is no choice for language models: by itself it would attend across "
            "documents. Use flex, flex_flash or varlen; where they cannot run, masked SDPA takes over."
        )
    raise ValueError(f"unknown attention back end {backend!r}: choose flex, flex_flash or varlen.")


def trunc_normal(std: float, *, cut: float | None = None) -> ParamInit:
    """``weight`` from a normal distribution cut at +-``cut``; None cuts at +-2, which never bites."""
    bounds = {} if cut is None else {"a": -cut, "b": cut}
    return {"weight": partial(nn.init.trunc_normal_, std=std, **bounds)}


def normal(std: float) -> ParamInit:
    """``weight`` from a normal distribution."""
    return {"weight": partial(nn.init.normal_, std=std)}


def make_norm_config(dim: int, *, eps: float = 1e-5) -> RMSNorm.Config:
    """A norm whose weights start at 1."""
    return RMSNorm.Config(normalized_shape=dim, eps=eps, param_init={"weight": nn.init.ones_})


def make_gqa_config(
    *,
    dim: int,
    n_heads: int,
    n_kv_heads: int,
    rope: RoPE.Config,
    inner_attention: InnerAttentionConfig,
    qkv_init: ParamInit,
    wo_init: ParamInit,
    head_dim: int | None = None,
    fuse_qkv: bool = False,
) -> GQAttention.Config:
    """Attention without biases; ``head_dim`` None divides ``dim`` among the query heads."""
    head_dim = dim // n_heads if head_dim is None else head_dim

    def projection(num_heads: int) -> Linear.Config:
        return Linear.Config(
            in_features=dim, out_features=num_heads * head_dim, param_init=qkv_init
        )

    qkv_linear: FusedQKVLinear.Config | QKVLinear.Config
    if fuse_qkv:
        qkv_linear = FusedQKVLinear.Config(
            head_dim=head_dim,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            wqkv=projection(n_heads + 2 * n_kv_heads),
        )
    else:
        qkv_linear = QKVLinear.Config(
            head_dim=head_dim, wq=projection(n_heads), wkv=projection(n_kv_heads)
        )
    return GQAttention.Config(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rope=rope,
        qkv_linear=qkv_linear,
        wo=Linear.Config(in_features=n_heads * head_dim, out_features=dim, param_init=wo_init),
        inner_attention=inner_attention,
    )


def make_ffn_config(
    *, dim: int, hidden_dim: int, w1_init: ParamInit, w2w3_init: ParamInit
) -> FeedForward.Config:
    """A gated block without biases."""
    return FeedForward.Config(
        w1=Linear.Config(in_features=dim, out_features=hidden_dim, param_init=w1_init),
        w2=Linear.Config(in_features=hidden_dim, out_features=dim, param_init=w2w3_init),
        w3=Linear.Config(in_features=dim, out_features=hidden_dim, param_init=w2w3_init),
    )


def decoder_vocab_size(model_spec: ModelSpec) -> int:
    """Number of token ids that the model of ``model_spec`` knows."""
    assert isinstance(model_spec.model, Decoder.Config), type(model_spec.model)
    return model_spec.model.vocab_size
