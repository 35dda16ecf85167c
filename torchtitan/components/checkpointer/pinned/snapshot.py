"""Take a state dict apart: values are copied now, tensors get a place and are copied when told.

The state dict goes through pickle once. Everything but tensors is then a copy that nobody can change
any more; a tensor is replaced by its place in the arena. Containers, custom objects, state that grew
or shrank since the last save: pickle knows them all, so no layout is kept that could be out of date.

    take (trainer) -> payload, places, copies ...... restore (writer) -> state dict over the arena

A sharded tensor travels as this rank's part of it, with a description of which each manager makes what
it wants: the describe and the build that belong to it are given by the caller. Descriptions go through
a pickler of their own, so that a tensor in one (that of a device mesh) never lies in the arena, where
the next save would write over it.
"""

import io
import pickle
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpointer.pinned.arena import aligned, Arena
from torchtitan.components.checkpointer.tensor_memory import local_part

CanWait = Callable[[str, torch.Tensor], bool]
"""(top-level key, tensor) -> whether nothing but the optimizer's next step changes it."""

DescribeShard = Callable[[DTensor], Hashable]
"""What travels with this rank's part of a sharded tensor: can be pickled.

Called wherever a sharded tensor occurs in a state. Of equal ones the first travels, for all tensors that
they describe, and what descriptions share is still shared in the writer.
"""

BuildShard = Callable[[torch.Tensor, Any], torch.Tensor]
"""(this rank's part, its description) -> what stands for the sharded tensor in the writer."""

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Place(NamedTuple):
    """Where a tensor lies in the arena."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Snapshot:
    """A state dict, taken apart."""

    payload: bytes = b""
    size_bytes: int = 0
    """What the tensors take in the arena; the payload may follow there."""
    at_once: list[tuple[torch.Tensor, Place]] = field(default_factory=list)
    """Local tensors to copy before ``stage`` returns: the next forward pass may change them."""
    later: list[tuple[torch.Tensor, Place]] = field(default_factory=list)
    """Local tensors to copy before the optimizer's next step."""


def take(
    state_dict: Mapping[str, Any], can_wait: CanWait, describe_shard: DescribeShard
) -> Snapshot:
    """Take ``state_dict`` apart; copies no tensor yet.

    Raises:
        TypeError: it holds a kind of tensor, or an object, that cannot travel to the writer.
    """
    snapshot, stream = Snapshot(), io.BytesIO()
    shards = _Descriptions(describe_shard)
    extractor = _Extractor(stream, snapshot, can_wait, shards)
    for key, value in state_dict.items():
        extractor.key = key
        extractor.dump((key, value))
    head = pickle.dumps((shards.count, len(state_dict)))
    snapshot.payload = b"".join((head, shards.stream.getbuffer(), stream.getbuffer()))
    return snapshot


def restore(payload: bytes, arena: Arena, build_shard: BuildShard) -> dict[str, Any]:
    """The state dict again, its tensors being views of ``arena``; tied ones are one object."""
    stream = io.BytesIO(payload)
    num_shards, num_entries = pickle.load(stream)
    # One unpickler for all of them, which remembers what they share.
    descriptions = pickle.Unpickler(stream)
    shards = [descriptions.load() for _ in range(num_shards)]
    entries = _Restorer(stream, arena, shards, build_shard)
    return dict(entries.load() for _ in range(num_entries))


