"""Embedding and cross entropy over a vocabulary that the tensor-parallel ranks share.

Each rank holds the rows of a range of token ids, in an embedding as in the output projection, and so the
logits of that range. What is sent is one number or vector a token, never the logits and never the gradient
of a whole table. Ranges may differ in length, but none is empty.

    tokens (T,) -> look_up -> ... decoder ... -> logits (T, V / ranks) -> cross_entropy_sum -> loss

Shapes: T tokens of the microbatch, C width of the model, V size of the whole vocabulary.
"""

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

__all__ = ["cross_entropy_sum", "look_up"]


def look_up(tokens_T: torch.Tensor, weight_VC: DTensor, output_layout: Placement) -> torch.Tensor:
    """The rows of ``tokens_T``, which every rank passes alike; this rank's share of them as ``output_layout``.

    Raises ``RuntimeError`` for a token that is not in the vocabulary.
    """
    _require_known(tokens_T, weight_VC.shape[0])
    first, num_own = _own_range(weight_VC, dim=0)
    index_T = tokens_T - first
    is_own_T = (index_T >= 0) & (index_T < num_own)
    rows_TC = F.embedding(index_T.where(is_own_T, 0), weight_VC.to_local())
    rows_TC = rows_TC.masked_fill(~is_own_T.unsqueeze(1), 0)
    partial_TC = DTensor.from_local(rows_TC, weight_VC.device_mesh, [Partial()], run_check=False)
    # A copy, because FSDP hangs a hook on what its units return and wants no view for that.
    return partial_TC.redistribute(placements=[output_layout]).to_local().clone()


def cross_entropy_sum(
    logits_TV: DTensor, labels_T: torch.Tensor, *, ignore_index: int
) -> torch.Tensor:
    """Sum of the cross entropies, in float32 and the same on all ranks; ``logits_TV`` is cut by its dimension 1.

    Raises ``RuntimeError`` for a label that is neither in the vocabulary nor ``ignore_index``.
    """
    num_ids = logits_TV.shape[1]
    is_counted_T = labels_T != ignore_index
    _require_known(labels_T.where(is_counted_T, 0), num_ids)
    first, _ = _own_range(logits_TV, dim=1)
    return _CrossEntropySum.apply(
        logits_TV.to_local().float(), labels_T - first, is_counted_T, logits_TV.device_mesh
    )


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        own_TV: torch.Tensor,
        index_T: torch.Tensor,
        is_counted_T: torch.Tensor,
        mesh: DeviceMesh,
    ) -> torch.Tensor:
        is_own_T = is_counted_T & (index_T >= 0) & (index_T < own_TV.shape[1])
        index_T1 = index_T.where(is_own_T, 0).unsqueeze(1)
        largest_T = _reduced(own_TV.amax(1), "max", mesh)
        shifted_TV = own_TV - largest_T.unsqueeze(1)
        wanted_T = shifted_TV.gather(1, index_T1).squeeze(1).where(is_own_T, 0)
        share_TV = shifted_TV.exp_()
        # Together, so that there is one message instead of two.
        total_T, wanted_T = _reduced(torch.stack((share_TV.sum(1), wanted_T)), "sum", mesh)
        share_TV.div_(total_T.unsqueeze(1))
        ctx.save_for_backward(share_TV, index_T1, is_own_T, is_counted_T)
        return (total_T.log() - wanted_T).where(is_counted_T, 0).sum()

    @staticmethod
    # torch declares it for any number of gradients; this function has one output.
    def backward(ctx: Any, grad_loss: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        share_TV, index_T1, is_own_T, is_counted_T = ctx.saved_tensors
        grad_TV = share_TV * (is_counted_T * grad_loss).unsqueeze(1)
        at_label_T1 = grad_TV.gather(1, index_T1) - (is_own_T * grad_loss).unsqueeze(1)
        grad_TV.scatter_(1, index_T1, at_label_T1)
        return grad_TV, None, None, None


def _own_range(tensor: DTensor, *, dim: int) -> tuple[int, int]:
    """First of this rank's token ids, and how many it has."""
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return offsets[dim], sizes[dim]


def _require_known(ids_T: torch.Tensor, num_ids: int) -> None:
    # A foreign id would be no rank's own and pass for a row of zeros. Checked on the device, so that
    # a GPU need not be waited for.
    torch._assert_async(
        ((ids_T >= 0) & (ids_T < num_ids)).all(),
        f"a token id is not among the {num_ids} of the vocabulary. Use the tokenizer that fits the model.",
    )


def _reduced(x: torch.Tensor, op: str, mesh: DeviceMesh) -> torch.Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x, op, mesh))
