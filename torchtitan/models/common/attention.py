"""Grouped-query attention: project, turn by position, attend inside documents, project back.

    x (T, dim) -> qkv_linear -> (q_norm, k_norm) -> rope -> inner_attention -> wo -> (T, dim)

The inner attention names a back end; the mask of the batch says which kernel was chosen for it.
Shapes: T tokens of the microbatch, H heads, D elements of a head, C width of the model.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from torchtitan.config.violations import reject
from torchtitan.models.common import attention_kernels
from torchtitan.models.common.fused_qkv import FusedQKVLinear
from torchtitan.models.common.layers import Linear, RMSNorm
from torchtitan.models.common.masks import (
    AttentionMask,
    block_mask,
    dense_mask,
    DenseMask,
    varlen_metadata,
    VarlenMetadata,
)
from torchtitan.models.common.rope import RoPE
from torchtitan.protocols import Module


class FlexAttention(Module):
    """Attention by torch's flex attention, which skips blocks that no query may see."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        backend: Literal["flex", "flex_flash"] = "flex"
        """flex: Triton kernels. flex_flash: FlashAttention's kernels, which need a Hopper GPU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        mask: AttentionMask,
    ) -> torch.Tensor:
        if isinstance(mask, DenseMask):
            return attention_kernels.attend_dense(q_THD, k_THD, v_THD, mask)
        assert not isinstance(mask, VarlenMetadata)
        return attention_kernels.attend_flex(q_THD, k_THD, v_THD, mask, self.config.backend)


class VarlenAttention(Module):
    """Attention by torch's varlen kernels, which see each document as a sequence of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        @property
        def backend(self) -> Literal["varlen"]:
            return "varlen"

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        mask: AttentionMask,
    ) -> torch.Tensor:
        if isinstance(mask, DenseMask):
            return attention_kernels.attend_dense(q_THD, k_THD, v_THD, mask)
        assert isinstance(mask, VarlenMetadata)
        return attention_kernels.attend_varlen(q_THD, k_THD, v_THD, mask)


InnerAttentionConfig = FlexAttention.Config | VarlenAttention.Config


def build_attention_mask(
    config: InnerAttentionConfig, positions_T: torch.Tensor, row_length: int
) -> AttentionMask:
    """The mask of one batch, in the form that the kernel chosen for its device wants.

    Raises ``TypeError`` for an inner attention that has no mask over documents.
    """
    if not isinstance(config, FlexAttention.Config | VarlenAttention.Config):
        raise TypeError(
            f"no document mask for {type(config).__qualname__}: "
            "inner_attention must be FlexAttention.Config or VarlenAttention.Config"
        )
    kernel = attention_kernels.choose(config.backend, positions_T.device)
    if kernel == "dense":
        return dense_mask(positions_T, row_length)
    if kernel == "varlen":
        return varlen_metadata(positions_T)
    return block_mask(positions_T)


class QKVLinear(Module):
    """Queries, keys and values from three matrices."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        head_dim: int
        """Elements of one head."""

        wq: Linear.Config
        """Projection to the query heads."""

        wkv: Linear.Config
        """Projection to the key heads, and once more to the value heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = config.wq.build()
        self.wk = config.wkv.build()
        self.wv = config.wkv.build()

    def forward(self, x_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (T, n_heads, head_dim), keys and values (T, n_kv_heads, head_dim)."""
        q, k, v = (
            linear(x_TC).unflatten(1, (-1, self.head_dim)) for linear in (self.wq, self.wk, self.wv)
        )
        return q, k, v


class BaseAttention(Module):
    """What a decoder may ask of the attention of any of its layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        n_heads: int
        """Query heads."""

        inner_attention: InnerAttentionConfig
        """Back end that attends, once queries, keys and values are there."""


class GQAttention(BaseAttention):
    """Attention whose key-value heads are each shared by a group of query heads."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseAttention.Config):
        n_kv_heads: int
        """Key heads, and value heads; divides n_heads."""

        head_dim: int
        """Elements of one head."""

        rope: RoPE.Config
        """Rotary embedding of queries and keys."""

        qkv_linear: FusedQKVLinear.Config | QKVLinear.Config
        """Projections to queries, keys and values."""

        wo: Linear.Config
        """Projection of all heads back to the width of the model."""

        q_norm: RMSNorm.Config | None = None
        """Norm of each query head before it is turned; None for none."""

        k_norm: RMSNorm.Config | None = None
        """Norm of each key head before it is turned; None for none."""

        def __post_init__(self) -> None:
            if self.n_heads % self.n_kv_heads:
                reject(
                    f"n_heads must be a multiple of n_kv_heads, got {self.n_heads} and {self.n_kv_heads}"
                )

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.rope = config.rope.build()
        self.qkv_linear = config.qkv_linear.build()
        self.wo = config.wo.build()
        self.inner_attention = config.inner_attention.build()
        self.q_norm = config.q_norm.build() if config.q_norm else None
        self.k_norm = config.k_norm.build() if config.k_norm else None

    def forward(
        self, x_TC: torch.Tensor, positions_T: torch.Tensor, mask: AttentionMask
    ) -> torch.Tensor:
        q_THD, k_THD, v_THD = self.qkv_linear(x_TC)
        if self.q_norm is not None:
            q_THD = self.q_norm(q_THD)
        if self.k_norm is not None:
            k_THD = self.k_norm(k_THD)
        q_THD, k_THD = self.rope(q_THD, k_THD, positions_T)
        return self.wo(self.inner_attention(q_THD, k_THD, v_THD, mask).flatten(1))
