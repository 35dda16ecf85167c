"""Which kernel runs a back end's attention on this device, and how each is called.

A recipe names a back end: flex, flex_flash or varlen. What runs depends on the device of the
batch: a CPU has no flex backward and no varlen kernel at all. There attention runs as dense
scaled_dot_product_attention under the same mask, correct but with memory that grows with the square
of the row, and one log line says so.

    back end + device -> choose -> the mask of the batch (masks.py) -> attend in every layer

Nothing of CUDA or Triton is touched before a batch is on such a device.
Shapes: T tokens of the microbatch, k rows, L tokens of a row, H heads, D elements of a head.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Literal, TYPE_CHECKING

import torch
import torch.nn.functional as F

from torchtitan.models.common.masks import DenseMask, VarlenMetadata
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    # Loads the compiler; see masks.py.
    from torch.nn.attention.flex_attention import BlockMask

Backend = Literal["flex", "flex_flash", "varlen"]
Kernel = Literal["flex", "flex_flash", "varlen", "dense"]

# What runs in a back end's place, best first.
_CHOICES: dict[Backend, tuple[Kernel, ...]] = {
    "flex": ("flex",),
    "flex_flash": ("flex_flash", "flex"),
    "varlen": ("varlen",),
}
_IN_WORDS: dict[Kernel, str] = {
    "flex": "flex attention",
    "dense": "dense scaled_dot_product_attention under the document mask "
    "(memory grows with the square of the context)",
}


@functools.cache
def choose(backend: Backend, device: torch.device) -> Kernel:
    """The best kernel that ``device`` can run for ``backend``; says so once if it is another."""
    runnable: list[Kernel] = [k for k in _CHOICES[backend] if _can_run(k, device)]
    kernel = runnable[0] if runnable else "dense"
    if kernel != backend:
        logger.info(
            f"Attention back end {backend!r} cannot run on {device.type}: using {_IN_WORDS[kernel]}."
        )
    return kernel


def _can_run(kernel: Kernel, device: torch.device) -> bool:
    """Ask ``device`` and the installed packages, never the name of a machine."""
    if device.type != "cuda":
        return kernel == "flex" and device.type == "xpu" and _has("triton")
    capability = torch.cuda.get_device_capability(device)
    if kernel == "flex":
        # Triton's own floor. Without Triton flex runs unfused and holds T x T scores.
        return capability >= (7, 0) and _has("triton")
    if kernel == "flex_flash":
        return capability >= (9, 0) and _has("triton") and _has("flash_attn.cute")
    # The flash kernels behind varlen attention need Ampere.
    return capability >= (8, 0)


def _has(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False


@functools.cache
def _compiled_flex_attention() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def attend_flex(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    mask: "BlockMask",
    backend: Backend,
) -> torch.Tensor:
    """Attention under a BlockMask over all T tokens as one sample."""
    flash = choose(backend, q_THD.device) == "flex_flash"
    out_1HTD = _compiled_flex_attention()(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q_THD, k_THD, v_THD)),
        block_mask=mask,
        enable_gqa=q_THD.shape[1] != k_THD.shape[1],
        kernel_options={"BACKEND": "FLASH"} if flash else None,
    )
    return out_1HTD.squeeze(0).transpose(0, 1)


def attend_varlen(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, mask: VarlenMetadata
) -> torch.Tensor:
    """Attention inside each document; raises ``ValueError`` for dtypes the kernel does not have."""
    from torch.nn.attention.varlen import varlen_attn

    if q_THD.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"varlen attention runs in bfloat16 or float16, got {q_THD.dtype}. Set "
            "training.mixed_precision_param to bfloat16 or use the flex back end."
        )
    out_THD = varlen_attn(
        q_THD,
        k_THD,
        v_THD,
        mask.cu_seqlens,
        mask.cu_seqlens,
        mask.max_seqlen,
        mask.max_seqlen,
        window_size=(-1, 0),  # all keys to the left, none to the right: causal
        enable_gqa=q_THD.shape[1] != k_THD.shape[1],
    )
    assert isinstance(out_THD, torch.Tensor)  # a pair only when more than the output is asked for
    return out_THD


def attend_dense(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, mask: DenseMask
) -> torch.Tensor:
    """Attention inside each row, for any device."""
    row_length = mask.allowed.shape[-1]
    q_kHLD, k_kHLD, v_kHLD = (
        x.unflatten(0, (-1, row_length)).transpose(1, 2) for x in (q_THD, k_THD, v_THD)
    )
    out_kHLD = F.scaled_dot_product_attention(
        q_kHLD,
        k_kHLD,
        v_kHLD,
        attn_mask=mask.allowed,
        enable_gqa=q_THD.shape[1] != k_THD.shape[1],
    )
    return out_kHLD.transpose(1, 2).flatten(0, 1)
