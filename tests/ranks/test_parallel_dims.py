import pytest
import torch
import torch.distributed as dist
from torchtitan.distributed.parallel_dims import MeshAxisName, ParallelDims

from tests.ranks.pool import run_on_ranks

pytestmark = pytest.mark.ranks


def _dims(**degrees: int) -> ParallelDims:
    defaults = {"dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
    return ParallelDims(**{**defaults, **degrees}, world_size=dist.get_world_size())


def _members(degrees: dict[str, int]) -> dict[str, list[int]]:
    """The ranks that share each axis with this one, found by communicating over it."""
    dims = _dims(**degrees)
    members = {}
    for axis in MeshAxisName:
        mesh = dims.get_optional_mesh(axis)
        if mesh is not None:
            ranks = [torch.zeros((), dtype=torch.int64) for _ in range(mesh.size())]
            dist.all_gather(ranks, torch.tensor(dist.get_rank()), group=mesh.get_group())
            members[str(axis)] = [int(rank) for rank in ranks]
    assert set(dims.get_all_one_dimensional_meshes()) == set(members)
    return members


def _joined_meshes() -> tuple[list[list[int]], bool, bool, str]:
    dims = _dims(dp_replicate=2)
    mesh = dims.get_mesh(["dp_replicate", "fsdp"])
    same = mesh is dims.get_mesh(["dp_replicate", "fsdp"])
    shared = mesh.get_group("fsdp") is dims.get_mesh("fsdp").get_group()
    try:
        dims.get_mesh(["batch", "fsdp"])
    except ValueError as error:
        return mesh.mesh.tolist(), same, shared, str(error)
    raise AssertionError("overlapping axes were joined")


def _singletons() -> tuple[bool, bool, tuple[str, ...] | None, int]:
    dims = _dims()
    with_pp = dims.get_mesh(["pp", "fsdp"], include_singleton_axes=True)
    without = dims.get_mesh(["pp", "fsdp"])
    total = torch.ones(1)
    dist.all_reduce(total, group=dims.get_mesh("fsdp", include_singleton_axes=True).get_group())
    return (
        dims.get_optional_mesh("pp") is None,
        without is dims.get_mesh("fsdp"),
        with_pp.mesh_dim_names,
        int(total),
    )


def test_each_axis_joins_the_ranks_that_the_order_of_the_axes_says() -> None:
    rank_one = run_on_ranks(4, _members, {"tp": 2, "ep": 2})[1]
    assert rank_one == {
        "dp_shard": [1, 3],
        "tp": [0, 1],
        "ep": [0, 1],
        "batch": [1, 3],
        "loss": [1, 3],
        "fsdp": [1, 3],
        "efsdp": [1, 3],
    }
    rank_two = run_on_ranks(4, _members, {"dp_replicate": 2, "cp": 2})[2]
    assert rank_two == {
        "dp_replicate": [0, 2],
        "cp": [2, 3],
        "batch": [0, 2],
        "loss": [0, 1, 2, 3],
        "fsdp": [2, 3],
        "efsdp": [2, 3],
    }


def test_a_mesh_of_several_axes_is_made_once_and_shares_their_groups() -> None:
    ranks, same, shared, message = run_on_ranks(4, _joined_meshes)[3]
    assert (ranks, same, shared) == ([[0, 1], [2, 3]], True, True)
    assert "['batch', 'fsdp']" in message


def test_axes_of_one_rank_are_left_out_unless_asked_for() -> None:
    assert run_on_ranks(2, _singletons) == [(True, True, ("pp", "fsdp"), 2)] * 2
