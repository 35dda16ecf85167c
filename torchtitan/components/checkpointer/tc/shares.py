"""Decide which rank writes which shard, and leave out of a rank's payload what others write.

A shard that several ranks hold (replicas, what tensor-parallel ranks keep whole) is written by one of
them: the largest first, each by whoever has the least to write so far. All ranks decide the same, from
what all know. A plain tensor is its rank's own. Pure; what is decided stands in the metadata: the ranks
it names for a tensor are those that write it.

    exchange.py: metadata of all ranks -> share_out -> its ranks -> left_to_others -> without -> handover.py
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch_checkpointing.default_resharder import compute_local_shard_info
from torch_checkpointing.distributed_metadata import GlobalObjectMetadata, LocalMetadata
from torch_checkpointing.dtensor_metadata import DTensorShardingMetadata
from torch_checkpointing.types import NestedPath

from torchtitan.components.checkpointer.tensor_memory import local_part

Described = dict[str, dict[NestedPath, list[GlobalObjectMetadata]]]
"""Of each item and path, how the tensor is laid out and who writes it."""

Name = tuple[str, NestedPath]
"""(item, path)"""

_ENTRY_BYTES = 640
"""What a tensor takes in a file of torch.save besides its elements: measured, for short names."""

_SHARED = (dict, OrderedDict)
"""Mappings that can be made again with fewer entries. Others stay as they are: written more than once."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """Part of a tensor, or of several that are tied, that more than one rank could write."""

    size_bytes: int
    holders: tuple[int, ...]
    names: list[Name]


def share_out(
    described: Described,
    ties: Iterable[Collection[Name]],
    is_whole: Callable[[tuple[int, ...]], bool],
) -> Described:
    """``described`` with the ranks that write each tensor, where now all stand that could.

    Args:
        ties: names, within an item, for one and the same tensor; they are written by the same ranks.
        is_whole: whether the ranks of a mesh all hold the same of the tensors that lie on it. Nothing
            is left to others on a mesh of which that is not so.
    """
    first = _first_names(ties)
    loads: Counter[int] = Counter()
    writers: dict[Name, set[int]] = {}
    shared: dict[Any, _Shard] = {}
    layouts: dict[Any, list[tuple[int, tuple[int, ...]]]] = {}
    for item in sorted(described):
        for path in sorted(described[item], key=repr):
            (group,) = described[item][path]
            sharding = group.sharding_metadata
            # On each tie's first name its bytes count, and with any of them its writers.
            counts = first(item, path) == (item, path)
            if not isinstance(sharding, DTensorShardingMetadata) or not is_whole(
                sharding.mesh_spec.mesh_data
            ):
                writers[item, path] = set(group.ranks)
                continue
            alike = _layout(sharding)
            if alike not in layouts:
                layouts[alike] = _shards_of(sharding)
            element_bytes = getattr(torch, sharding.dtype.removeprefix("torch.")).itemsize
            chosen = writers[item, path] = set()
            for number, (num_elements, holders) in enumerate(layouts[alike]):
                size_bytes = num_elements * element_bytes + _ENTRY_BYTES
                if len(holders) == 1:
                    chosen.add(holders[0])
                    loads[holders[0]] += size_bytes if counts else _ENTRY_BYTES
                    continue
                key = (first(item, path), sharding.dtype, alike, number)
                shard = shared.setdefault(key, _Shard(size_bytes, holders, []))
                shard.names.append((item, path))
    for shard in sorted(
        shared.values(), key=lambda one: -one.size_bytes
    ):  # stable, so the same on all
        writer = min(shard.holders, key=lambda rank: (loads[rank], rank))
        loads[writer] += shard.size_bytes
        for name in shard.names:
            writers[name].add(writer)
    return {
        item: {
            path: [replace(groups[0], ranks=tuple(sorted(writers[item, path])))]
            for path, groups in paths.items()
        }
        for item, paths in described.items()
    }


def left_to_others(
    described: Described, local: LocalMetadata, rank: int
) -> dict[str, set[NestedPath]]:
    """By item, the tensors that ``rank`` has, as ``local`` says, and does not write."""
    return {
        item: {
            path
            for path in paths
            if not any(rank in group.ranks for group in described[item][path])
        }
        for item, paths in local.items()
    }


def without(payload: Mapping[str, Any], left: Mapping[str, Set[NestedPath]]) -> dict[str, Any]:
    """``payload`` without the tensors that are ``left`` to others; what is no tensor stays.

    An item of which nothing remains is gone, too, but for the last one: a save writes something.
    """
    kept = {key: _without(value, left.get(key, frozenset()), ()) for key, value in payload.items()}
    full = {key: value for key, value in kept.items() if value is not _GONE}
    if full or not kept:
        return full
    return {next(iter(kept)): {}}


def tied_in(item: str, tensors: Mapping[NestedPath, torch.Tensor]) -> list[list[Name]]:
    """The names in an item that stand for one and the same tensor, if it has more than one."""
    found: dict[Any, list[Name]] = {}
    for path, tensor in tensors.items():
        local = local_part(tensor)
        if local.numel() > 0:
            view = (local.data_ptr(), tuple(local.shape), local.stride(), local.dtype, local.device)
            found.setdefault(view, []).append((item, path))
    return [names for names in found.values() if len(names) > 1]


_GONE: Any = object()

_NOTHING = torch.empty(0)
"""Holds a place in a list. One for all, which takes the least in a file."""


# An optimizer has thousands of these.
_SURELY_STAYS = (float, bool, int, str, tuple, type(None))


def _without(tree: Any, left: Set[NestedPath], path: NestedPath) -> Any:
    if not left:
        return tree
    if isinstance(tree, torch.Tensor):
        return _GONE if path in left else tree
    if type(tree) in _SHARED:
        found = {
            key: value if type(value) in _SURELY_STAYS else _without(value, left, (*path, key))
            for key, value in tree.items()
        }
        if all(found[key] is value for key, value in tree.items()):
            return tree
        return type(tree)((k, v) for k, v in found.items() if v is not _GONE) or _GONE
    if type(tree) is list:
        # The places of the others tell which they are.
        found = [_without(value, left, (*path, place)) for place, value in enumerate(tree)]
        return [_NOTHING if value is _GONE else value for value in found]
    return tree


def _layout(sharding: DTensorShardingMetadata) -> Any:
    # Of plain values: the library's objects carry the hashes of the process that they come from.
    mesh = sharding.mesh_spec
    return sharding.global_shape, mesh.mesh_shape, mesh.mesh_data, repr(sharding.placements)


def _shards_of(sharding: DTensorShardingMetadata) -> list[tuple[int, tuple[int, ...]]]:
    """(number of elements, ranks that hold it) of each shard, as a reader will compute them."""
    holders: dict[Any, list[int]] = {}
    for rank in sorted(sharding.mesh_spec.mesh_data):
        holders.setdefault(compute_local_shard_info(sharding, rank), []).append(rank)
    return [(prod(shape), tuple(ranks)) for (shape, _), ranks in holders.items()]


def _first_names(ties: Iterable[Collection[Name]]) -> Callable[[str, NestedPath], Name]:
    """Gives the first name of the tensor of a name, whatever rank told of the ties."""
    known: dict[Name, Name] = {}

    def first(item: str, path: NestedPath) -> Name:
        name = (item, path)
        while name in known:
            name = known[name]
        return name

    for names in ties:
        one, *others = (first(*name) for name in names)
        for other in others:
            if (root := first(*other)) != first(*one):
                known[max(root, first(*one), key=repr)] = min(root, first(*one), key=repr)
    return first
