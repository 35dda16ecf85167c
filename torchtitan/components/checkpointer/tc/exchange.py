"""What the ranks tell each other about the tensors of a save: how they are laid out, and who writes them.

Nothing is told while every rank saves the very same tensors as before, which is so from the second save
on. The library tells it on CUDA only, and keeps what was told first for life.

    look -> (handover.py: is it new to anybody?) -> agree -> gather -> one of each plain tensor
      -> shares.share_out -> share_of -> stager ... Backend.save -> compute_metadata -> metadata.pkl
"""

import hashlib
import pickle
import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch_checkpointing.checkpoint_base import CheckpointInfo
from torch_checkpointing.checkpoint_layout import LayoutInfo
from torch_checkpointing.distributed_metadata import (
    CheckpointMetadata,
    DistributedItemMetadata,
    DistributedMetadata,
    LocalMetadata,
)
from torch_checkpointing.dtensor_metadata import DTensorShardingMetadata
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.types import NestedPath, RankInfo

from torchtitan.components.checkpointer.agreement import gather
from torchtitan.components.checkpointer.tc.leaves import leaves, Nested
from torchtitan.components.checkpointer.tc.resharder import one_of_each_plain
from torchtitan.components.checkpointer.tc.shares import (
    left_to_others,
    Name,
    share_out,
    tied_in,
    without,
)


@dataclass(frozen=True, slots=True)
class _Own:
    """What a rank has to tell of its tensors."""

    local: LocalMetadata = field(default_factory=dict)
    layouts: Mapping[str, LayoutInfo | None] = field(default_factory=dict)
    ties: list[list[Name]] = field(default_factory=list)


