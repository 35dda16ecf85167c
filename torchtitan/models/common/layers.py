"""The plain layers of a decoder: torch's own, built from a Config, and the gated feed-forward block.

Nothing is added to torch's classes but the way they are built, so parameter names stay torch's.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from torchtitan.protocols import Module


class Linear(nn.Linear, Module):
    """``nn.Linear``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_features: int
        """Length of an input vector."""

        out_features: int
        """Length of an output vector."""

        bias: bool = False
        """Whether a learned vector is added to the output."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.in_features, config.out_features, bias=config.bias)


class Embedding(nn.Embedding, Module):
    """``nn.Embedding``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        num_embeddings: int
        """Number of token ids."""

        embedding_dim: int
        """Length of the vector of one token."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.num_embeddings, config.embedding_dim)


class RMSNorm(nn.RMSNorm, Module):
    """``nn.RMSNorm``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        normalized_shape: int
        """Length of the vectors that are scaled to a root mean square of 1."""

        eps: float = 1e-5
        """Added to the mean square, so that a vector of zeros stays finite."""

        elementwise_affine: bool = True
        """Whether each element is multiplied by a learned weight afterwards."""

    def __init__(self, config: Config) -> None:
        super().__init__(
            config.normalized_shape,
            eps=config.eps,
            elementwise_affine=config.elementwise_affine,
        )


class FeedForward(Module):
    """``w2(silu(w1 x) * w3 x)``: the gated block behind each attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        w1: Linear.Config
        """Gate projection, from the model's width to the hidden width."""

        w2: Linear.Config
        """Output projection, from the hidden width back."""

        w3: Linear.Config
        """Value projection, from the model's width to the hidden width."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        # This order is the order of the keys in a checkpoint.
        self.w1, self.w2, self.w3 = (part.build() for part in (config.w1, config.w2, config.w3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = F.silu(self.w1(x))
        return self.w2(gate * self.w3(x))


def compute_ffn_hidden_dim(
    dim: int, *, multiple_of: int = 1, ffn_dim_multiplier: float | None = None
) -> int:
    """Hidden width of a gated block with about the weights of a plain one of width ``4 * dim``."""
    hidden = int(8 * dim / 3)
    if ffn_dim_multiplier is not None:
        hidden = int(ffn_dim_multiplier * hidden)
    return -(-hidden // multiple_of) * multiple_of
