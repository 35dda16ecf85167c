"""Leave out of a file what no tensor in it shows.

torch.save writes all of the memory that a tensor lies in: a row of a large table takes as much as
the table, and a shard that FSDP has padded takes its padding. Staging copies just the tensors. A save
that training waits for has no staging, so such tensors are copied before their file is written; all
others stay where they are.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpointer.tc.leaves import leaves

_View = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]
"""(address of the memory, offset in it, shape, strides, dtype)"""


def compact(tree: Any) -> Any:
    """``tree``, one item of a save, with copies of the tensors that lie in more memory than they need.

    Tied tensors and views of the same memory are still so where that makes the file smaller.
    """
    sizes: dict[int, int] = {}
    shown: defaultdict[int, dict[_View, int]] = defaultdict(dict)
    for _, leaf in leaves(tree):
        if _lies_in_memory(leaf):
            local = _local(leaf)
            view = _view(local)
            sizes[view[0]] = local.untyped_storage().nbytes()
            shown[view[0]][view] = local.numel() * local.element_size()
    # Views that overlap may need more than all of their memory.
    wasteful = {address for address, size in sizes.items() if sum(shown[address].values()) < size}
    copies: dict[_View, torch.Tensor] = {}

    def copied(leaf: torch.Tensor) -> torch.Tensor:
        local = _local(leaf)
        view = _view(local)
        if view[0] not in wasteful:
            return leaf
        if view not in copies:
            # Not on a device: it would be copied from there once more to be written.
            copies[view] = torch.empty(local.shape, dtype=local.dtype).copy_(local)
        if isinstance(leaf, DTensor):
            return DTensor(copies[view], leaf._spec, requires_grad=False)
        return copies[view]

    return _mapped(tree, copied) if wasteful else tree


def _mapped(tree: Any, change: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_mapped(value, change) for value in tree]
    return change(tree) if _lies_in_memory(tree) else tree


def _lies_in_memory(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor):
        return False
    local = _local(leaf)
    return local.layout is torch.strided and local.untyped_storage().nbytes() > 0


def _local(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole


def _view(local: torch.Tensor) -> _View:
    address = local.untyped_storage().data_ptr()
    return address, int(local.storage_offset()), tuple(local.shape), local.stride(), local.dtype
