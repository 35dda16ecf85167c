"""Who writes what, worked out from descriptions alone."""

from collections import Counter, OrderedDict
from typing import Any

import torch
from torch_checkpointing.distributed_metadata import GlobalObjectMetadata
from torch_checkpointing.dtensor_metadata import (
    DTensorShardingMetadata,
    get_device_mesh_spec,
    ReplicateSpec,
    ShardSpec,
)
from torchtitan.components.checkpointer.tc.shares import (
    Described,
    left_to_others,
    share_out,
    tied_in,
    without,
)

from tests.unit_tests.components.checkpointer.tc.stand_ins import plain_tensor

REPLICATED, SHARDED = ReplicateSpec(), ShardSpec(0)


def on_mesh(rows: int, *placements: Any, shape: tuple[int, ...] = (2, 2)) -> Any:
    """A table of ``rows`` on the ranks 0, 1, ..., that lie in ``shape``."""
    num_ranks = torch.Size(shape).numel()
    return DTensorShardingMetadata(
        global_shape=(rows, 100),
        dtype="torch.float32",
        stride=(100, 1),
        mesh_spec=get_device_mesh_spec(
            device_type="cpu", mesh_shape=shape, mesh_data=tuple(range(num_ranks))
        ),
        placements=placements,
    )


def described(**tensors: Any) -> Described:
    return {
        "model": {
            (name,): [GlobalObjectMetadata(it, tuple(sorted(it.mesh_spec.mesh_data)))]
            for name, it in tensors.items()
        }
    }


def writers(found: Described) -> dict[str, tuple[int, ...]]:
    return {str(path[0]): groups[0].ranks for path, groups in found["model"].items()}


def everywhere(ranks: tuple[int, ...]) -> bool:
    return True


def test_each_shard_has_one_writer_and_they_share_the_bytes() -> None:
    # 0 and 2 hold the same shard, and so do 1 and 3.
    given = described(**{f"w{i}": on_mesh(8 + i, REPLICATED, SHARDED) for i in range(9)})
    found = writers(share_out(given, [], everywhere))
    rows: Counter[int] = Counter()
    for name, ranks in found.items():
        assert len(ranks) == 2 and {rank % 2 for rank in ranks} == {0, 1}
        for rank in ranks:
            rows[rank] += int(name[1:]) + 8
    assert max(rows.values()) * 4 <= 1.1 * sum(rows.values())
    backwards = dict(reversed(given["model"].items()))
    assert writers(share_out({"model": backwards}, [], everywhere)) == found


def test_what_all_ranks_hold_makes_up_for_what_only_one_can_write() -> None:
    given = described(
        own=on_mesh(12, SHARDED, SHARDED),
        alone=plain_tensor(0, 3000),
        **{f"norm{i}": on_mesh(1, REPLICATED, REPLICATED) for i in range(60)},
    )
    found = writers(share_out(given, [], everywhere))
    assert found["own"] == (0, 1, 2, 3) and found["alone"] == (0,)
    num_norms = Counter(ranks for name, ranks in found.items() if name.startswith("norm"))
    assert num_norms[(0,)] < num_norms[(1,)] and sum(num_norms.values()) == 60


def test_tied_tensors_have_the_same_writers_whoever_told_of_it() -> None:
    given = described(
        **{f"w{i}": on_mesh(9, REPLICATED, SHARDED) for i in range(7)},
        other=on_mesh(30, REPLICATED, SHARDED),
    )
    names = [("model", (f"w{i}",)) for i in (1, 3, 6)]
    for ties in ([names], [names[:2], names[1:]], [names[::-1], names[::2]]):
        found = writers(share_out(given, ties, everywhere))
        assert found["w1"] == found["w3"] == found["w6"] and len(found["w1"]) == 2


def test_nothing_is_left_to_others_on_a_mesh_that_is_not_whole() -> None:
    given = described(
        w=on_mesh(4, REPLICATED, SHARDED), v=on_mesh(4, REPLICATED, REPLICATED, shape=(1, 2))
    )
    found = writers(share_out(given, [], lambda ranks: len(ranks) != 4))
    assert found["w"] == (0, 1, 2, 3) and len(found["v"]) == 1


def test_what_is_left_to_others_is_what_they_write() -> None:
    given = described(w=on_mesh(4, REPLICATED, SHARDED), v=on_mesh(4, SHARDED, SHARDED))
    found = share_out(given, [], everywhere)
    local: Any = {
        "model": {path: each[0].sharding_metadata for path, each in given["model"].items()}
    }
    for rank in range(4):
        left = left_to_others(found, local, rank)["model"]
        assert left == (set() if rank in writers(found)["w"] else {("w",)})


def test_what_is_left_out_leaves_all_else_in_its_place() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    tree = {"a": a, "deep": OrderedDict(b=b), "listed": [a, {"b": b}, c], "pair": (a,), "n": 1}
    left: Any = {"model": {("a",), ("deep", "b"), ("listed", 0), ("listed", 1, "b"), ("pair", 0)}}
    found = without({"model": tree, "other": {"a": a}}, left)
    assert found["other"]["a"] is a and "a" in tree
    model = found["model"]
    assert model.keys() == {"listed", "pair", "n"} and model["n"] == 1
    place, nothing, kept = model["listed"]
    # Names of what lies in a list are its places in it.
    assert isinstance(place, torch.Tensor) and isinstance(nothing, torch.Tensor)
    assert place.numel() == nothing.numel() == 0 and kept is c
    assert model["pair"][0] is a  # not taken apart: it is there twice


def test_an_item_of_which_nothing_is_left_is_gone_but_never_all_of_them() -> None:
    tensors = {"w": torch.zeros(1)}
    left: Any = {"model": {("w",)}, "table": {()}}
    assert without({"model": tensors, "table": torch.ones(1), "n": 1}, left) == {"n": 1}
    assert without({"model": tensors}, left) == {"model": {}}
    assert without({"model": tensors, "n": {}}, {})["model"] is tensors


def test_tied_are_names_for_the_same_elements_and_not_for_nothing() -> None:
    table, empty = torch.zeros(4, 2), torch.zeros(0)
    tensors: Any = {
        ("a",): table,
        ("row",): table[0],
        ("b", 1): table.view(4, 2),
        ("turned",): table.t(),
        ("none",): empty,
        ("none too",): empty,
    }
    assert tied_in("model", tensors) == [[("model", ("a",)), ("model", ("b", 1))]]