class _Pickler(pickle.Pickler):
    """Refuses what the process that writes cannot import."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.key = ""

    def reducer_override(self, obj: Any) -> Any:
        if getattr(obj, "__module__", None) == "__main__":
            raise TypeError(
                f"{self.key} holds {obj!r}, of the program that was started, which the process that "
                "writes does not have; move its class into a module."
            )
        return NotImplemented


class _Descriptions:
    """The descriptions of sharded tensors, each once: a model has thousands of tensors, and few kinds."""

    def __init__(self, describe: DescribeShard) -> None:
        self.stream = io.BytesIO()
        self._describe = describe
        self._pickler = _Pickler(self.stream)
        self._numbers: dict[Hashable, int] = {}
        # To find one takes long as well, if it has to be compared; these are kept, so that each is one.
        self._found: dict[int, tuple[Hashable, int]] = {}

    @property
    def count(self) -> int:
        return len(self._numbers)

    def number_of(self, tensor: DTensor, key: str) -> int:
        """The number of the description of ``tensor``, which lies below ``key``."""
        description = self._describe(tensor)
        if found := self._found.get(id(description)):
            return found[1]
        number = self._numbers.get(description)
        if number is None:
            self._pickler.key = key
            self._pickler.dump(description)
            number = self._numbers[description] = len(self._numbers)
        self._found[id(description)] = description, number
        return number


class _Extractor(_Pickler):
    def __init__(
        self, stream: io.BytesIO, snapshot: Snapshot, can_wait: CanWait, shards: _Descriptions
    ) -> None:
        super().__init__(stream)
        self._snapshot = snapshot
        self._can_wait = can_wait
        self._shards = shards
        # Sources stay alive in the snapshot, so an address is that of one memory.
        self._taken: dict[int, tuple[tuple[torch.Tensor, Place], ...]] = {}

    # And no persistent_id, which is called for each of thousands of plain values as well.
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return super().reducer_override(obj)
        local = local_part(obj)
        if type(local) not in _PLAIN_TYPES or local.layout is not torch.strided:
            raise TypeError(
                f"{self.key} holds a tensor of type {type(obj).__name__} ({local.layout}), which cannot be "
                "staged in shared memory; use --checkpoint.backend dcp with --checkpoint.async_mode async."
            )
        # Asked once: a tensor takes its time for each answer, and there are hundreds or thousands.
        shape, dtype = tuple(local.shape), local.dtype
        offset = self._offset_of(local, shape, dtype)
        shard = self._shards.number_of(obj, self.key) if isinstance(obj, DTensor) else None
        return _tensor_at, (offset, shape, dtype, shard)

    def _offset_of(self, local: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Where the elements of ``local`` are to lie, which are noted to be copied."""
        snapshot = self._snapshot
        offset = aligned(snapshot.size_bytes)
        if 0 in shape:
            return offset
        address = local.data_ptr()
        # By the address alone at first: nearly always nothing else begins there.
        for other, place in self._taken.get(address, ()):
            if _is_same_view(local, other):
                return place.offset  # tied weights are copied once
        taken = local, Place(offset, shape, dtype)
        snapshot.size_bytes = offset + local.nbytes
        waits = self._can_wait(self.key, local)
        (snapshot.later if waits else snapshot.at_once).append(taken)
        self._taken[address] = (*self._taken.get(address, ()), taken)
        return offset


def _is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both, which begin at one address, are the same elements read in the same way."""
    return (
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.device == other.device
        and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
    )


def _tensor_at(*place: Any) -> torch.Tensor:
    """Stands in a payload for the method of the ``_Restorer`` that reads it."""
    raise RuntimeError("a staged state is read by restore, and by no other unpickler")


class _Restorer(pickle.Unpickler):
    def __init__(
        self, stream: io.BytesIO, arena: Arena, shards: list[Any], build_shard: BuildShard
    ) -> None:
        super().__init__(stream)
        self._arena = arena
        self._shards = shards
        self._build_shard = build_shard
        # Tied tensors are one object, and the parts of tied shards one storage: a format that writes
        # a storage once, as torch.save does, then has it once.
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == (__name__, _tensor_at.__name__):
            return self._tensor_at
        return super().find_class(module_name, global_name)

    def _tensor_at(
        self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, shard: int | None
    ) -> torch.Tensor:
        if 0 in shape:
            return self._make(offset, shape, dtype, shard)  # may share an offset without being tied
        place = (offset, shape, dtype, shard)
        if place not in self._made:
            self._made[place] = self._make(*place)
        return self._made[place]

    def _make(
        self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, shard: int | None
    ) -> torch.Tensor:
        if shard is None:
            return self._arena.tensor(offset, shape, dtype)
        local = self._tensor_at(offset, shape, dtype, None)
        return self._build_shard(local, self._shards[shard])
