"""Llama 3: the common decoder with fused projections, and the size table of its flavors.

Flavor -> build_config -> Llama3Model.Config -> update_from_config -> Llama3Model (on meta)
"""

from dataclasses import dataclass

from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
    make_norm_config,
    normal,
    trunc_normal,
)
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.layers import Embedding, Linear
from torchtitan.models.common.rope import ComplexRoPE

MAX_CONTEXT_LENGTH = 131072
ROPE_THETA = 500000.0
INIT_STD = 0.02


class Llama3Model(Decoder):
    """Llama 3 of any size."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Flavor:
    """What tells one size of the model from another."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    tied: bool = False

    def build_config(self, *, attn_backend: str = "flex") -> Llama3Model.Config:
        """A fresh description of the model; raises ``ValueError`` for an unknown back end."""
        head_std = self.dim**-0.5
        return Llama3Model.Config(
            dim=self.dim,
            vocab_size=self.vocab_size,
            enable_weight_tying=self.tied,
            tok_embeddings=Embedding.Config(
                num_embeddings=self.vocab_size,
                embedding_dim=self.dim,
                param_init=normal(std=1.0),
            ),
            layers=[self._build_block(depth, attn_backend) for depth in range(self.n_layers)],
            norm=make_norm_config(self.dim),
            lm_head=Linear.Config(
                in_features=self.dim,
                out_features=self.vocab_size,
                param_init=trunc_normal(head_std, cut=3 * head_std),
            ),
        )

    def _build_block(self, depth: int, attn_backend: str) -> TransformerBlock.Config:
        inner = trunc_normal(INIT_STD)
        # Each block adds to the residual stream twice: this keeps the sum's scale about constant.
        outward = trunc_normal(INIT_STD / (2 * (depth + 1)) ** 0.5)
        return TransformerBlock.Config(
            attention=make_gqa_config(
                dim=self.dim,
                n_heads=self.n_heads,
                n_kv_heads=self.n_kv_heads,
                fuse_qkv=True,
                rope=ComplexRoPE.Config(
                    dim=self.dim // self.n_heads,
                    max_context_length=MAX_CONTEXT_LENGTH,
                    theta=ROPE_THETA,
                    scaling="llama",
                ),
                inner_attention=get_attention_config(attn_backend),
                qkv_init=inner,
                wo_init=outward,
            ),
            feed_forward=make_ffn_config(
                dim=self.dim, hidden_dim=self.ffn_dim, w1_init=inner, w2w3_init=outward
            ),
            attention_norm=make_norm_config(self.dim),
            ffn_norm=make_norm_config(self.dim),
        )


FLAVORS = {
    "debugmodel": Flavor(
        dim=256, n_layers=6, n_heads=16, n_kv_heads=16, ffn_dim=768, vocab_size=2048
    ),
    # Small enough to train on two CPU cores, with grouped heads like the large ones.
    "jargon": Flavor(dim=256, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=2048),
    "1B": Flavor(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=8192,
        vocab_size=128256,
        tied=True,
    ),
    "3B": Flavor(
        dim=3072,
        n_layers=28,
        n_heads=24,
        n_kv_heads=8,
        ffn_dim=8192,
        vocab_size=128256,
        tied=True,
    ),
    "8B": Flavor(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336, vocab_size=128256),
    "70B": Flavor(
        dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28672, vocab_size=128256
    ),
    "405B": Flavor(
        dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim=53248, vocab_size=128256
    ),
}
