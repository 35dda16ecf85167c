"""States that torch_checkpointing, left to itself, would lose, mix up or write wrong."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard

from tests.unit_tests.components.checkpointer.runs import build_run, Run
from tests.unit_tests.components.checkpointer.ways import TC

FLOATS = [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
KINDS = [None, 1, 2.5, "text", torch.ones(2), {"deep": torch.zeros(3)}]


class Held:
    """An object of a run whose state is one dict."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[Any, Any]:
        return self.values

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        self.values = state_dict


def of_all_kinds(seed: int) -> dict[Any, Any]:
    """Each entry is another trap; all values of two seeds differ. The same on every number of ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(f"seed_{seed}",))
    table = torch.arange(77.0).reshape(7, 11) + seed
    rows = (torch.arange(100_000.0) + seed)[40:47]
    short = torch.arange(4.0) + seed
    shard = distribute_tensor(table.clone(), mesh, [Shard(0)])
    return {
        "in lists": [{"part": distribute_tensor(short, mesh, [Shard(0)]), "rate": [seed, (0.5,)]}],
        "beside shards": {
            "name": f"run {seed}",
            "none": None,
            "set": {seed},
            "bytes": b"%d" % seed,
        },
        "shards": [
            distribute_tensor(table.clone(), mesh, [placement])
            for placement in (Shard(0), Shard(1), Replicate())
        ],
        "no rows": distribute_tensor(torch.empty(0, 3), mesh, [Shard(0)]),
        "one number": distribute_tensor(torch.tensor(2.5 + seed), mesh, [Replicate()]),
        "sliced": [distribute_tensor(short.to(dtype), mesh, [Shard(0)]) for dtype in FLOATS[:3]],
        "floats": [(short + 0.3).to(dtype) for dtype in FLOATS],
        "others": [
            torch.tensor([True, bool(seed)]),
            torch.tensor([-seed, 7], dtype=torch.int8),
            torch.complex(short, short + 1),
            torch.tensor(3 + seed),
            torch.empty(0, 4),
        ],
        "layouts": [table.t(), table[:, ::2], torch.complex(short, short).conj()],
        "repeated": torch.full((1,), float(seed)).expand(5),
        "rows of a large table": [rows, rows[:3], rows[2:5]],
        "learned": [torch.nn.Parameter(short + 1), torch.nn.Parameter(shard + 1)],
        "twice": [table, table, shard, shard],
        f"only in {seed}": {"by number": {seed: {}}, "a b/c:d": seed, "..": [[], [seed, [2]]]},
        "changes": [KINDS[(seed + number) % len(KINDS)] for number in range(len(KINDS))],
    }


def on_some_ranks() -> dict[str, Any]:
    """What not all ranks have, or not alike."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    stages = [DeviceMesh("cpu", [number]) for number in range(last + 1)]
    own = {
        f"stage {rank}": distribute_tensor(torch.arange(6.0) + rank, stages[rank], [Shard(0)]),
        f"step {rank}": torch.tensor(10 + rank),
        f"dp_rank_{rank}": {"row": rank},
        "not alike": torch.full((2,), float(rank)),
        "not alike either": rank,
        "empty elsewhere": {"last": {"deep": 1}} if rank == last else {},
    }
    return own | (
        {"of the last": {"buffer": torch.ones(3), "name": "last"}} if rank == last else {}
    )


def on_meshes(seed: int) -> dict[str, Any]:
    """One tensor in all layouts that a mesh of two dimensions has; on one rank, without a mesh."""
    table = torch.arange(35.0).reshape(7, 5) + seed
    kinds = [Shard(0), Shard(1), Replicate()]
    layouts = {f"{first}, {second}": (first, second) for first in kinds for second in kinds}
    world_size = dist.get_world_size()
    if world_size == 1:
        return {name: table.clone() for name in layouts}
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("a", "b"))
    return {
        name: distribute_tensor(table.clone(), mesh, layout) for name, layout in layouts.items()
    }


def plain(value: Any) -> Any:
    """``value`` with whole tensors in words that travel and compare bit for bit; a collective."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        bits = value.resolve_conj().contiguous().view(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), bits.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in sorted(value.items(), key=lambda it: str(it[0]))}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return copy.deepcopy(value)


def run_with(
    folder: Path,
    seed: int = 1,
    width: int = 7,
    settings: Mapping[str, Any] | None = None,
    **states: Any,
) -> Run:
    """A run on torch_checkpointing that has ``states`` beside its own."""
    usual = {"keep_latest_k": 0, "last_save_model_only": False}
    merged = {**usual, **TC.settings, **(settings or {})}
    run = build_run(folder, seed=seed, width=width, **merged)
    run.manager.states.update({key: Held(values) for key, values in states.items()})
    return run


def held(run: Run) -> dict[str, Any]:
    """Everything in a run, whole; a collective."""
    states = run.manager.states
    return run.snapshot() | {
        key: plain(state.values) for key, state in states.items() if isinstance(state, Held)
    }
