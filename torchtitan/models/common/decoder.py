"""A decoder-only language model over one long vector of tokens.

Batches have no batch dimension: a microbatch is a vector of T tokens, rows of ``max_context_length``
laid end to end, each made of one or more documents. Positions say where documents begin; they alone
decide who may attend to whom.

    tokens (T,) -> tok_embeddings -> layers "0".."n-1" -> norm -> lm_head -> logits (T, vocab)

Shapes: T tokens of the microbatch, C width of the model, V size of the vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from torchtitan.config.violations import reject
from torchtitan.distributed.tensor_parallel import reaches_every_rank
from torchtitan.models.common.attention import (
    BaseAttention,
    build_attention_mask,
    FlexAttention,
    GQAttention,
)
from torchtitan.models.common.layers import Embedding, FeedForward, Linear, RMSNorm
from torchtitan.models.common.masks import AttentionMask, block_mask
from torchtitan.protocols import BaseModel, Module
from torchtitan.protocols.module import ModuleDict


class TransformerBlock(Module):
    """Attention and feed-forward, each behind a norm and added to what came in."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        attention: GQAttention.Config
        """Mixes tokens of a document."""

        feed_forward: FeedForward.Config
        """Transforms each token by itself."""

        attention_norm: RMSNorm.Config
        """In front of attention."""

        ffn_norm: RMSNorm.Config
        """In front of feed_forward."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        # This order is the order of the keys in a checkpoint.
        self.attention = config.attention.build()
        self.feed_forward = config.feed_forward.build()
        self.attention_norm = config.attention_norm.build()
        self.ffn_norm = config.ffn_norm.build()

    def forward(
        self, x_TC: torch.Tensor, positions_T: torch.Tensor, mask: AttentionMask
    ) -> torch.Tensor:
        x_TC = x_TC + self.attention(self.attention_norm(x_TC), positions_T, mask)
        return x_TC + self.feed_forward(self.ffn_norm(x_TC))


class Decoder(BaseModel):
    """Embedding, a stack of blocks, a norm and an output projection."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        dim: int
        """Width of the model: length of a token's vector between the layers."""

        vocab_size: int
        """Number of token ids."""

        tok_embeddings: Embedding.Config
        """From token ids to vectors."""

        layers: list[TransformerBlock.Config]
        """The blocks, first to last."""

        norm: RMSNorm.Config
        """In front of lm_head."""

        lm_head: Linear.Config
        """From vectors to logits."""

        enable_weight_tying: bool = False
        """Whether tok_embeddings and lm_head share one weight, which lm_head's param_init fills."""

        def __post_init__(self) -> None:
            if not self.layers:
                reject("a decoder needs at least one layer, got an empty list in model.layers")

        @property
        def first_attention(self) -> GQAttention.Config:
            return self.layers[0].attention

        @property
        def first_full_attention_backend(self) -> str:
            """Name of the back end of the first layer that sees whole documents: here, of any layer."""
            return self.first_attention.inner_attention.backend

        @property
        def first_feed_forward(self) -> FeedForward.Config:
            return self.layers[0].feed_forward

        @property
        def max_context_length(self) -> int:
            """Tokens of a row, which is as far as the rope caches reach."""
            return self.first_attention.rope.max_context_length

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Check the job's degrees against the heads; cut the rope caches to the job's context.

            Raises ``ValueError``; ``NotImplementedError`` for tied weights on separate pipeline stages.
            """
            self._check_degrees(config.parallelism)
            training = getattr(config, "training", None)
            if training is None:
                return
            _check_sequence_parallel(config.parallelism, training)
            asked, longest = training.max_context_length, self.max_context_length
            if asked > longest:
                raise ValueError(
                    f"training.max_context_length is {asked} tokens, but the model was made for at most "
                    f"{longest}. Lower it, or choose a flavor with a longer context."
                )
            for layer in self.layers:
                layer.attention.rope.max_context_length = asked

        def _check_degrees(self, parallelism: Any) -> None:
            if self.enable_weight_tying and _degree(parallelism, "pipeline") > 1:
                raise NotImplementedError(
                    "tok_embeddings and lm_head share one weight in this model, which pipeline stages "
                    "on different ranks cannot. Set parallelism.pipeline_parallel_degree to 1."
                )
            if _degree(parallelism, "context") > 1:
                backend = self.first_full_attention_backend
                if backend != "flex":
                    raise ValueError(
                        f"context parallelism needs the flex attention back end, the model has {backend}. "
                        "Choose flex or set parallelism.context_parallel_degree to 1."
                    )
            tensor = _degree(parallelism, "tensor")
            attention = self.first_attention
            uneven = [
                f"{name} ({heads})"
                for name, heads in (
                    ("n_heads", attention.n_heads),
                    ("n_kv_heads", attention.n_kv_heads),
                )
                if heads % tensor
            ]
            if uneven:
                raise ValueError(
                    f"parallelism.tensor_parallel_degree ({tensor}) must divide {' and '.join(uneven)}. "
                    "Choose a degree that divides the heads of the model."
                )
            too_short = [
                f"{name} ({length})"
                for name, length in (
                    ("vocab_size", self.vocab_size),
                    ("the hidden width of feed_forward", self.first_feed_forward.w1.out_features),
                )
                if not reaches_every_rank(length, tensor)
            ]
            if too_short:
                raise ValueError(
                    f"parallelism.tensor_parallel_degree ({tensor}) leaves some ranks no part of "
                    f"{' and '.join(too_short)}. Choose a lower degree."
                )

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """A tied weight counts once as a parameter, and as work because lm_head multiplies by it."""
            num_params = sum(param.numel() for param in model.parameters())
            multiplied = num_params
            if not self.enable_weight_tying:
                multiplied -= self.vocab_size * self.dim  # a look-up is no multiplication
            # 6 = (multiply + add) x (forward + twice that in backward). Attention multiplies by keys and
            # by values; the causal half is not subtracted.
            attention = sum(
                layer.attention.n_heads * 2 * layer.attention.head_dim for layer in self.layers
            )
            return num_params, 6 * multiplied + 6 * attention * seq_len

    # Set on the instance by a loss that applies lm_head itself, chunk by chunk.
    _skip_lm_head: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = config.tok_embeddings.build()
        self.layers = ModuleDict(
            {str(i): layer.build() for i, layer in enumerate(config.layers)},
        )
        self.norm = config.norm.build()
        self.lm_head = config.lm_head.build()
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let embedding and head share one parameter again, if the model ties them."""
        if self.config.enable_weight_tying:
            self.lm_head.weight = self.tok_embeddings.weight

    def init_states(self, *, buffer_device: torch.device | str | None = None) -> None:
        # to_empty gives each module a tensor of its own and so unties them.
        self.tie_weights()
        super().init_states(buffer_device=buffer_device)

    def get_attention_masks(self, positions: torch.Tensor) -> AttentionMask:
        """The mask that all layers share, for one microbatch; see ``build_attention_mask``."""
        attention = self.config.first_attention
        return build_attention_mask(
            attention.inner_attention, positions, self.config.max_context_length
        )

    def _create_flex_attention_mask_for_document(
        self, positions: torch.Tensor, attn_config: BaseAttention.Config
    ) -> Any:
        if not isinstance(attn_config.inner_attention, FlexAttention.Config):
            raise TypeError(
                "a BlockMask is of use to FlexAttention.Config alone, "
                f"got {type(attn_config.inner_attention).__qualname__}"
            )
        return block_mask(positions)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: "AttentionMask | None" = None,
    ) -> torch.Tensor:
        """Logits (T, V), or what goes into ``lm_head`` (T, C) when that is skipped.

        Under tensor parallelism logits are a DTensor of which each rank holds some token ids, and the
        gradients of hidden states are added up over the ranks.

        tokens: int64 (T,). positions: int64 (T,), 0 where a document or a row begins; None takes all
        tokens as one document. attention_masks: from ``get_attention_masks``, made here if None.
        """
        if positions is None:
            positions = self._positions_of_one_document(tokens)
        if attention_masks is None:
            attention_masks = self.get_attention_masks(positions)
        x_TC = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x_TC = layer(x_TC, positions, attention_masks)
        x_TC = self.norm(x_TC)
        return x_TC if self._skip_lm_head else self.lm_head(x_TC)

    def _positions_of_one_document(self, tokens: torch.Tensor) -> torch.Tensor:
        num_tokens, longest = tokens.numel(), self.config.max_context_length
        if num_tokens > longest:
            raise ValueError(
                f"{num_tokens} tokens without positions make one document, but the model reaches over "
                f"{longest}. Pass positions that restart at 0 at each document and row."
            )
        return torch.arange(num_tokens, device=tokens.device)


def _check_sequence_parallel(parallelism: Any, training: Any) -> None:
    tensor = _degree(parallelism, "tensor")
    num_tokens = training.num_tokens_per_microbatch_per_dp_rank
    if getattr(parallelism, "enable_sequence_parallel", False) and num_tokens % tensor:
        raise ValueError(
            f"sequence parallelism splits the {num_tokens} tokens of a microbatch over "
            f"{tensor} tensor-parallel ranks, which does not come out even. Make "
            "training.num_tokens_per_microbatch_per_dp_rank a multiple of "
            "parallelism.tensor_parallel_degree, or switch parallelism.enable_sequence_parallel off."
        )


def _degree(parallelism: Any, kind: str) -> int:
    """A degree of 1 where a caller's ``parallelism`` does not speak of that kind."""
    # Less than 1 is reported as a violation of that field, together with what is said here.
    return max(getattr(parallelism, f"{kind}_parallel_degree", 1), 1)
