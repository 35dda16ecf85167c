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
- What is read goes into memory of its own and is copied from there. Here it is read straight into the
  tensors, as far as they are in the memory of this machine and laid out as in the file.
"""

import math
from collections import Counter
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
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
from torch_checkpointing.resharding import LoadPlan, ReshardingInfo
from torch_checkpointing.resharding_utils import (
    convert_nested_path_dict_to_fqn,
    get_fqn_from_nested_path,
)
from torch_checkpointing.storage.base_storage import ReadArgs, Storage
from torch_checkpointing.types import CheckpointPath, NestedPath
from torch_checkpointing.walk_utils import walk_checkpoint_structure

from torchtitan.components.checkpointer.screening import load_plain
from torchtitan.components.checkpointer.tc.faults import checks_all, fault
from torchtitan.components.checkpointer.tc.ranks import rank_info_of_this_process
from torchtitan.components.checkpointer.tc.slices import read_into
from torchtitan.components.checkpointer.tensor_memory import local_part

_Planned = tuple[NestedPath, LoadPlan]
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
        found = _collect_leaf_values(item_key, target)
        targets = {path: local_part(found[path]) for path in nested_path_to_load_plans}
        # In rounds, in none of which two tensors begin at the same address.
        for paths in _rounds(targets):
            by_rank: dict[int, list[_Planned]] = {}
            for path in paths:
                for plan in nested_path_to_load_plans[path]:
                    by_rank.setdefault(plan.src_rank, []).append((path, plan))
            layouts = {rank: source_metadata.get_layout_info(rank, item_key) for rank in by_rank}
            left = self._read_directly(source_path, layouts, by_rank, targets, storage)
            if left:
                super()._execute_load_plans_with_read_strategy(
                    *(self._read_strategy, source_path, layouts, item_key),
                    *(left, targets, storage, self._file_read_workers, {}),
                )

    def _read_directly(
        self,
        source_path: Path,
        layouts: Mapping[int, LayoutInfo],
        by_rank: Mapping[int, list[_Planned]],
        targets: Mapping[NestedPath, torch.Tensor],
        storage: Storage,
    ) -> dict[int, list[_Planned]]:
        """Read what can be read into its place; the rest of ``by_rank`` is for the library."""
        on_accelerator = any(target.device.type != "cpu" for target in targets.values())
        # A thread has streams of its own; copies have to come after what waits in that of the caller.
        stream = torch.accelerator.current_stream() if on_accelerator else None

        def read(rank: int) -> bool:
            if stream is not None:
                torch.accelerator.set_stream(stream)
            layout = layouts[rank]
            if not isinstance(layout.serialization_format, TorchSerialization):
                return False
            path = source_path / layout.file_path
            with _named_in_errors(path, storage):
                return read_into(targets, by_rank[rank], path, storage)

        if len(by_rank) == 1:
            done = [read(rank) for rank in by_rank]
        else:
            with ThreadPoolExecutor(min(self._file_read_workers, len(by_rank))) as pool:
                try:
                    done = list(pool.map(read, by_rank))
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
        return {
            rank: plans
            for (rank, plans), is_done in zip(by_rank.items(), done, strict=True)
            if not is_done
        }

    def _generate_load_plans(
        self,
        target_metadata: dict[NestedPath, ShardingMetadata],
        source_metadata: DistributedItemMetadata,
    ) -> ReshardingInfo:
        # The library works out the same for each layer anew. One of those that are alike is enough.
        alike: dict[Any, list[NestedPath]] = {}
        for path, sharding in target_metadata.items():
            groups = source_metadata.nested_path_to_metadata.get(path)
            described = groups and tuple((it.sharding_metadata, tuple(it.ranks)) for it in groups)
            alike.setdefault((sharding, described) if groups else path, []).append(path)
        firsts = {paths[0]: target_metadata[paths[0]] for paths in alike.values()}
        found = super()._generate_load_plans(firsts, source_metadata)
        of_first = found.nested_path_to_load_plans
        plans, refused = {}, []
        for first, *others in alike.values():
            if first in found.non_reshardable_paths:
                refused += [first, *others]
            if first in of_first:
                plans[first] = of_first[first]
                for path in others:
                    name = get_fqn_from_nested_path(path)
                    plans[path] = [replace(plan, src_fqn=name) for plan in of_first[first]]
        return ReshardingInfo(nested_path_to_load_plans=plans, non_reshardable_paths=refused)

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
        with _named_in_errors(file_path, storage):
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
        with _named_in_errors(file_path, storage):
            if not isinstance(layout_info.serialization_format, TorchSerialization):
                return super()._read_source_slices_with_full_file_read(
                    file_path, layout_info, item_key, rank_plans, storage
                )
            content = storage.read(file_path, ReadArgs(pre_read_full_file=False))
            tree = load_plain(
                content, str(file_path), map_location="cpu", is_checked=checks_all(storage)
            )
            sources = _flatten_state_dict(item_key, tree)
            return [
                (path, plan, _slice_source_tensor(_unwrap_dtensor(sources[plan.src_fqn]), plan))
                for path, plan in rank_plans
            ]


@contextmanager
def _named_in_errors(path: Path, storage: Storage) -> Generator[None]:
    try:
        yield
    except NotImplementedError:
        raise  # the library's sign to itself to read all of the file
    except Exception as error:
        raise fault(error, str(path), storage) from error


def _rounds(targets: Mapping[NestedPath, torch.Tensor]) -> list[list[NestedPath]]:
    """The paths to read one after the other; of several for the same tensor, the last."""
    distinct: dict[Any, NestedPath] = {}
    for path, local in targets.items():
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
