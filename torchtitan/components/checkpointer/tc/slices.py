"""Read parts of the tensors in one file into tensors of this rank.

A part that lies in the file as it lies in memory is read straight into its place: no memory is taken for
it and nothing is copied. All parts of a file are read in the order in which they lie there.

    resharder.py -> read_into -> contents.contents_of; CheckedFile.fill, or the file itself
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch_checkpointing.default_resharder import _read_exact, _validate_source_slice_bounds
from torch_checkpointing.resharding import LoadPlan
from torch_checkpointing.storage.base_storage import ReadArgs, Storage
from torch_checkpointing.types import NestedPath

from torchtitan.components.checkpointer.integrity.checked_file import CheckedFile
from torchtitan.components.checkpointer.tc.contents import contents_of, named_tensors, StoredTensor

# How much may lie beside the tensors at once, of what cannot be read into its place.
_ASIDE_BYTES = 64 * 2**20


class _Part(NamedTuple):
    begin_byte: int
    source: StoredTensor
    sizes: tuple[int, ...]
    target: torch.Tensor

    @property
    def num_elements(self) -> int:
        """From the first element in the file to the last."""
        return 1 + sum(
            (size - 1) * step for size, step in zip(self.sizes, self.source.stride, strict=True)
        )

    @property
    def is_alike(self) -> bool:
        """Whether it lies in memory as in the file."""
        target = self.target
        return (
            type(target) is torch.Tensor
            and target.device.type == "cpu"
            and target.dtype == self.source.dtype
            and target.is_contiguous()
            and not (target.is_conj() or target.is_neg())
            and target.numel() == self.num_elements
            and all(
                size == 1 or here == there
                for size, here, there in zip(
                    self.sizes, target.stride(), self.source.stride, strict=True
                )
            )
        )


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
        _read(stream, sorted(parts, key=lambda part: part.begin_byte))
    return True


def _part(source: StoredTensor, plan: LoadPlan, target: torch.Tensor) -> _Part:
    first = sum(at * step for at, step in zip(plan.src_offsets, source.stride, strict=True))
    place = tuple(slice(at, at + size) for at, size in zip(plan.offsets, plan.sizes, strict=True))
    return _Part(
        source.begin_byte + first * source.dtype.itemsize, source, plan.src_sizes, target[place]
    )


def _read(stream: Any, parts: list[_Part]) -> None:
    buffers: list[tuple[int, memoryview]] = []
    aside: list[tuple[_Part, torch.Tensor]] = []
    aside_bytes = 0
    for part in parts:
        if part.is_alike:
            memory = part.target.as_strided((part.num_elements,), (1,))
        else:
            memory = torch.empty(part.num_elements, dtype=part.source.dtype)
            aside.append((part, memory))
            aside_bytes += memory.nbytes
        buffers.append((part.begin_byte, memory.view(torch.uint8).numpy().data))
        if aside_bytes >= _ASIDE_BYTES:
            _fill(stream, buffers, aside)
            buffers, aside, aside_bytes = [], [], 0
    _fill(stream, buffers, aside)


def _fill(
    stream: Any,
    buffers: list[tuple[int, memoryview]],
    aside: list[tuple[_Part, torch.Tensor]],
) -> None:
    if isinstance(stream, CheckedFile):
        stream.fill(buffers)
    else:
        for place, buffer in buffers:
            _read_exact(stream, place, buffer)
    for part, memory in aside:
        part.target.copy_(memory.as_strided(part.sizes, part.source.stride))
