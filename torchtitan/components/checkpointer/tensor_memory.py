"""Where the elements of tensors lie, and copies of them: what a save asks of each tensor of a model.

Training waits for most of it, once for each entry, so nothing here goes through autograd or asks for what a
tensor takes long to tell. A sharded tensor is looked at where this rank has its part.

    state.ModelWrapper -> sights_of, same_view, memories_of, copies_of
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

Name = TypeVar("Name")


def local_part(tensor: Any) -> torch.Tensor:
    """This rank's elements of ``tensor``, by reference and without a gradient history."""
    local = elements(tensor)
    # To detach what has none takes time for nothing, and a save does it for each tensor.
    return local.detach() if local.requires_grad else local


def elements(tensor: Any) -> torch.Tensor:
    """As ``local_part``, but it may have a history: to be looked at and not to be kept."""
    if not isinstance(tensor, DTensor):
        return tensor
    # to_local goes through autograd, which for hundreds of tensors makes a save noticeably longer.
    local = tensor._local_tensor
    return local if type(local) is torch.Tensor else tensor.to_local()


def _both_tensors(cached: Any, fresh: Any) -> bool:
    return isinstance(cached, torch.Tensor) and isinstance(fresh, torch.Tensor)


def _same_spec(cached: torch.Tensor, fresh: torch.Tensor) -> bool:
    ours, theirs = getattr(cached, "_spec", None), getattr(fresh, "_spec", None)
    return ours is theirs or ours == theirs


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    spec = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    local = elements(tensor)
    return (tensor.shape, local.shape, tensor.dtype, local.device, spec)


def place_of(tensor: Any) -> tuple[int, int]:
    """Where the elements begin: (address of the storage, offset in it)."""
    local = elements(tensor)
    return local.untyped_storage().data_ptr(), int(local.storage_offset())


def memories_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The addresses of the memories that ``tensors`` lie in; those without one, as sparse ones, are passed over."""
    return {place_of(each)[0] for each in tensors if each.layout is torch.strided}


def sight_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What differs between two looks at one tensor that do not see the same elements in the same way."""
    # Training waits for this, once for each entry.
    local = elements(tensor)
    spec = getattr(tensor, "_spec", None)
    return local.data_ptr(), local.shape, local.stride(), local.dtype, local.device, spec


def sights_of(entries: Mapping[str, torch.Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: sight_of(value) for name, value in entries.items()}


def tensors_in(entries: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}


def inside(sights: Mapping[str, tuple[Any, ...]], others: Iterable[torch.Tensor]) -> list[str]:
    """The names of those that begin in the memory of one of the ``others``."""
    memories = [elements(it).untyped_storage() for it in others if it.layout is torch.strided]
    ranges = [(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in memories]
    if not ranges:
        return []
    lowest, highest = min(begin for begin, _ in ranges), max(end for _, end in ranges)
    return [
        name
        for name, (address, *_) in sights.items()
        if lowest <= address < highest and any(begin <= address < end for begin, end in ranges)
    ]


def same_view(cached: Any, fresh: Any) -> bool:
    """Whether both look at the same elements of the same memory."""
    if not _both_tensors(cached, fresh):
        return False
    ours, theirs = elements(cached), elements(fresh)
    # The memory of the cached one cannot have become another's: it still holds it. Training waits for
    # this, once for each entry, so it asks for nothing that takes a tensor long to tell.
    return (
        ours.data_ptr() == theirs.data_ptr()
        and ours.shape == theirs.shape
        and ours.stride() == theirs.stride()
        and ours.dtype == theirs.dtype
        and ours.device == theirs.device
        and _same_spec(cached, fresh)
    )


def copies_of(
    tensors: Mapping[Name, torch.Tensor], earlier: Mapping[Name, torch.Tensor]
) -> dict[Name, torch.Tensor]:
    """Copies of ``tensors`` as they are now, in memory of ``earlier`` ones where that fits; tied ones stay so."""
    made: dict[tuple[Any, ...], torch.Tensor] = {}
    copies = {}
    for name, tensor in tensors.items():
        view = (place_of(tensor), layout_of(tensor), tensor.stride())
        if view not in made:
            place = earlier.get(name)
            is_free = not any(place is one for one in made.values())
            if place is not None and is_free and layout_of(place) == layout_of(tensor):
                local_part(place).copy_(local_part(tensor))
            else:
                place = tensor.detach().clone()
            made[view] = place
        copies[name] = made[view]
    return copies


def copy_of(value: Any) -> Any:
    """A copy of what is no tensor; of tensors in it without their history, with which they could have none."""
    return tree_map(
        lambda leaf: (
            leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
        ),
        value,
    )


def alike(cached: Any, fresh: Any) -> bool:
    """Whether the one may stand for the other, once it has its values."""
    return _both_tensors(cached, fresh) and layout_of(cached) == layout_of(fresh)
