"""Parts that language models are made of."""

from torchtitan.models.common.attention import (
    BaseAttention,
    FlexAttention,
    GQAttention,
    QKVLinear,
    VarlenAttention,
)
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.fused_qkv import FusedQKVLinear
from torchtitan.models.common.layers import (
    compute_ffn_hidden_dim,
    Embedding,
    FeedForward,
    Linear,
    RMSNorm,
)
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE

__all__ = [
    "BaseAttention",
    "ComplexRoPE",
    "CosSinRoPE",
    "Decoder",
    "Embedding",
    "FeedForward",
    "FlexAttention",
    "FusedQKVLinear",
    "GQAttention",
    "Linear",
    "QKVLinear",
    "RMSNorm",
    "RoPE",
    "TransformerBlock",
    "VarlenAttention",
    "compute_ffn_hidden_dim",
]
