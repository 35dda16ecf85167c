"""Read parts of tensors from a file straight into their places.

A part that lies in the file as it lies in memory is read right there: no memory is taken for it and
nothing is copied. All parts of a file are read in the order in which they lie in it.

    contents.py (where tensors lie) -> tc/slices.py, dcp_reader.py -> read_parts
            -> CheckedFile.fill, or the file itself
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from torchtitan.components.checkpointer.contents import StoredTensor
from torchtitan.components.checkpointer.integrity.checked_file import CheckedFile

# How much may lie beside the tensors at once, of what cannot be read into its place.
_ASIDE_BYTES = 64 * 2**20


class Part(NamedTuple):
    """A block of a tensor, and where it is to go."""

    begin_byte: int
    """Where its first element lies in the file."""

    source: StoredTensor
    sizes: tuple[int, ...]
    """Its shape, none of which is 0."""

    target: torch.Tensor
    """Has that shape; need not be like it otherwise."""

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


def read_parts(stream: Any, parts: Iterable[Part]) -> None:
    """Read ``parts`` of the file that is open as ``stream``.

    Raises:
        CheckpointDamagedError: they are not what was saved; what is in the targets then, is not.
        EOFError, ValueError: the file ends before.
    """
    buffers: list[tuple[int, memoryview]] = []
    aside: list[tuple[Part, torch.Tensor]] = []
    aside_bytes = 0
    for part in sorted(parts, key=lambda it: it.begin_byte):
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
    aside: list[tuple[Part, torch.Tensor]],
) -> None:
    if isinstance(stream, CheckedFile):
        stream.fill(buffers)
    else:
        for place, buffer in buffers:
            _read_exactly(stream, place, buffer)
    for part, memory in aside:
        part.target.copy_(memory.as_strided(part.sizes, part.source.stride))


def _read_exactly(stream: Any, place: int, buffer: memoryview) -> None:
    stream.seek(place)
    done = 0
    while done < len(buffer):
        count = stream.readinto(buffer[done:])
        if not count:
            raise EOFError(f"it ends after {place + done} bytes, before {place + len(buffer)}")
        done += count
