"""Sharded tensors on the way to a writer process of torch.distributed.checkpoint.

What travels are the write items that DTensor itself makes in the trainer: device meshes, and the process
groups in them, stay where they are.

    DTensor -> describe (trainer) ...... build (writer) -> StagedShard, which DCP asks like a DTensor
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec


class StagedShard(torch.Tensor):
    """This rank's part of a sharded tensor; answers what DCP asks of a DTensor."""

    local: torch.Tensor
    items: list[WriteItem]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [replace(item, index=replace(item.index, fqn=fqn)) for item in self.items]

    def __get_tensor_shard__(self, _: Any) -> torch.Tensor:
        return self.local


@dataclass(frozen=True)
class Description:
    """Arrives in the writer as what DCP is to write of ``tensor``, still without a name.

    Equal where that is: to ask a tensor takes long, and most are like one that was asked.
    """

    tensor: DTensor = field(compare=False)
    spec: DTensorSpec
    requires_grad: bool
    is_pinned: bool

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (_write_items(self.tensor),)


def describe(tensor: DTensor) -> Description:
    """What ``build`` has to know of ``tensor``."""
    local = tensor._local_tensor
    return Description(tensor, tensor._spec, tensor.requires_grad, local.is_pinned())


def _write_items(tensor: DTensor) -> list[WriteItem]:
    if tensor.device_mesh.get_coordinate() is None:
        return []  # of a mesh that this rank has no part in
    return tensor.__create_write_items__("", tensor)


def build(local: torch.Tensor, items: list[WriteItem]) -> StagedShard:
    """The shard whose elements are ``local``."""
    shard = torch.Tensor._make_subclass(StagedShard, local)
    shard.local, shard.items = local, items
    return shard
