from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torchtitan.config import CommConfig, ParallelismConfig
from torchtitan.distributed.parallel_dims import ParallelDims, problems
from torchtitan.distributed.utils import init_distributed, init_fake_mode, set_pg_timeouts


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    init_fake_mode(8, "fake_backend", rank=6)
    yield
    dist.destroy_process_group()


def _dims(world_size: int, **degrees: int) -> ParallelDims:
    defaults = {"dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
    return ParallelDims(**{**defaults, **degrees}, world_size=world_size)


def test_the_sharding_degree_takes_the_ranks_that_are_left() -> None:
    dims = _dims(16, dp_replicate=2, cp=2, tp=2)
    assert dims.dp_shard == 2
    assert (dims.non_data_parallel_size, dims.seq_len_divisor) == (4, 8)
    assert dims.dp_enabled and dims.fsdp_enabled and dims.dp_cp_enabled and not dims.pp_enabled


def test_context_parallel_ranks_share_shards_too() -> None:
    dims = _dims(2, cp=2)
    assert not dims.dp_enabled and dims.dp_cp_enabled and dims.fsdp_enabled


@pytest.mark.parametrize(
    ("degrees", "world_size", "words"),
    [
        ({"dp_shard": 3}, 2, ["dp_shard (3)", "= 3 ranks", "there are 2", "--parallelism."]),
        ({"tp": 2, "pp": 2}, 6, ["tp (2) * pp (2) = 4", "6 ranks"]),
        ({"tp": 4}, 2, ["tp (4)", "2 ranks"]),
        ({"tp": 0, "dp_shard": -2}, 2, ["tensor_parallel_degree is 0", "shard_degree is -2"]),
    ],
)
def test_degrees_that_do_not_multiply_to_the_ranks_are_an_assertion_error(
    degrees: dict[str, int], world_size: int, words: list[str]
) -> None:
    with pytest.raises(AssertionError) as caught:
        _dims(world_size, **degrees)
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_expert_degree_that_does_not_divide_is_a_value_error() -> None:
    with pytest.raises(ValueError) as caught:
        _dims(2, ep=3)
    assert "expert_parallel_degree (3) must divide dp_shard * cp * tp (2)" in str(caught.value)


def test_problems_tell_beforehand_what_the_dims_would_raise() -> None:
    assert problems(ParallelismConfig(), 8) == []
    assert ParallelDims.from_config(ParallelismConfig(), 8).dp_shard == 8
    (found,) = problems(ParallelismConfig(data_parallel_shard_degree=3), 2)
    assert "= 3 ranks, but there are 2" in found
    (found,) = problems(ParallelismConfig(expert_parallel_degree=3), 2)
    assert "must divide" in found


@pytest.mark.usefixtures("fake_ranks")
def test_eight_simulated_ranks_have_every_mesh() -> None:
    dims = _dims(8, pp=2, tp=2, ep=2)
    assert dims.world_mesh.mesh_dim_names == ("world",)
    assert dims.get_mesh("pp").get_local_rank() == 1
    assert dims.get_mesh("fsdp").get_local_rank() == 1
    assert (
        dims.get_mesh(["pp", "fsdp", "tp"]).mesh.tolist() == torch.arange(8).view(2, 2, 2).tolist()
    )
    assert dims.get_mesh("efsdp").size() == 2
    set_pg_timeouts(timedelta(seconds=1), dims)


@pytest.mark.usefixtures("fake_ranks")
def test_names_that_are_no_axis_and_axes_of_one_rank_are_refused() -> None:
    dims = _dims(8)
    for unknown in ("dp", "fsdp2", ["fsdp", "nothing"], []):
        with pytest.raises(ValueError, match="Invalid mesh dim"):
            dims.get_optional_mesh(unknown)
    with pytest.raises(ValueError, match="every axis of it has size 1"):
        dims.get_mesh("tp")


def test_simulated_ranks_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CommConfig(mode="fake_backend")
    monkeypatch.delenv("NGPU", raising=False)
    with pytest.raises(ValueError, match="NGPU is not set"):
        init_distributed(config)
    monkeypatch.setenv("NGPU", "8")
    monkeypatch.setenv("RANK", "8")
    with pytest.raises(ValueError, match=r"RANK must be in \[0, 8\)"):
        init_distributed(config)
    monkeypatch.setenv("RANK", "5")
    assert init_distributed(config) == 8
    assert dist.get_rank() == 5
    dist.destroy_process_group()
