"""Read parts of the tensors in one file of torch_checkpointing into tensors of this rank.

resharder.py -> read_into -> contents.contents_of, parts.read_parts
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch_checkpointing.default_resharder import _validate_source_slice_bounds
from torch_checkpointing.resharding import LoadPlan
from torch_checkpointing.storage.base_storage import ReadArgs, Storage
from torch_checkpointing.types import NestedPath

from torchtitan.components.checkpointer.contents import contents_of, named_tensors, StoredTensor
from torchtitan.components.checkpointer.parts import Part, read_parts


def read_into(
    targets: Mapping[NestedPath, torch.Tensor],
    planned: Iterable[tuple[NestedPath, LoadPlan]],
    path: Path,
    storage: Storage,
) -> bool:
    """Do what is ``planned`` for the file ``path``; False, and nothing is changed, if torch has to read it."""
    with storage.stream_read(path, ReadArgs(pre_read_full_file=False, direct_io=True)) as stream:
        tree = contents_of(stream)
        if tree is None:
            return False
        sources = dict(named_tensors(tree))
        parts = []
        for nested, plan in planned:
            source = sources.get(plan.src_fqn)
            if source is None:
                return False
            _validate_source_slice_bounds(source.size, plan)
            if all(plan.src_sizes):
                parts.append(_part(source, plan, targets[nested]))
        read_parts(stream, parts)
    return True


def _part(source: StoredTensor, plan: LoadPlan, target: torch.Tensor) -> Part:
    first = sum(at * step for at, step in zip(plan.src_offsets, source.stride, strict=True))
    place = tuple(slice(at, at + size) for at, size in zip(plan.offsets, plan.sizes, strict=True))
    return Part(
        source.begin_byte + first * source.dtype.itemsize, source, plan.src_sizes, target[place]
    )
