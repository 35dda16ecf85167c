"""How many bytes a save takes, and what is said when there are fewer. Pure.

Tensors tell of themselves as a whole on every rank, so nobody has to be asked, and no object for its
state, which might take all ranks. What only an object knows shows in the size of the first save.

    room_check.py -> state_bytes (or the manifest of an earlier save) -> enough? -> refusal
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan.components.checkpointer.disk_trouble import mib
from torchtitan.components.checkpointer.state import MODEL, ModelWrapper, OPTIMIZER
from torchtitan.components.checkpointer.tensor_memory import local_part

# Measured on tiny checkpoints of both back ends, where nearly all is of this kind: settings of the
# optimizer and the entry in the index, the frame around the elements, random number generators.
_PER_TENSOR_BYTES = 6 * 1024
_PER_SHARD_BYTES = 1536
_PER_RANK_BYTES = 32 * 1024
# The manifest has a digest of 16 letters for each MiB.
_MIB_PER_MANIFEST_BYTE = 16


def state_bytes(
    states: Mapping[str, Any], *, world_size: int, export_dtype: torch.dtype | None = None
) -> int:
    """About the size of a checkpoint of ``states`` on all ranks together, seldom less.

    Args:
        export_dtype: of the floating-point weights, if nothing but the model is saved.
    """
    tensors = list(_tensors(states, model_only=export_dtype is not None))
    size = sum(_size_bytes(tensor, export_dtype) for tensor in tensors)
    if not size:
        return 0  # a state of some other kind, of which nothing is known
    frames = len(tensors) * (_PER_TENSOR_BYTES + _PER_SHARD_BYTES * world_size)
    manifest = size // 2**20 * _MIB_PER_MANIFEST_BYTE
    return size + frames + manifest + _PER_RANK_BYTES * world_size


def _tensors(states: Mapping[str, Any], *, model_only: bool) -> Iterator[torch.Tensor]:
    """What is saved of tensors, tied ones once: a back end may write them once."""
    model = states.get(MODEL)
    found: list[Any] = [model.cached_state_dict if isinstance(model, ModelWrapper) else None]
    if not model_only:
        optimizers = states.get(OPTIMIZER)
        inner = optimizers if isinstance(optimizers, Iterable) else [optimizers]
        found += [list(state.values()) for each in inner if (state := _state_of(each))]
        found += [it for key, it in states.items() if key not in (MODEL, OPTIMIZER)]
    seen = set()
    for tensor in (each for tree in found for each in _leaves(tree)):
        if tensor.layout is not torch.strided:
            continue  # it has fewer elements than its shape says
        view = (_address(tensor), tuple(tensor.shape), tensor.dtype)
        if view[0] is None or view not in seen:
            yield tensor
        seen.add(view)


def _address(tensor: torch.Tensor) -> int | None:
    try:
        return local_part(tensor).data_ptr() or None  # a shard without elements lies nowhere
    except RuntimeError:  # of classes that somebody has made
        return None


def _state_of(optimizer: Any) -> Mapping[Any, Any]:
    state = getattr(optimizer, "state", None)
    return state if isinstance(state, Mapping) else {}


def _leaves(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(each)


def _size_bytes(tensor: torch.Tensor, export_dtype: torch.dtype | None) -> int:
    dtype = tensor.dtype
    if export_dtype is not None and dtype.is_floating_point:
        dtype = export_dtype
    return tensor.numel() * dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A checkpoint that takes room now."""

    name: str
    size_bytes: int
    why: str = ""
    """What keeps it, if it is not that it is among the newest."""


def refusal(
    asked: str, folder: str, *, needed: int, free: int, older: Iterable[Kept], superseded: int
) -> str:
    """Why the save that was ``asked`` for is not begun, and what would make room for it.

    Args:
        older: all checkpoints but the newest, oldest first.
        superseded: bytes of what this run does not build on.
    """
    by_reason: dict[str, list[Kept]] = {}
    for each in older:
        by_reason.setdefault(each.why, []).append(each)
    ways = []
    if expiring := by_reason.pop("", []):
        ways.append(f"--checkpoint.keep_latest_k 2 would free {_sum(expiring)}")
    if superseded:
        ways.append(f"{folder}/superseded holds {mib(superseded)}, which nothing deletes by itself")
    ways += [f"{why} keeps {_sum(kept)}" for why, kept in sorted(by_reason.items())]
    what_then = "; ".join(ways) or "no other checkpoint in it could go"
    return (
        f"{asked} was not begun: it takes {mib(needed)}, and the disk of {folder} has {mib(free)} free, "
        f"{mib(needed - free)} too few. {what_then[0].upper()}{what_then[1:]}. Free some, or name another "
        "disk by --checkpoint.folder. Nothing was written, and older checkpoints are untouched."
    )


def _sum(kept: list[Kept]) -> str:
    names = ", ".join(each.name for each in kept)
    return f"{mib(sum(each.size_bytes for each in kept))} ({names})"
