"""A state dict is taken apart and put together again, whatever it is made of."""

import io
import pickle
from collections import OrderedDict
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Partial, Replicate, Shard
from torchtitan.components.checkpointer.pinned.arena import ALIGNMENT, Arena
from torchtitan.components.checkpointer.pinned.dcp_shards import build, describe, StagedShard
from torchtitan.components.checkpointer.pinned.snapshot import restore, Snapshot, take


def always(key: str, tensor: torch.Tensor) -> bool:
    return True


def copied_into(snapshot: Snapshot, arena: Arena) -> Arena:
    arena.reserve(snapshot.size_bytes + 1)
    for source, place in snapshot.later:
        arena.tensor(place.offset, place.shape, place.dtype).copy_(source)
    return arena


def copied(state: dict[str, Any], arena: Arena) -> tuple[Snapshot, dict[str, Any]]:
    snapshot = take(state, always, describe)
    return snapshot, restore(snapshot.payload, copied_into(snapshot, arena), build)


def test_every_kind_of_value_comes_back_and_none_is_shared() -> None:
    rows: list[Any] = [1, {"deep": [torch.tensor(2), "text"]}, (3, None)]
    state = {
        "w": torch.nn.Parameter(torch.arange(6.0).view(2, 3)),
        "columns": torch.arange(12.0).view(3, 4)[:, 1:3],
        "scalar": torch.tensor(4, dtype=torch.int64),
        "nothing": torch.empty(0, 5),
        "nested": OrderedDict(rows=rows, array=numpy.arange(3)),
        "plain": 7,
    }
    _, restored = copied(state, Arena())
    rows[1]["deep"].append("too late")
    assert list(restored) == list(state) and type(restored["nested"]) is OrderedDict
    for name in ("w", "columns", "scalar", "nothing"):
        assert torch.equal(restored[name], state[name]) and not restored[name].requires_grad
    found = restored["nested"]["rows"]
    assert found[0] == 1 and found[1]["deep"][0] == 2 and found[1]["deep"][1:] == ["text"]
    assert found[2] == (3, None) and restored["plain"] == 7
    assert restored["nested"]["array"].tolist() == [0, 1, 2]


def saved_bytes(state: Any) -> int:
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.tell()


def test_tied_tensors_come_back_as_one_and_views_of_another_shape_on_their_own() -> None:
    weight = torch.ones(8, 2)
    state = {"a": weight, "b": [weight.detach()], "c": weight.view(16), "d": weight.view(16)}
    snapshot, restored = copied(state, Arena())
    assert len(snapshot.later) == 2
    assert restored["a"] is restored["b"][0] and restored["c"] is restored["d"]
    assert restored["a"].data_ptr() != restored["c"].data_ptr()


def test_empty_tensors_at_one_offset_are_not_taken_for_tied() -> None:
    _, restored = copied({"a": torch.empty(0, 5), "b": torch.empty(0, 5)}, Arena())
    assert restored["a"] is not restored["b"] and restored["b"].shape == (0, 5)


def test_views_of_one_memory_that_read_it_differently_are_not_taken_for_tied() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    state = {
        "a": numbers,
        "conjugate": numbers.conj(),
        "part": numbers.imag,
        "negative": numbers.conj().imag,
    }
    _, restored = copied(state, Arena())
    assert all(torch.equal(restored[name], state[name]) for name in state)


def test_what_begins_at_one_address_and_is_read_in_another_way_is_not_taken_for_tied() -> None:
    table = torch.arange(1.0, 10.0).view(3, 3)
    state = {
        # The short ones first: what is taken for one of them has too little room.
        "bytes": table.view(torch.uint8).as_strided((3, 3), (3, 1)),
        "first row": table[:1],
        "table": table,
        "turned": table.t(),
    }
    _, restored = copied(state, Arena())
    for name, value in state.items():
        assert restored[name].dtype == value.dtype and torch.equal(restored[name], value)


def test_places_do_not_overlap_and_are_aligned() -> None:
    state = {f"t{size}": torch.full((size,), float(size)) for size in range(1, 40)}
    snapshot, restored = copied(state, Arena())
    assert all(place.offset % ALIGNMENT == 0 for _, place in snapshot.later)
    assert all(torch.equal(restored[name], state[name]) for name in state)


def test_what_cannot_wait_is_told_from_what_can() -> None:
    state = {"still": torch.ones(1), "other": {"moving": torch.zeros(1)}}
    snapshot = take(state, lambda key, tensor: key == "still", describe)
    assert [float(source) for source, _ in snapshot.later] == [1.0]
    assert [float(source) for source, _ in snapshot.at_once] == [0.0]


