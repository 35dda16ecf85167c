"""What several ranks hold is written by one of them, tied tensors stay tied, and all of it comes back.

Four ranks, two replicas of two shards each. Every layout of a real model, and its loads into others, are in
test_resharding.py.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torchtitan.components.checkpointer.tc import exchange
from torchtitan.components.optimizer import default_adamw, LRSchedulersContainer

from tests.ranks import bare_tc_reader
from tests.ranks.pool import run_on_ranks
from tests.ranks.tc_files import shares_of, unevenness
from tests.ranks.traps import Held
from tests.unit_tests.components.checkpointer.runs import build_manager, Counter, Run
from tests.unit_tests.components.checkpointer.ways import TC, TC_WAITING, Way

pytestmark = pytest.mark.ranks

WAYS = [TC, TC_WAITING]
ROWS, WIDTH = 301, 24


class Tied(nn.Module):
    """Layers of several sizes between an embedding and a head that is the same tensor; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        widths = [WIDTH, 40, 64, 17, WIDTH]
        pairs = zip(widths[:-1], widths[1:], strict=True)
        self.layers = nn.ModuleList(nn.Linear(one, other) for one, other in pairs)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(300))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden).square().mean()


def mesh_of_all() -> Any:
    """Replicas of shards, as far as there are ranks."""
    world_size = dist.get_world_size()
    shape = (2, world_size // 2) if world_size > 1 else (1, 1)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def averages(seed: int, num_extra: int) -> dict[str, Any]:
    """State in lists and dicts that replicas hold alike; ``num_extra`` tensors more than at first."""
    mesh, table = mesh_of_all(), torch.arange(4000.0).reshape(40, 100) + seed
    layouts = [(Replicate(), Shard(0)), (Replicate(), Replicate()), (Shard(1), Replicate())]
    return {
        "listed": [distribute_tensor(table.clone(), mesh, layout) for layout in layouts],
        "deep": {"er": {"whole": distribute_tensor(table.clone(), mesh, layouts[1]), "n": seed}},
        "grown": {str(i): distribute_tensor(table + i, mesh, layouts[1]) for i in range(num_extra)},
    }


def run_in(folder: Path, way: Way, seed: int, num_extra: int = 0) -> Run:
    torch.manual_seed(seed)
    model: Any = Tied()
    mesh = mesh_of_all()
    fully_shard(model, mesh=mesh)
    optimizers = default_adamw(lr=0.01).build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2)
    lr_schedulers = schedule.build(optimizers=optimizers, training_steps=1000)
    data, progress = Counter(row=0), Counter(step=0)
    settings: dict[str, Any] = {"keep_latest_k": 0, "last_save_model_only": False, **way.settings}
    manager = build_manager(
        folder / way.name, model, optimizers, lr_schedulers, data, progress, **settings
    )
    run = Run(model, optimizers, lr_schedulers, data, progress, manager)
    run.manager.states["averages"] = Held(averages(seed, num_extra))
    return run


