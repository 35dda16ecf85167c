"""How tensors of a checkpoint are described, and read into any layout.

The library's DefaultResharder reads slices into whatever layout the run has. What it assumes beyond what
is true of every run, or passes over without a word, is settled here before a byte is written:

- A plain tensor is taken to be on all ranks. Here it is of the lowest rank that has it.
- A layout that torch cannot describe to the library is read back wrong; it is refused.
- Files of the same layout are read whole, by another path that restores other things. Here the path
  is always the same, which reads only what it needs.
- Tensors that begin at the same address are taken for one, and all but the last of them are left out.
  Here only those are that are the same tensor.
- A file is read as a pickle that may call anything. Here it is data or it is refused (screening.py).
"""

import math
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, IO

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard, Shard
from torch_checkpointing.checkpoint_layout import LayoutInfo, TorchSerialization
from torch_checkpointing.default_resharder import (
    _collect_leaf_values,
    _flatten_state_dict,
    _read_source_tensor_slice,
    _slice_source_tensor,
    _unwrap_dtensor,
    _validate_offset_read_archive,
    DefaultResharder,
)
from torch_checkpointing.distributed_metadata import (
    DistributedItemMetadata,
    GlobalObjectMetadata,
    ShardingMetadata,
)
from torch_checkpointing.dtensor_metadata import (
    DTensorShardingMetadata,
    get_device_mesh_spec,
    ReplicateSpec,
)
from torch_checkpointing.resharding import LoadPlan
from torch_checkpointing.resharding_utils import convert_nested_path_dict_to_fqn
from torch_checkpointing.storage.base_storage import ReadArgs, Storage
from torch_checkpointing.types import CheckpointPath, NestedPath
from torch_checkpointing.walk_utils import walk_checkpoint_structure

from torchtitan.components.checkpointer.screening import load_plain
from torchtitan.components.checkpointer.tc.faults import fault
from torchtitan.components.checkpointer.tc.ranks import rank_info_of_this_process

_Slice = tuple[NestedPath, LoadPlan, torch.Tensor]


class Resharder(DefaultResharder):
    """See the top of the file."""

    def extract_sharding_metadata(
        self, item_key: str, item_value: Any
    ) -> dict[NestedPath, ShardingMetadata]:
        """How the tensors in ``item_value`` are laid out.

        Raises:
            ValueError: the library could not read one of them back, or not tell it from another.
        """
        found: dict[NestedPath, ShardingMetadata] = {}

        def look(path: CheckpointPath, leaf: Any, _: Any) -> Any:
            if isinstance(leaf, DTensor):
                _require_readable(path, leaf)
                found[path.nested_path] = DTensorShardingMetadata.from_dtensor(leaf)
            elif isinstance(leaf, torch.Tensor):
                found[path.nested_path] = _plain(leaf)
            return leaf

        walk_checkpoint_structure(item_key=item_key, source=item_value, leaf_fn=look)
        try:
            convert_nested_path_dict_to_fqn(found)
        except ValueError as error:
            raise ValueError(
                f"{item_key} has two tensors whose names are the same once written with dots: {error}. "
                "Rename one of them."
            ) from error
        return found

    def should_reshard(
        self,
        source_metadata: DistributedItemMetadata | None,
        target_metadata: dict[NestedPath, ShardingMetadata] | None,
    ) -> bool:
        """Always: one way to read, whatever the layout."""
        return source_metadata is not None and target_metadata is not None

    def _execute_load_plans(
        self,
        source_path: Path,
        source_metadata: DistributedItemMetadata,
        item_key: str,
        nested_path_to_load_plans: dict[NestedPath, list[LoadPlan]],
        target: Any,
        storage: Storage,
    ) -> None:
        # Autograd would refuse to write into a parameter, and the threads that do it know no no_grad.
        target = _detached(target)
        # In rounds, in none of which two tensors begin at the same address.
        targets = _collect_leaf_values(item_key, target)
        for paths in _rounds({path: targets[path] for path in nested_path_to_load_plans}):
            plans = {path: nested_path_to_load_plans[path] for path in paths}
            super()._execute_load_plans(
                source_path, source_metadata, item_key, plans, target, storage
            )

    def _read_source_slices_with_offset_reads(
        self,
        file_path: Path,
        layout_info: LayoutInfo,
        source_rank: int,
        item_key: str,
        rank_plans: list[tuple[NestedPath, LoadPlan]],
        storage: Storage,
        safetensors_header: Any = None,
    ) -> Generator[_Slice, None, None]:
        with _named_in_errors(file_path):
            if not isinstance(layout_info.serialization_format, TorchSerialization):
                yield from super()._read_source_slices_with_offset_reads(
                    *(file_path, layout_info, source_rank, item_key),
                    *(rank_plans, storage, safetensors_header),
                )
                return
            how = ReadArgs(pre_read_full_file=False, direct_io=True)
            with storage.stream_read(file_path, how) as stream:
                _validate_offset_read_archive(stream)
                tree = load_plain(cast(IO[bytes], stream), str(file_path), map_location="meta")
                sources = _flatten_state_dict(item_key, tree)
                for path, plan in rank_plans:
                    source = sources[plan.src_fqn]
                    yield path, plan, _read_source_tensor_slice(stream, source, plan)

    def _read_source_slices_with_full_file_read(
        self,
        file_path: Path,
        layout_info: LayoutInfo,
        item_key: str,
        rank_plans: list[tuple[NestedPath, LoadPlan]],
        storage: Storage,
    ) -> list[_Slice]:
        with _named_in_errors(file_path):
            if not isinstance(layout_info.serialization_format, TorchSerialization):
                return super()._read_source_slices_with_full_file_read(
                    file_path, layout_info, item_key, rank_plans, storage
                )
            content = storage.read(file_path, ReadArgs(pre_read_full_file=False))
            tree = load_plain(content, str(file_path), map_location="cpu")
            sources = _flatten_state_dict(item_key, tree)
            return [
                (path, plan, _slice_source_tensor(_unwrap_dtensor(sources[plan.src_fqn]), plan))
                for path, plan in rank_plans
            ]