@pytest.mark.usefixtures("one_rank")
def test_a_shard_plans_the_same_write_as_the_sharded_tensor_and_needs_no_mesh() -> None:
    mesh = init_device_mesh("cpu", (1,))
    whole = torch.arange(21.0).view(7, 3)
    state: dict[str, Any] = {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "replicated": distribute_tensor(whole, mesh, [Replicate()]),
        "step": torch.tensor(1.0),
    }
    snapshot, restored = copied(state, Arena())
    assert b"DeviceMesh" not in snapshot.payload
    assert isinstance(restored["sharded"], StagedShard)
    wanted = create_default_local_save_plan(state, True).items
    found = create_default_local_save_plan(restored, True).items
    assert [item.index for item in found] == [item.index for item in wanted]
    assert [item.tensor_data for item in found] == [item.tensor_data for item in wanted]
    shard = restored["sharded"].__get_tensor_shard__(None)
    assert type(shard) is torch.Tensor and torch.equal(shard, whole)


def build_dtensor(local: torch.Tensor, spec: Any) -> DTensor:
    return DTensor(local, spec, requires_grad=False)


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_tensor_comes_back_as_whatever_its_description_is_made_into() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    whole = torch.arange(4096.0)
    weight = distribute_tensor(whole, mesh, [Shard(0)])
    local = weight.to_local()
    replicated = DTensor.from_local(local, mesh, [Replicate()])
    state: dict[str, Any] = {
        "model": {"w": weight, "tied": weight.detach(), "other": distribute_tensor(-whole, mesh)},
        "local": local,
        "replicated": replicated,
    }
    snapshot = take(state, always, lambda tensor: tensor._spec)
    # Nothing of the mesh, which has a tensor as well, lies where the next save writes.
    assert sum(source.nbytes for source, _ in snapshot.later) == 2 * whole.nbytes
    arena = copied_into(snapshot, Arena())
    restored = restore(snapshot.payload, arena, build_dtensor)
    model = restored["model"]
    assert model["w"] is model["tied"] and model["w"].placements == (Shard(0),)
    assert torch.equal(model["w"].to_local(), whole)
    assert model["w"].device_mesh is model["other"].device_mesh == mesh
    # The same elements, read in another way.
    assert restored["replicated"].placements == (Replicate(),)
    assert restored["local"].data_ptr() == model["w"].to_local().data_ptr()
    assert saved_bytes(restored) < 3 * whole.nbytes


@pytest.mark.usefixtures("one_rank")
def test_tied_shards_are_planned_under_each_of_their_names() -> None:
    mesh = init_device_mesh("cpu", (1,))
    weight = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    _, restored = copied({"a": weight, "b": weight.detach()}, Arena())
    assert restored["a"] is restored["b"]
    items = create_default_local_save_plan(restored, True).items
    assert [item.index.fqn for item in items] == ["a", "b"]


@pytest.mark.usefixtures("one_rank")
def test_shards_of_one_kind_travel_with_one_description_and_are_planned_apart() -> None:
    mesh = init_device_mesh("cpu", (1,))
    kinds = {
        "row": distribute_tensor(torch.arange(6.0).view(2, 3), mesh, [Shard(0)]),
        "column": distribute_tensor(torch.arange(6.0).view(2, 3), mesh, [Shard(1)]),
        "long": distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)]),
        "double": distribute_tensor(torch.arange(6.0).double().view(2, 3), mesh, [Shard(0)]),
        "trained": distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)]).requires_grad_(),
    }
    state: dict[str, Any] = {
        f"{name}{i}": (value + i).detach() for name, value in kinds.items() for i in range(3)
    }
    state["trained"] = kinds["trained"]
    _, restored = copied(state, Arena())
    wanted = create_default_local_save_plan(state, True).items
    found = create_default_local_save_plan(restored, True).items
    assert [item.index for item in found] == [item.index for item in wanted]
    assert [item.tensor_data for item in found] == [item.tensor_data for item in wanted]
    for name, value in state.items():
        assert torch.equal(restored[name].local, value.to_local())
    assert len({id(value.items) for value in restored.values()}) == 5


def test_what_entries_share_is_shared_in_the_writer() -> None:
    rows, weight = [1], torch.ones(2)
    _, restored = copied({"a": [rows, weight, weight], "b": {"rows": rows, "w": weight}}, Arena())
    assert restored["a"][0] is restored["b"]["rows"]
    assert restored["a"][1] is restored["a"][2] is restored["b"]["w"]


def test_only_restore_makes_tensors_of_a_payload() -> None:
    payload = take({"a": torch.ones(2)}, always, describe).payload
    stream = io.BytesIO(payload)
    assert pickle.load(stream) == (0, 1)
    with pytest.raises(RuntimeError, match="read by restore"):
        pickle.load(stream)


def test_a_class_of_the_program_that_was_started_is_named_because_no_other_process_has_it() -> None:
    found = type("Position", (), {"__module__": "__main__"})
    for value in (found(), [{"deep": found}]):
        with pytest.raises(TypeError, match="dataloader holds .*Position.* into a module"):
            take({"dataloader": value}, always, describe)


@pytest.mark.usefixtures("one_rank")
def test_a_tensor_that_cannot_travel_is_named() -> None:
    mesh = init_device_mesh("cpu", (1,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(ValueError, match="partial placements"):
        take({"w": partial}, always, describe)
    with pytest.raises(TypeError, match="optimizer holds a tensor of type Tensor .*sparse"):
        take({"optimizer": [torch.eye(2).to_sparse()]}, always, describe)
