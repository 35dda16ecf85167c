"""Take a state dict apart: values are copied now, tensors get a place and are copied when told.

The state dict goes through pickle once. Everything but tensors is then a copy that nobody can change
any more; a tensor is replaced by its place in the arena. Containers, custom objects, state that grew
or shrank since the last save: pickle knows them all, so no layout is kept that could be out of date.

    take (trainer) -> payload, places, copies ...... restore (writer) -> state dict over the arena

A sharded tensor travels as this rank's shard with the write items that DTensor itself made for it in
the trainer: device meshes, and the process groups in them, stay where they are.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpointer.pinned.arena import aligned, Arena

CanWait = Callable[[str, torch.Tensor], bool]
"""(top-level key, tensor) -> whether nothing but the optimizer's next step changes it."""

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Place(NamedTuple):
    """Where a tensor lies in the arena."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    items: list[WriteItem] | None
    """What DCP is to write of a sharded tensor, still without a name; None for a whole one."""


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


def take(state_dict: Mapping[str, Any], can_wait: CanWait) -> Snapshot:
    """Take ``state_dict`` apart; copies no tensor yet.

    Raises:
        TypeError: it holds a kind of tensor, or an object, that cannot travel to the writer.
    """
    snapshot, stream = Snapshot(), io.BytesIO()
    extractor = _Extractor(stream, snapshot, can_wait)
    extractor.dump(len(state_dict))
    for key, value in state_dict.items():
        extractor.key = key
        extractor.dump((key, value))
    snapshot.payload = stream.getvalue()
    return snapshot


def restore(payload: bytes, arena: Arena) -> dict[str, Any]:
    """The state dict again, its tensors being views of ``arena``."""
    unpickler = _Restorer(io.BytesIO(payload), arena)
    return dict(unpickler.load() for _ in range(unpickler.load()))


class StagedShard(torch.Tensor):
    """This rank's part of a sharded tensor; answers what DCP asks of a DTensor."""

    local: torch.Tensor
    items: list[WriteItem]

    @classmethod
    def over(cls, local: torch.Tensor, items: list[WriteItem]) -> "StagedShard":
        """A shard whose elements are ``local``."""
        shard = torch.Tensor._make_subclass(cls, local)
        shard.local, shard.items = local, items
        return shard

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [replace(item, index=replace(item.index, fqn=fqn)) for item in self.items]

    def __get_tensor_shard__(self, _: Any) -> torch.Tensor:
        return self.local


class _Extractor(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, snapshot: Snapshot, can_wait: CanWait) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.key = ""
        self._snapshot = snapshot
        self._can_wait = can_wait
        # Sources stay alive in the snapshot, so an address means one tensor.
        self._places: dict[tuple[Any, ...], Place] = {}

    def reducer_override(self, obj: Any) -> Any:
        if getattr(obj, "__module__", None) == "__main__":
            raise TypeError(
                f"{self.key} holds {obj!r}, of the program that was started, which the process that "
                "writes does not have; move its class into a module, or use --checkpoint.async_mode async."
            )
        return NotImplemented

    def persistent_id(self, obj: Any) -> Place | None:
        if not isinstance(obj, torch.Tensor):
            return None
        items = None
        local = obj.detach()
        if isinstance(local, DTensor):
            items = _write_items(local)
            local = local.to_local()
        if type(local) not in _PLAIN_TYPES or local.layout is not torch.strided:
            raise TypeError(
                f"{self.key} holds a tensor of type {type(obj).__name__} ({local.layout}), which cannot be "
                "staged in shared memory; use --checkpoint.async_mode async."
            )
        return self._place(local)._replace(items=items)

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
    def __init__(self, stream: io.BytesIO, arena: Arena) -> None:
        super().__init__(stream)
        self._arena = arena

    def persistent_load(self, pid: Place) -> torch.Tensor:
        local = self._arena.tensor(pid.offset, pid.shape, pid.dtype)
        return local if pid.items is None else StagedShard.over(local, pid.items)


def _write_items(tensor: DTensor) -> list[WriteItem]:
    if tensor.device_mesh.get_coordinate() is None:
        return []  # of a mesh that this rank has no part in
    return tensor.__create_write_items__("", tensor)
