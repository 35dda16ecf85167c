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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpointer.pinned.arena import aligned, Arena
from torchtitan.components.checkpointer.state import local_part

CanWait = Callable[[str, torch.Tensor], bool]
"""(top-level key, tensor) -> whether nothing but the optimizer's next step changes it."""

DescribeShard = Callable[[DTensor], Any]
"""What travels with this rank's part of a sharded tensor: can be pickled and compared with ==.

Called wherever the tensor occurs in a state. What descriptions share is still shared in the writer.
"""

BuildShard = Callable[[torch.Tensor, Any], torch.Tensor]
"""(this rank's part, its description) -> what stands for the sharded tensor in the writer."""

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Place(NamedTuple):
    """Where a tensor lies in the arena."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: int | None
    """The number of the description of a sharded tensor; None for a plain one."""


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
    """The descriptions of sharded tensors, each once."""

    def __init__(self, describe: DescribeShard) -> None:
        self.stream = io.BytesIO()
        self.count = 0
        self._describe = describe
        self._pickler = _Pickler(self.stream)
        self._at: dict[Place, list[tuple[int, Any]]] = {}

    def number_of(self, tensor: DTensor, place: Place, key: str) -> int:
        """The number of the description of ``tensor``, whose local part lies at ``place``."""
        description = self._describe(tensor)
        known = self._at.setdefault(place, [])
        for number, other in known:
            if description == other:
                return number  # a tied tensor, which is to come back as one
        self._pickler.key = key
        self._pickler.dump(description)
        known.append((self.count, description))
        self.count += 1
        return known[-1][0]


class _Extractor(_Pickler):
    def __init__(
        self, stream: io.BytesIO, snapshot: Snapshot, can_wait: CanWait, shards: _Descriptions
    ) -> None:
        super().__init__(stream)
        self._snapshot = snapshot
        self._can_wait = can_wait
        self._shards = shards
        # Sources stay alive in the snapshot, so an address means one tensor.
        self._places: dict[tuple[Any, ...], Place] = {}

    def persistent_id(self, obj: Any) -> Place | None:
        if not isinstance(obj, torch.Tensor):
            return None
        local = local_part(obj)
        if type(local) not in _PLAIN_TYPES or local.layout is not torch.strided:
            raise TypeError(
                f"{self.key} holds a tensor of type {type(obj).__name__} ({local.layout}), which cannot be "
                "staged in shared memory; use --checkpoint.backend dcp with --checkpoint.async_mode async."
            )
        place = self._place(local)
        if isinstance(obj, DTensor):
            place = place._replace(shard=self._shards.number_of(obj, place, self.key))
        return place

    def _place(self, local: torch.Tensor) -> Place:
        shape = tuple(local.shape)
        reading = (local.dtype, local.is_conj(), local.is_neg())
        identity = (local.data_ptr(), shape, local.stride(), reading, local.device)
        if local.numel() > 0 and identity in self._places:
            return self._places[identity]  # tied weights are copied once
        snapshot = self._snapshot
        place = Place(aligned(snapshot.size_bytes), shape, local.dtype, None)
        snapshot.size_bytes = place.offset + local.numel() * local.element_size()
        if local.numel() > 0:
            self._places[identity] = place
            waits = self._can_wait(self.key, local)
            (snapshot.later if waits else snapshot.at_once).append((local, place))
        return place


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
        self._made: dict[Place, torch.Tensor] = {}

    def persistent_load(self, pid: Place) -> torch.Tensor:
        if 0 in pid.shape:
            return self._make(pid)  # empty ones may share an offset without being tied
        if pid not in self._made:
            self._made[pid] = self._make(pid)
        return self._made[pid]

    def _make(self, place: Place) -> torch.Tensor:
        if place.shard is None:
            return self._arena.tensor(place.offset, place.shape, place.dtype)
        local = self.persistent_load(place._replace(shard=None))
        return self._build_shard(local, self._shards[place.shard])