def all_of(run: Run) -> dict[str, Any]:
    """Everything, whole, under the names that it has in a checkpoint; a collective."""

    def whole(value: Any) -> Any:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return [str(value.dtype), value.tolist()] if isinstance(value, torch.Tensor) else value

    def flat(tree: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(tree, (dict, list)):
            return {prefix: whole(tree)}
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        found: dict[str, Any] = {}
        for key, value in pairs:
            found |= flat(value, f"{prefix}.{key}")
        return found

    keys = ("model", "optimizer", "averages", "train_state")
    states = {key: run.manager.states[key].state_dict() for key in keys}
    return {name: value for key, tree in states.items() for name, value in flat(tree, key).items()}


@contextmanager
def counted_meetings() -> Generator[list[str]]:
    """How often all ranks wait for each other to say something."""
    meetings: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        meet = getattr(dist, name)

        def call(*given: Any, **named: Any) -> Any:
            meetings.append(name)
            return meet(*given, **named)

        return call

    with ExitStack() as stack:
        for name in ("all_gather", "broadcast", "barrier"):
            stack.enter_context(patch.object(dist, name, noted(name)))
        yield meetings


def save_in_each_way(folder: Path) -> dict[str, Any]:
    """Three saves, before the last of which the state grows; what there was, by way and step."""
    found: dict[str, Any] = {}
    for way in WAYS:
        run = run_in(folder, way, seed=1)
        for step in (1, 2, 3):
            if step == 3:
                run.manager.maybe_wait_for_saving()
                run.manager.states["averages"].values = averages(7, num_extra=3)
            with counted_meetings() as meetings:
                run.train(step)
            found[f"{way}/{step}"] = all_of(run)
            found[f"meetings {way}/{step}"] = meetings
        run.manager.close()
    return found


def load_in_each_way(folder: Path) -> dict[str, Any]:
    found = {}
    for way in WAYS:
        for step in (2, 3):
            run = run_in(folder, way, seed=5, num_extra=3 if step == 3 else 0)
            assert run.manager.load(step)
            model: Any = run.model
            assert model.head.weight is model.embedding.weight
            found[f"{way}/{step}"] = all_of(run)
            run.manager.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shares")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, Any]:
    return run_on_ranks(4, save_in_each_way, folder, timeout_seconds=240.0)[0]


def path_of(folder: Path, way: Way, step: int) -> Path:
    return folder / way.name / f"checkpoint/step-{step}"


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_ranks_hold_alike_is_written_once_and_by_all_of_them_together(
    folder: Path, saved: dict[str, Any], way: Way, step: int
) -> None:
    written, sizes = shares_of(path_of(folder, way, step))
    whole = saved[f"{way}/{step}"]
    tensors = {
        name.removeprefix("model."): torch.tensor(value[1]).numel()
        for name, value in whole.items()
        if isinstance(value, list)
    }
    assert len(tensors) == 42 + 3 * (step == 3)
    assert {name: written[name] for name in tensors} == tensors
    assert len(sizes) == 4 and unevenness(sizes) <= 1.1
    # Staged by all, for it is small, and equal.
    assert [file.name for file in path_of(folder, way, step).glob("train_state_*")] == [
        "train_state_0.pt"
    ]


def test_ranks_meet_twice_in_a_save_that_is_like_the_one_before(saved: dict[str, Any]) -> None:
    assert saved[f"meetings {TC}/2"] == ["all_gather", "broadcast"]
    # What is new is told, and there is room for it on all ranks, or it is made together.
    assert saved[f"meetings {TC}/3"].count("all_gather") in (3, 4)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_tied_tensors_are_tied_in_each_file(folder: Path, saved: dict[str, Any], way: Way) -> None:
    num_tied = 0
    for file in path_of(folder, way, 2).glob("model_*.pt"):
        tree = torch.load(file, weights_only=False)
        assert ("head.weight" in tree) == ("embedding.weight" in tree)
        if "head.weight" in tree:
            places = [tree[name].to_local() for name in ("head.weight", "embedding.weight")]
            assert places[0].data_ptr() == places[1].data_ptr()
            num_tied += 1
    assert num_tied == 2  # one for each shard


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_shares_come_back_bit_for_bit_on_any_number_of_ranks(
    folder: Path, saved: dict[str, Any], num_ranks: int
) -> None:
    for found in run_on_ranks(num_ranks, load_in_each_way, folder, timeout_seconds=240.0):
        assert len(found) == 4
        for name, state in found.items():
            assert state == saved[name]


def test_the_library_alone_reads_shares(folder: Path, saved: dict[str, Any]) -> None:
    steps = {f"{way}/{step}": str(path_of(folder, way, step)) for way in WAYS for step in (2, 3)}
    command = [sys.executable, "-P", bare_tc_reader.__file__, *steps.values()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name, step in steps.items():
        expected = json.loads(json.dumps(saved[name]))  # which has no tuples
        assert {key: found[step].get(key) for key in expected} == expected


def on_own_rank() -> dict[str, Any]:
    """What is agreed on if a rank of a mesh lacks a tensor that lies on it."""
    from torch_checkpointing.checkpoint_base import CheckpointInfo, CheckpointItem
    from torchtitan.components.checkpointer.tc.ranks import rank_info_of_this_process
    from torchtitan.components.checkpointer.tc.resharder import Resharder

    mesh = init_device_mesh("cpu", (2,))
    tensors = {
        name: distribute_tensor(torch.ones(100), mesh, [Replicate()]) for name in ("a", "b", "c")
    }
    if dist.get_rank() == 1:
        del tensors["b"]
    metadata = exchange.Metadata(rank_info_of_this_process(), None)
    metadata.look(CheckpointInfo({"model": CheckpointItem(value=tensors, resharder=Resharder())}))
    metadata.agree(is_known=False)
    kept = metadata.share_of({"model": tensors})
    metadata.close()
    return {"kept": sorted(kept["model"])}


def test_nothing_is_left_to_a_rank_that_has_not_got_it() -> None:
    lacking: Callable[[], dict[str, Any]] = on_own_rank
    assert [each["kept"] for each in run_on_ranks(2, lacking)] == [["a", "b", "c"], ["a", "c"]]
