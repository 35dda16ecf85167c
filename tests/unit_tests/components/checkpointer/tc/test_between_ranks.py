"""What three ranks agree on before and while they save: one call, and each test looks at a part of it."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard
from torch_checkpointing.checkpoint_base import CheckpointInfo, CheckpointItem
from torch_checkpointing.types import RankInfo
from torchtitan.components.checkpointer import torch_checkpointing
from torchtitan.components.checkpointer.agreement import gather
from torchtitan.components.checkpointer.integrity.digests import digest_of
from torchtitan.components.checkpointer.tc import exchange, handover
from torchtitan.components.checkpointer.tc.commit import Commit, Files, GroupCommit
from torchtitan.components.checkpointer.tc.handover import hand_over
from torchtitan.components.checkpointer.tc.library import Metadata
from torchtitan.components.checkpointer.tc.payload import items_of
from torchtitan.components.checkpointer.tc.ranks import rank_info_of_this_process
from torchtitan.components.checkpointer.tc.resharder import Resharder
from torchtitan.components.checkpointer.torch_checkpointing import TorchCheckpointingManager

from tests.ranks.pool import run_on_ranks
from tests.unit_tests.components.checkpointer.tc.test_library import config as synchronous

pytestmark = pytest.mark.ranks
WORLD = 3


def end_of(action: Callable[..., Any], *arguments: Any) -> Any:
    """What ``action`` gives, or its error."""
    try:
        return action(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def written(*ranks: int) -> Files:
    return {f"model_{rank}.pt": digest_of(bytes([rank])) for rank in ranks}


COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(("all_", "broadcast", "gather", "scatter", "reduce", "barrier", "send"))
]


def collectives_of_an_agreement() -> list[str]:
    """Those of the first stop of a save, each with the number of long messages that come to this rank."""
    called: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            came = args[1] if name == "gather" else args[0]
            called.append(f"{name} {sum(getattr(each, 'nbytes', 9) > 8 for each in came or ())}")
            return real(*args, **kwargs)

        return call

    rank = dist.get_rank()
    with contextlib.ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(patch.object(dist, name, noted(name)))
        GroupCommit(RankInfo(rank, WORLD, rank, WORLD), None).agree(written(rank))
    return called


def commits() -> dict[str, Any]:
    named: list[int] = []
    known: list[Files] = []

    def save(commit: Commit, rank: int) -> None:
        known.append(commit.agree(written(rank)))
        if rank == 0:
            named.append(rank)
        commit.publish()

    def fail_to_write(commit: Commit, rank: int) -> None:
        if rank == 1:
            raise OSError("full")
        save(commit, rank)

    def fail_to_name(commit: Commit, rank: int) -> None:
        commit.agree({})
        if rank == 0:
            raise OSError("taken")
        commit.publish()

    def fail_twice(commit: Commit, rank: int) -> None:
        if rank > 0:
            raise OSError(f"full on {rank}")
        save(commit, rank)

    def on_group(action: Callable[[Commit, int], None]) -> str:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        commit = GroupCommit(RankInfo(rank, world_size, rank, world_size), None)
        try:
            action(commit, rank)
        except Exception as error:
            commit.fail(error)
            return f"{type(error).__name__}: {error}"
        return "saved"

    # Twice a save in the end: after a failure nobody is out of step.
    actions = [save, fail_to_write, fail_to_name, fail_twice, save]
    return {"ends": [on_group(action) for action in actions], "named": named, "known": known}


def payloads() -> dict[str, Any]:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (WORLD,))
    states: dict[str, Any] = {
        "model": {"w": torch.zeros(2)},
        "optimizer": {"lr": 0.1},
        "equal": {"step": 3, "tensor": torch.ones(2)},
        "unequal": {"step": 3, "n": rank, "tensor": torch.ones(2) * rank},
        "own": {"seed": rank},
        "pair": {"half": min(rank, 1)},
        "sharded": {"average": distribute_tensor(torch.ones(WORLD), mesh, [Shard(0)])},
    }

    class Failing:
        def state_dict(self) -> Any:
            raise KeyError("row")

        def load_state_dict(self, state_dict: Any) -> None: ...

    one_fails = states | ({"dataloader": Failing()} if rank == 1 else {})
    backend = synchronous().build()
    meetings: list[int] = []

    def counted(*given: Any) -> Any:
        meetings.append(1)
        return gather(*given)

    def keys(states: dict[str, Any]) -> list[str]:
        told = hand_over(
            lambda: items_of(states),
            backend,
            None,
            prepare=None,
            earlier=None,
            group=None,
            asked="Saving",
        )
        return sorted(told.payload)

    with patch.object(handover, "gather", counted), patch.object(exchange, "gather", counted):
        found: dict[str, Any] = {"keys": keys(states), "meetings": [len(meetings)]}
        found["again"] = keys({**states, "equal": {"step": 4, "tensor": states["equal"]["tensor"]}})
        found["meetings"].append(len(meetings))
    found["failure"] = end_of(keys, one_fails)
    found["after"] = keys({"equal": 1})
    backend.close()
    return found


def handed_over() -> list[Any]:
    """Which tensors this rank prepares and writes of two that all ranks have, and when rank 0 has lost one."""
    rank, backend = dist.get_rank(), synchronous().build()
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2)}
    prepared: list[list[str]] = []

    def written(model: dict[str, Any]) -> list[str]:
        told = hand_over(
            lambda: items_of({"model": model, "own": {"seed": rank}}),
            backend,
            None,
            prepare=lambda share: prepared.append(sorted(share.get("model", ()))),
            earlier=None,
            group=None,
            asked="Saving",
        )
        return sorted(told.payload.get("model", ()))

    found = [written(tensors), written(tensors)]
    found.append(written({"b": tensors["b"]} if rank == 0 else tensors))
    backend.close()
    return [*found, prepared[-1]]


def told(metadata: Metadata, **tensors: Any) -> Any:
    item = CheckpointItem(value=tensors, resharder=Resharder())
    found = metadata.compute_metadata(CheckpointInfo({"model": item}))
    groups = found.distributed_metadata.metadata["model"].nested_path_to_metadata
    return {path[0]: [group.ranks for group in each] for path, each in groups.items()}


def metadatas() -> dict[str, Any]:
    rank = dist.get_rank()
    metadata = Metadata(rank_info_of_this_process(), None)
    gathers: list[int] = []
    gather = exchange.gather

    def counted(*given: Any) -> Any:
        gathers.append(1)
        return gather(*given)

    everywhere = {"w": torch.zeros(2)}
    found: dict[str, Any] = {}
    with patch.object(exchange, "gather", counted):
        found["everywhere"] = told(metadata, **everywhere)
        found["again"] = told(metadata, **everywhere)
        found["gathers"] = len(gathers)
        grown = {"b": torch.zeros(1)} if rank == 2 else {}
        found["one grew"] = told(metadata, **everywhere, **grown)
        found["gathers then"] = len(gathers)
    found["differs"] = end_of(lambda: told(metadata, w=torch.zeros(1 + rank // 2)))
    clash = {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}} if rank == 1 else {}
    found["one fails"] = end_of(lambda: told(metadata, **everywhere, **clash))
    found["after"] = told(metadata, **everywhere)
    metadata.close()
    return found


def construction(folder: Path) -> list[Any]:
    bare = torch_checkpointing._with_sync_save(
        torch_checkpointing._default_backend_config(), use_barrier=False
    )

    def build(load_only: bool) -> str:
        config = TorchCheckpointingManager.Config(enable=True, load_only=load_only)
        manager = config.build(
            dataloader=None,
            model_parts=[nn.Linear(1, 1)],
            optimizers=None,
            lr_schedulers=None,
            states={},
            sd_adapter=None,
            base_folder=str(folder),
        )
        manager.close()
        return "built"

    with patch.object(torch_checkpointing, "_default_backend_config", lambda: bare):
        ends = [end_of(build, False), end_of(build, True)]
    return [*ends, end_of(build, False)]


def on_this_rank(folder: Path) -> dict[str, Any]:
    return {
        "commits": commits(),
        "collectives": collectives_of_an_agreement(),
        "payloads": payloads(),
        "handed over": handed_over(),
        "metadatas": metadatas(),
        "construction": construction(folder),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(WORLD, on_this_rank, tmp_path_factory.mktemp("run"))


def test_trainers_that_write_by_themselves_save_all_or_none(ranks: list[dict[str, Any]]) -> None:
    told = "OtherRankFailedError: rank {}: OSError: {}"
    full, taken = "OSError: full", "OSError: taken"
    assert [each["commits"]["ends"] for each in ranks] == [
        ["saved", told.format(1, "full"), taken, told.format(1, "full on 1"), "saved"],
        ["saved", full, told.format(0, "taken"), "OSError: full on 1", "saved"],
        ["saved", told.format(1, "full"), told.format(0, "taken"), "OSError: full on 2", "saved"],
    ]
    assert ranks[0]["commits"]["named"] == [0, 0]
    assert [each["commits"]["known"] for each in ranks] == [
        [written(0, 1, 2)] * 2,
        [{}] * 2,
        [{}] * 2,
    ]


def test_what_was_written_comes_to_rank_0_alone_and_in_two_collectives(
    ranks: list[dict[str, Any]],
) -> None:
    assert [each["collectives"] for each in ranks] == [
        ["all_gather 0", f"gather {WORLD}"],
        ["all_gather 0", "gather 0"],
        ["all_gather 0", "gather 0"],
    ]


def test_what_is_equal_on_ranks_is_of_the_lowest_of_them_alone(ranks: list[dict[str, Any]]) -> None:
    on_all = ["optimizer", "own", "sharded", "unequal"]
    assert [each["payloads"]["keys"] for each in ranks] == [
        sorted([*on_all, "equal", "model", "pair"]),
        sorted([*on_all, "pair"]),
        sorted(on_all),
    ]


def test_ranks_meet_once_for_a_save_of_the_tensors_that_all_know(
    ranks: list[dict[str, Any]],
) -> None:
    for found in (each["payloads"] for each in ranks):
        assert found["again"] == found["keys"] and found["meetings"] == [2, 3]


def test_what_another_rank_no_longer_has_is_written_by_one_that_has_it_as_ever(
    ranks: list[dict[str, Any]],
) -> None:
    # Also where nothing is new to this rank itself, which has prepared its share by then.
    assert [each["handed over"] for each in ranks] == [
        [["a", "b"], ["a", "b"], ["b"], ["b"]],
        [[], [], ["a"], ["a"]],
        [[], [], [], []],
    ]


def test_a_state_that_one_rank_cannot_save_fails_all_in_its_words(
    ranks: list[dict[str, Any]],
) -> None:
    said = (
        "CheckpointSaveError: Saving failed: rank 1: the state dataloader cannot be saved: "
        "KeyError: 'row'. Older checkpoints are untouched."
    )
    assert [each["payloads"]["failure"] for each in ranks] == [said] * WORLD
    assert [each["payloads"]["after"] for each in ranks] == [["equal"], [], []]


def test_metadata_is_exchanged_when_that_of_any_rank_has_changed(
    ranks: list[dict[str, Any]],
) -> None:
    for found in (each["metadatas"] for each in ranks):
        assert found["everywhere"] == found["again"] == {"w": [(0,)]}
        # One to know whether anybody has anything new, and one to tell it.
        assert (found["gathers"], found["gathers then"]) == (3, 5)
        assert found["one grew"] == {"w": [(0,)], "b": [(2,)]}
        assert found["after"] == {"w": [(0,)]}


def test_tensors_that_differ_between_ranks_or_cannot_be_read_back_fail_all_ranks(
    ranks: list[dict[str, Any]],
) -> None:
    for found in (each["metadatas"] for each in ranks):
        assert found["differs"].startswith("ValueError: model.w differs between ranks: [1] of")
        assert (
            "float32 on rank 0; [1] of float32 on rank 1; [2] of float32 on rank 2"
            in found["differs"]
        )
        assert found["one fails"].startswith("ValueError: rank 1: model has two tensors")


def test_several_ranks_without_a_barrier_are_refused_when_they_are_built(
    ranks: list[dict[str, Any]],
) -> None:
    for refused, *others in (each["construction"] for each in ranks):
        assert refused.startswith("ValueError: ") and "without a barrier for 3 ranks" in refused
        assert others == ["built", "built"]