@contextmanager
def _named_in_errors(path: Path) -> Generator[None]:
    try:
        yield
    except NotImplementedError:
        raise  # the library's sign to itself to read all of the file
    except Exception as error:
        raise fault(error, str(path)) from error


def _detached(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _detached(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_detached(value) for value in tree]
    return tree.detach() if isinstance(tree, torch.Tensor) else tree


def _rounds(targets: Mapping[NestedPath, torch.Tensor]) -> list[list[NestedPath]]:
    """The paths to read one after the other; of several for the same tensor, the last."""
    distinct: dict[Any, NestedPath] = {}
    for path, tensor in targets.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        address = local.data_ptr() if local.numel() > 0 else path
        distinct[address, tuple(local.shape), local.stride(), local.dtype] = path
    num_at: Counter[Any] = Counter()
    rounds: list[list[NestedPath]] = []
    for (address, *_), path in distinct.items():
        if num_at[address] == len(rounds):
            rounds.append([])
        rounds[num_at[address]].append(path)
        num_at[address] += 1
    return rounds


def one_of_each_plain(
    metadata: dict[str, dict[NestedPath, list[GlobalObjectMetadata]]],
) -> dict[str, dict[NestedPath, list[GlobalObjectMetadata]]]:
    """``metadata`` with each plain tensor as that of the lowest rank that has it.

    Raises:
        ValueError: ranks have different tensors under one name; whose would be restored?
    """
    for item_key, paths in metadata.items():
        for path, groups in paths.items():
            if len(groups) == 1:
                continue
            described = [_described(group.sharding_metadata) for group in groups]
            if len(set(described)) > 1:
                name = ".".join(str(part) for part in (item_key, *path))
                raise ValueError(
                    f"{name} differs between ranks: "
                    + "; ".join(
                        f"{text} on rank {group.ranks[0]}"
                        for text, group in zip(described, groups, strict=True)
                    )
                    + ". Save it under another name on each rank (see rank_state)."
                )
            paths[path] = [min(groups, key=lambda group: group.ranks[0])]
    return metadata


def _described(sharding: ShardingMetadata) -> str:
    if not isinstance(sharding, DTensorShardingMetadata):
        return type(sharding).__name__
    dtype = sharding.dtype.removeprefix("torch.")
    placements = ", ".join(map(str, sharding.placements))
    sharded = f" ({placements})" if len(sharding.mesh_spec.mesh_data) > 1 else ""
    return f"{list(sharding.global_shape)} of {dtype}{sharded}"


def _plain(tensor: torch.Tensor) -> DTensorShardingMetadata:
    """A tensor that is whole, on this rank."""
    rank = rank_info_of_this_process().global_rank
    return DTensorShardingMetadata(
        global_shape=tuple(tensor.shape),
        dtype=str(tensor.dtype),
        stride=tuple(tensor.stride()),
        mesh_spec=get_device_mesh_spec(
            device_type=tensor.device.type, mesh_shape=(1,), mesh_data=(rank,)
        ),
        placements=(ReplicateSpec(),),
    )


def _require_readable(path: CheckpointPath, tensor: DTensor) -> None:
    """Refuse what is not one block of rows and columns on each rank.

    A strided shard is one only together with the shards that it was strided over.
    """
    mesh = tensor.device_mesh
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise ValueError(f"{path} is {placement}: its values are still to be summed over ranks")
        if not isinstance(placement, _StridedShard):
            continue
        inner = [
            mesh.size(other)
            for other, later in enumerate(tensor.placements)
            if other > axis
            and isinstance(later, (Shard, _StridedShard))
            and later.dim == placement.dim
        ]
        if math.prod(inner) != placement.split_factor:
            raise ValueError(
                f"{path} has the placements {tensor.placements}, which torch_checkpointing 0.1.1 reads "
                "back in another order; use --checkpoint.backend dcp."
            )