class Metadata(DefaultMetadataManager):
    """The metadata of the saves of a run, and this rank's share of their tensors."""

    def __init__(self, rank_info: RankInfo, group: "dist.ProcessGroup | None") -> None:
        super().__init__(rank_info, group, should_cache_metadata=False, enable_serialization=False)
        self._group = group
        self._seen: tuple[_Tensors, _Own] | None = None
        self._tensors: _Tensors | None = None
        self._own = _Own()
        self._current: tuple[CheckpointMetadata, bytes] | None = None
        self._left: dict[str, set[NestedPath]] = {}
        self._is_agreed = False

    def look(
        self,
        checkpoint_info: CheckpointInfo,
        tensors: Mapping[Nested, torch.Tensor] | None = None,
    ) -> bool:
        """Look at the tensors of this rank for the save that follows; whether they are as they were.

        Args:
            tensors: all in it by item and the keys that lead to them, if somebody has looked already.

        Raises:
            ValueError: one is laid out in a way that could not be read back.
        """
        tensors = _tensors_of(checkpoint_info) if tensors is None else tensors
        seen, own = self._tensors, self._own
        if seen is None or not seen.are(tensors):
            seen, own = _Tensors(tensors), self._described(checkpoint_info)
        self._seen = seen, own
        return self._current is not None and own == self._own

    def agree(self, *, is_known: bool) -> None:
        """Go on with what was looked at; all ranks tell each other of it unless it ``is_known`` to all.

        Collective then.

        Raises:
            ValueError: ranks have different tensors under one name.
        """
        assert self._seen is not None
        (tensors, own), self._seen = self._seen, None
        if not is_known:
            self._current = None  # until all of it is known
            metadata = self._of_all_ranks(own)
            both = CheckpointMetadata(distributed_metadata=metadata, local_metadata=own.local)
            self._current = both, pickle.dumps(metadata.to_dict())
            written = {
                item: each.nested_path_to_metadata for item, each in metadata.metadata.items()
            }
            self._left = left_to_others(written, own.local, self._rank_info.global_rank)
        self._tensors, self._own, self._is_agreed = tensors, own, True

    def share_of(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank writes of ``payload``, if its tensors are those that were told last."""
        return without(payload, self._left)

    def compute_metadata(self, checkpoint_info: CheckpointInfo) -> CheckpointMetadata:
        """The metadata of all ranks. Collective unless it was agreed on for this save; a failure of one
        rank is raised on all.

        Raises:
            ValueError: a tensor could not be read back, or not told from that of another rank.
        """
        if not self._is_agreed:
            failure, is_known = None, False
            try:
                is_known = self.look(checkpoint_info)
            except Exception as error:  # of any tensor subclass in the state
                failure = f"rank {self._rank_info.global_rank}: {error}"
            found = gather((failure, is_known), self._group)
            if failures := [one for one, _ in found if one is not None]:
                raise ValueError(failures[0])
            self.agree(is_known=all(each for _, each in found))
        self._is_agreed = False
        assert self._current is not None
        return self._current[0]

    def get_serialized_metadata(self) -> bytes | None:
        """The contents of metadata.pkl for the save whose metadata was computed last."""
        return None if self._current is None else self._current[1]

    def _described(self, checkpoint_info: CheckpointInfo) -> _Own:
        local = self.extract_object_metadata(checkpoint_info)
        ties = []
        for key, paths in local.items():
            found = leaves(checkpoint_info.checkpoint_items[key].value)
            ties += tied_in(key, {path: leaf for path, leaf in found if path in paths})
        return _Own(local, checkpoint_info.layout_info_mappings, ties)

    def _of_all_ranks(self, own: _Own) -> DistributedMetadata:
        told = (self._compact(own.local), own.layouts, own.ties, _held(own.local))
        found = gather(told, self._group)
        locals_, layouts, ties, held = zip(*found, strict=True)

        def is_whole(ranks: tuple[int, ...]) -> bool:
            return len({held[rank].get(ranks) for rank in ranks}) == 1

        described = share_out(
            one_of_each_plain(self._merge_object_metadata_from_ranks(dict(enumerate(locals_)))),
            [names for each in ties for names in each],
            is_whole,
        )
        return DistributedMetadata(
            metadata={
                key: DistributedItemMetadata(
                    nested_path_to_metadata=paths,
                    rank_to_layout_info={rank: each.get(key) for rank, each in enumerate(layouts)},
                )
                for key, paths in described.items()
            },
            world_size=self._rank_info.global_world_size,
        )


def _held(local: LocalMetadata) -> dict[tuple[int, ...], bytes]:
    """A digest, by the ranks of a mesh, of the names of the tensors that this rank has on it.

    The library tells of each tensor once, for all ranks of its mesh, whether or not they have it.
    """
    names: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for item, paths in local.items():
        for path, sharding in paths.items():
            if isinstance(sharding, DTensorShardingMetadata):
                names[sharding.mesh_spec.mesh_data].append(repr((item, path)))
    return {
        ranks: hashlib.sha256("\n".join(sorted(each)).encode()).digest()
        for ranks, each in names.items()
    }


def _tensors_of(checkpoint_info: CheckpointInfo) -> dict[Nested, torch.Tensor]:
    return {
        (key, *nested): leaf
        for key, value in checkpoint_info.state_dict.items()
        for nested, leaf in leaves(value)
        if isinstance(leaf, torch.Tensor)
    }


class _Tensors:
    """The tensors of a save, to be told from those of another one; keeps none of them alive."""

    def __init__(self, tensors: Mapping[Nested, torch.Tensor]) -> None:
        self._names = list(tensors)
        self._found = [(weakref.ref(one), one.shape, one.dtype) for one in tensors.values()]

    def are(self, tensors: Mapping[Nested, torch.Tensor]) -> bool:
        """Whether ``tensors`` are the very same objects: then they are laid out in the same way."""
        # Two references are equal if what they refer to is; to compare tensors would compare elements.
        return self._names == list(tensors) and all(
            reference() is one and shape == one.shape and dtype == one.dtype
            for (reference, shape, dtype), one in zip(self._found, tensors.values(), strict=True)
        )
