"""Who may attend to whom: earlier tokens of the same document, told from the positions alone.

A microbatch is k rows of ``row_length`` tokens laid end to end. Positions restart at 0 where a document
or a row begins. From them one mask is made for each batch and shared by all layers, in the form that the
kernel wants; its type tells a layer which kernel to run.

    positions -> attention_kernels.choose -> block_mask | varlen_metadata | dense_mask -> every layer

Shapes: T tokens of the microbatch, k rows, L tokens of a row.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    # Loads the compiler, a second that the command line and CPU runs need not pay.
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class DenseMask:
    """For scaled_dot_product_attention, which sees each row as one sample of a batch."""

    allowed: torch.Tensor
    """bool (k, 1, L, L): whether query token i of a row sees key token j of that row."""


@dataclass(frozen=True, slots=True)
class VarlenMetadata:
    """For varlen attention, which sees each document as a sequence of its own."""

    cu_seqlens: torch.Tensor
    """int32 (documents + 1,): first token of each document, then T."""

    max_seqlen: int
    """Length of the longest document in tokens."""


AttentionMask: TypeAlias = "DenseMask | VarlenMetadata | BlockMask"


def document_starts(positions_T: torch.Tensor) -> torch.Tensor:
    """For each token, the index of the first token of its document."""
    index = torch.arange(positions_T.numel(), device=positions_T.device)
    # The first token begins a document whatever its position says: there is nothing before it.
    return torch.where(positions_T == 0, index, 0).cummax(0).values


def get_causal_mask_mod() -> MaskMod:
    """A query sees itself and the keys before it."""

    def causal(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return q >= kv

    return causal


def get_document_mask_mod(positions: torch.Tensor) -> MaskMod:
    """A query sees the keys of its own document, later ones too."""
    document = (positions == 0).cumsum(0)

    def same_document(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        return document[q] == document[kv]

    return same_document


def get_efficient_causal_mask_mod_for_packed_document(positions: torch.Tensor) -> MaskMod:
    """Causal and same document with one look-up a query instead of two a pair."""
    starts = document_starts(positions)

    def causal_in_document(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        return (kv <= q) & (kv >= starts[q])

    return causal_in_document


def block_mask(positions_T: torch.Tensor) -> "BlockMask":
    """For flex attention: shape (1, 1, T, T)."""
    num_tokens = positions_T.numel()
    return _block_mask_maker(compiled=positions_T.device.type != "cpu")(
        get_efficient_causal_mask_mod_for_packed_document(positions_T),
        B=1,
        H=1,
        Q_LEN=num_tokens,
        KV_LEN=num_tokens,
        device=positions_T.device,
    )


@functools.cache
def _block_mask_maker(*, compiled: bool) -> Callable[..., "BlockMask"]:
    from torch.nn.attention.flex_attention import create_block_mask

    # Uncompiled it holds T x T entries; a CPU, where only tests come by, is quicker without a compiler.
    return torch.compile(create_block_mask) if compiled else create_block_mask


def varlen_metadata(positions_T: torch.Tensor) -> VarlenMetadata:
    starts = document_starts(positions_T).unique_consecutive()
    cu_seqlens = torch.cat((starts, starts.new_tensor([positions_T.numel()])))
    return VarlenMetadata(
        cu_seqlens=cu_seqlens.to(torch.int32), max_seqlen=int(cu_seqlens.diff().max())
    )


def dense_mask(positions_T: torch.Tensor, row_length: int) -> DenseMask:
    """One (L, L) mask for each row; tokens that are not whole rows of documents make a single row."""
    num_tokens = positions_T.numel()
    if num_tokens % row_length or bool(positions_T[::row_length].any()):
        row_length = num_tokens
    rows_kL = positions_T.view(-1, row_length)
    index_L = torch.arange(row_length, device=positions_T.device)
    starts_kL = torch.where(rows_kL == 0, index_L, 0).cummax(1).values
    causal_LL = index_L <= index_L.unsqueeze(1)
    return DenseMask(allowed=(causal_LL & (index_L >= starts_kL.unsqueeze(2))).unsqueeze(1))
