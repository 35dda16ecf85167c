"""How tensors are described in a checkpoint, and which are refused before a byte is written.

On one rank out of four that are not there: descriptions take no exchange.
"""

import errno
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch_checkpointing.distributed_metadata import (
    DistributedItemMetadata,
    GlobalObjectMetadata,
    ShardingMetadata,
)
from torch_checkpointing.dtensor_metadata import DTensorShardingMetadata
from torch_checkpointing.storage.base_storage import Storage
from torch_checkpointing.types import NestedPath
from torchtitan.components.checkpointer.errors import CheckpointDamagedError, CheckpointReadError
from torchtitan.components.checkpointer.tc.resharder import one_of_each_plain, Resharder
from torchtitan.components.checkpointer.tc.storage import DurableStorage, DurableStorageConfig

from tests.unit_tests.components.checkpointer.tc.stand_ins import plain_tensor


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two by two ranks, of which this is number 2."""
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def describe(tree: Any) -> dict[NestedPath, ShardingMetadata]:
    return Resharder().extract_sharding_metadata("model", tree)


def sharded(mesh: DeviceMesh, *placements: Any, rows: int = 2) -> DTensor:
    return DTensor.from_local(torch.zeros(rows, 4), mesh, placements, run_check=False)


def test_a_plain_tensor_is_that_of_this_rank_alone(mesh: DeviceMesh) -> None:
    found = describe({"a": {"step": torch.zeros((), dtype=torch.float64)}, "lr": 0.1})
    (path, described), *others = found.items()
    assert path == ("a", "step") and others == []
    assert isinstance(described, DTensorShardingMetadata)
    assert described.equivalent_ranks == (2,) and described.mesh_spec.mesh_shape == (1,)
    assert (described.global_shape, described.dtype) == ((), "torch.float64")


def test_a_sharded_tensor_is_described_as_the_library_does(mesh: DeviceMesh) -> None:
    tensor = sharded(mesh, Replicate(), Shard(0))
    (described,) = describe({"w": tensor}).values()
    assert described == DTensorShardingMetadata.from_dtensor(tensor)
    assert described.equivalent_ranks == (0, 1, 2, 3)


def test_what_fsdp_makes_of_a_tensor_parallel_layer_is_taken(mesh: DeviceMesh) -> None:
    layer = nn.Linear(8, 8, bias=False)
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["dp"])
    weight = layer.weight
    assert isinstance(weight, DTensor)
    assert isinstance(weight.placements[0], _StridedShard)
    assert weight.placements[1] == Shard(0)
    (described,) = describe(layer.state_dict()).values()
    assert isinstance(described, DTensorShardingMetadata)
    assert described.global_shape == (8, 8)


@pytest.mark.parametrize(
    "placements,refused",
    [
        ((Shard(0), Shard(0)), False),
        ((Shard(1), Shard(0)), False),
        ((_StridedShard(0, split_factor=2), Shard(0)), False),
        ((_StridedShard(0, split_factor=2), Replicate()), True),
        ((_StridedShard(0, split_factor=2), Shard(1)), True),
        ((_StridedShard(0, split_factor=3), Shard(0)), True),
        ((Replicate(), _StridedShard(0, split_factor=2)), True),
        ((Shard(0), _StridedShard(0, split_factor=2)), True),
    ],
    ids=str,
)
def test_a_strided_shard_without_what_it_is_strided_over_is_refused(
    mesh: DeviceMesh, placements: tuple[Any, ...], refused: bool
) -> None:
    tensor = sharded(mesh, *placements)
    if not refused:
        assert describe({"w": tensor})
        return
    with pytest.raises(ValueError) as caught:
        describe({"layers": {"0": tensor}})
    text = str(caught.value)
    assert text.startswith("model::layers.0 has the placements ")
    assert text.endswith("use --checkpoint.backend dcp.")


def test_a_sum_that_is_still_to_be_made_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match=r"model::w is .*: its values are still to be summed"):
        describe({"w": sharded(mesh, Shard(0), Partial())})


def test_two_tensors_of_one_dotted_name_are_refused_by_item(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match=r"model has two tensors .*'a\.b'.* Rename one of them"):
        describe({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}})


@pytest.mark.parametrize("has_source", [False, True])
@pytest.mark.parametrize("has_target", [False, True])
def test_the_way_to_read_is_the_same_whatever_the_layout(
    has_source: bool, has_target: bool, mesh: DeviceMesh
) -> None:
    described = describe({"w": sharded(mesh, Replicate(), Shard(0))})
    source = item_of(described)
    resharder = Resharder()
    assert not resharder.skip_resharding
    assert resharder.should_reshard(
        source if has_source else None, described if has_target else None
    ) is (has_source and has_target)


def item_of(described: dict[NestedPath, ShardingMetadata]) -> DistributedItemMetadata:
    groups = {
        path: [GlobalObjectMetadata(one, one.equivalent_ranks or ())]
        for path, one in described.items()
    }
    return DistributedItemMetadata(nested_path_to_metadata=groups, rank_to_layout_info={})


def plain(rank: int, *shape: int, dtype: str = "torch.float32") -> GlobalObjectMetadata:
    return GlobalObjectMetadata(plain_tensor(rank, *shape, dtype=dtype), (rank,))


def test_a_plain_tensor_of_several_ranks_is_that_of_the_lowest_that_has_it() -> None:
    kept = [plain(1, 2)]
    found = one_of_each_plain(
        {"model": {("w",): [plain(3, 2), plain(1, 2), plain(2, 2)], ("only",): kept}}
    )
    assert found == {"model": {("w",): [plain(1, 2)], ("only",): kept}}


@pytest.mark.parametrize(
    "other,said",
    [
        (plain(1, 3), "[2] of float32 on rank 0; [3] of float32 on rank 1"),
        (plain(1, 2, dtype="torch.int64"), "[2] of float32 on rank 0; [2] of int64 on rank 1"),
    ],
)
def test_one_name_for_different_tensors_is_refused(other: Any, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        one_of_each_plain({"optimizer": {("state", 0, "w"): [plain(0, 2), other]}})
    assert str(caught.value) == (
        f"optimizer.state.0.w differs between ranks: {said}. "
        "Save it under another name on each rank (see rank_state)."
    )


def load(
    folder: Path,
    saved: dict[str, Any],
    target: dict[str, Any],
    *,
    change: Callable[[Path], None] = lambda path: None,
    storage: Storage | None = None,
    compressed: bool = False,
) -> list[NestedPath]:
    """Read into ``target`` what one rank has ``saved``, once its file is changed."""
    file = folder / "model_0.pt"
    torch.save(saved, file)
    if compressed:
        compress(file)
    change(file)
    resharder = Resharder()
    source = resharder.extract_sharding_metadata("model", saved)
    wanted = resharder.extract_sharding_metadata("model", target)
    storage = storage or DurableStorageConfig().create_storage()
    return resharder.load(folder, "model", wanted, item_of(source), target, storage)


def compress(file: Path) -> None:
    """As another program might, which makes reading in slices impossible."""
    with zipfile.ZipFile(file) as archive:
        records = {info: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, content in records.items():
            archive.writestr(info.filename, content)


def test_views_that_begin_at_one_address_are_all_filled(tmp_path: Path) -> None:
    saved = {name: torch.full((2, 2), float(number)) for number, name in enumerate("abc", 1)}
    saved["first"] = saved["a"][0].clone()
    table = torch.zeros(4, 2)
    target = {"a": table[:2], "first": table[0], "b": table[2:], "c": torch.zeros(2, 2)}
    assert load(tmp_path, saved, target) == []
    assert {name: tensor.unique().tolist() for name, tensor in target.items()} == {
        "a": [1.0],
        "first": [1.0],
        "b": [2.0],
        "c": [3.0],
    }


def test_a_tensor_that_the_checkpoint_lacks_is_told(tmp_path: Path) -> None:
    target = {"w": torch.ones(2), "other": torch.ones(1)}
    assert load(tmp_path, {"w": torch.zeros(2)}, target) == [("other",)]
    assert target["w"].tolist() == [0.0, 0.0] and target["other"].tolist() == [1.0]


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_that_asks_for_code_is_refused_and_nothing_of_it_runs(
    tmp_path: Path, compressed: bool
) -> None:
    trace, target = tmp_path / "trace", {"w": torch.zeros(2)}
    saved = {"w": torch.ones(2), "more": Harmful(trace)}
    with pytest.raises(CheckpointDamagedError, match="model_0.pt .*asks for posix.mkdir"):
        load(tmp_path, saved, target, compressed=compressed)
    assert not trace.exists() and not target["w"].any()
    # It would have: a reader that trusts the file runs it.
    torch.load(tmp_path / "model_0.pt", weights_only=False)
    assert trace.exists()


def test_a_file_that_cannot_be_read_in_slices_is_read_as_a_whole(tmp_path: Path) -> None:
    saved = {"w": torch.arange(4.0), "b": torch.ones(1)}
    target = {"w": torch.zeros(4), "b": torch.zeros(1)}
    assert load(tmp_path, saved, target, compressed=True) == []
    assert target["w"].tolist() == [0.0, 1.0, 2.0, 3.0] and target["b"].tolist() == [1.0]


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "other bytes": lambda path: path.write_bytes(b"x" * 500),
    "another tensor": lambda path: torch.save({"other": torch.ones(2)}, path),
    "a smaller tensor": lambda path: torch.save({"w": torch.ones(1)}, path),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_of_a_file_that_nothing_is_known_about(tmp_path: Path, damage: str) -> None:
    with pytest.raises(CheckpointDamagedError, match="model_0.pt"):
        load(tmp_path, {"w": torch.ones(2)}, {"w": torch.zeros(2)}, change=DAMAGES[damage])


def test_a_disk_that_does_not_answer_is_no_damage(tmp_path: Path) -> None:
    class Failing(DurableStorage):
        def _open_for_read(self, path: Path, use_direct_io: bool) -> Any:
            raise OSError(errno.EIO, "Input/output error")

    storage = Failing(DurableStorageConfig())
    with pytest.raises(CheckpointReadError, match="says nothing about the checkpoint") as caught:
        load(tmp_path, {"w": torch.ones(2)}, {"w": torch.zeros(2)}, storage=storage)
    assert type(caught.value) is CheckpointReadError
