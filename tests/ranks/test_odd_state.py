"""State that does not sit still: parameters without gradients, and objects whose state changes shape.

A run that is stopped in the middle of all this goes on with the bits of one that was not.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, zeros
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from tests.ranks.pool import run_on_ranks
from tests.unit_tests.components.checkpointer.runs import build_manager
from tests.unit_tests.components.checkpointer.ways import (
    ASYNC,
    DISABLED,
    PINNED,
    TC,
    TC_WAITING,
    Way,
)

STOP, END = 4, 8
SIZES = {"used": 7, "late": 5, "paused": 3, "never": 4, "empty": 0, "frozen": 6}
# From which step to which a parameter takes part in the loss.
ACTIVE = {"used": [(1, END)], "late": [(STOP + 2, END)], "paused": [(1, 2), (STOP + 3, END)]}
GROUPS = [
    ("paused|never", "AdamW", {"lr": 0.1, "weight_decay": 0.5}),
    ("late", "Adam", {"lr": 0.2}),
    ("used", "Adam", {"lr": 0.3, "betas": (0.5, 0.6), "amsgrad": True}),
    (".*", "AdamW", {"lr": 0.4}),
]


class Odd(nn.Module):
    """One vector for each way in which a parameter can have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size, 2)))
        self.frozen.requires_grad_(False)

    def forward(self, step: int) -> torch.Tensor:
        active = [name for name, spans in ACTIVE.items() if any(a <= step <= b for a, b in spans)]
        loss = self.get_parameter("frozen").sum()
        if dist.get_world_size() == 1:
            # FSDP cannot reduce a gradient without elements.
            loss = loss + self.get_parameter("empty").sum()
        for name in active:
            parameter = self.get_parameter(name)
            loss = loss + (parameter - 0.1 * step).square().sum()
        return loss


class Shifting:
    """State that is another one after every step."""

    def __init__(self, mesh: Any) -> None:
        self.mesh, self.step = mesh, 0
        self.value = self.at(0)

    def at(self, step: int) -> dict[str, Any]:
        rows = zeros(2 * step + 1, 3, device_mesh=self.mesh, placements=[Shard(0)]) + step
        return {
            "grows": list(range(step)),
            "best": [None, 0.5, torch.tensor(2.5), (torch.ones(2), {})][step % 4],
            "seen": {str(number): {"row": number} for number in range(step % 3)},
            "window": torch.arange(step + 1),
            "rows": rows,
            "buffers": [torch.full((n,), step) for n in range(step % 3)],
            "by number": {step: {}},
            f"only at {step}": step,
        }

    def advance(self) -> None:
        self.step += 1
        new = self.at(self.step)
        new["grows"] = self.value["grows"]
        self.value = new
        # In place, so that a save that holds on to the list would see it grow.
        self.value["grows"].append(self.step - 1)

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict


class Steps:
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.step = state_dict["step"]


def plain(value: Any) -> Any:
    """``value`` as something that pickles and compares bit for bit."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value


@dataclass
class Run:
    model: Odd
    optimizers: OptimizersContainer
    lr_schedulers: LRSchedulersContainer
    shifting: Shifting
    progress: Steps
    manager: Any

    def train(self, until: int) -> None:
        while self.progress.step < until:
            self.progress.step += 1
            self.set_frozen()
            self.model(self.progress.step).backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.lr_schedulers.step()
            self.shifting.advance()
            self.manager.save(self.progress.step)
            self.optimizers.zero_grad()

    def set_frozen(self) -> None:
        self.model.paused.requires_grad_(not 2 < self.progress.step < STOP + 3)

    def snapshot(self) -> dict[str, Any]:
        groups = [group for inner in self.optimizers for group in inner.param_groups]
        return {
            "model": plain(self.model.state_dict()),
            "optimizer": plain(self.optimizers.state_dict()),
            "groups": [
                {key: value for key, value in group.items() if key != "params"} for group in groups
            ],
            "with state": sorted(
                name
                for inner in self.optimizers
                for group in inner.param_groups
                for name, param in zip(group["param_names"], group["params"], strict=True)
                if inner.state.get(param)
            ),
            "rates": self.lr_schedulers.get_metrics(),
            "shifting": plain(self.shifting.value),
        }


def build(folder: Path, *, seed: int, **settings: Any) -> Run:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Odd()
    if mesh.size() > 1:
        fully_shard(model, mesh=mesh)
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs=kwargs)
        for pattern, name, kwargs in GROUPS
    ]
    optimizers = OptimizersContainer.Config(param_groups=groups).build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=3, total_steps=12)
    lr_schedulers = schedule.build(optimizers=optimizers, training_steps=12)
    shifting, progress = Shifting(mesh), Steps()
    parts = (model, optimizers, lr_schedulers, shifting, progress)
    return Run(*parts, build_manager(folder, *parts, keep_latest_k=0, **settings))


def stop_and_go_on(folder: Path, ways: list[Way]) -> list[tuple[Any, Any, Any]]:
    """By way: snapshots of the uninterrupted run, of the resumed one, and what each step loads."""
    results = []
    for way in ways:
        straight = build(folder / f"straight-{way}", seed=1, load_only=True)
        straight.train(END)
        straight.manager.close()
        first = build(folder / way.name, seed=1, **way.settings)
        first.train(STOP)
        first.manager.close()
        loaded = load_each_step(folder, way)
        second = build(folder / way.name, seed=2, load_only=True, **way.settings)
        second.progress.step = STOP
        second.set_frozen()  # before the load, as a run does that freezes what it was told to
        assert second.manager.load()
        second.shifting.step = STOP
        second.train(END)
        second.manager.close()
        results.append((straight.snapshot(), second.snapshot(), loaded))
    return results


def load_each_step(folder: Path, way: Way) -> list[tuple[Any, Any]]:
    """What was loaded of each step that ``first`` saved, and what was to come."""
    loaded = []
    for step in range(1, STOP + 1):
        run = build(folder / way.name, seed=2, load_only=True, **way.settings)
        assert run.manager.load(step)
        loaded.append((plain(run.shifting.value), plain(run.shifting.at(step))))
        run.manager.close()
    return loaded


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "ways"),
    [(1, [ASYNC]), (1, [TC_WAITING]), (2, [DISABLED, PINNED]), (2, [TC])],
    ids=lambda value: str(value) if isinstance(value, int) else ", ".join(map(str, value)),
)
def test_what_has_no_gradient_or_changes_its_shape_is_resumed_bit_for_bit(
    tmp_path: Path, world_size: int, ways: list[Way]
) -> None:
    for rank in run_on_ranks(world_size, stop_and_go_on, tmp_path, ways, timeout_seconds=240):
        for straight, resumed, loaded in rank:
            assert resumed == straight
            empty = ["empty"] if world_size == 1 else []
            assert straight["with state"] == [*empty, "late", "paused", "used"]
            assert straight["optimizer"]["state.late.step"][2] == END - STOP - 1
            assert [group["param_names"] for group in straight["groups"]] == [
                ["paused", "never"],
                ["empty"],
                ["late"],
                ["used"],
            ]
            assert [group["initial_lr"] for group in resumed["groups"]] == [0.1, 0.4, 0.2, 0.3]
            for found, saved in loaded:
                assert found == saved
    for others in (1, 4) if world_size > 1 else ():
        for loaded in run_on_ranks(others, load_each_step, tmp_path, ways[-1]):
            assert all(found == saved for found, saved in loaded)
