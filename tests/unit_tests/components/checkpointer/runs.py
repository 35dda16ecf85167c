"""A run small enough for a test, made of the real parts: FSDP2, optimizers, schedules, manager."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager, TRAIN_STATE
from torchtitan.components.checkpointer.errors import CheckpointSaveError
from torchtitan.components.optimizer import (
    default_adamw,
    LRSchedulersContainer,
    OptimizersContainer,
)


class Tiny(nn.Module):
    """Odd sizes, so that shards are uneven; a buffer of integers; a parameter of one element."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(11, width)
        self.layers = nn.ModuleDict({str(i): nn.Linear(width, width) for i in range(2)})
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = hidden + torch.tanh(layer(hidden))
        self.seen += 1
        return (hidden * self.scale).square().mean()


class Counter:
    """State that is a few plain values, as the data loader's and the trainer's are."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return {"inner": dict(self.values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = dict(state_dict["inner"])


@dataclass
class Run:
    """Everything a trainer holds, without the trainer."""

    model: Tiny
    optimizers: OptimizersContainer
    lr_schedulers: LRSchedulersContainer
    dataloader: Counter
    progress: Counter
    manager: Any
    """Of the class that was asked for."""

    @property
    def step(self) -> int:
        return self.progress.values["step"]

    def train(self, until: int, *, save: bool = True, last_step: int | None = None) -> None:
        """Go on to step ``until``, with a save after each step if one is due."""
        while self.step < until:
            self.progress.values["step"] += 1
            self.dataloader.values["row"] += 5
            tokens = torch.arange(10) * self.step % 11
            self.model(tokens).backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.lr_schedulers.step()
            if save:
                self.manager.save(self.step, last_step=self.step == last_step)

    def snapshot(self) -> dict[str, Any]:
        """Copies of every value, sharded ones made whole; a collective."""
        found: dict[str, Any] = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        found |= {f"optimizer.{k}": v for k, v in self.optimizers.state_dict().items()}
        found |= {f"lr.{k}": v for k, v in self.lr_schedulers.state_dict().items()}
        found |= {f"rates.{k}": v for k, v in self.lr_schedulers.get_metrics().items()}
        found |= {f"data.{k}": v for k, v in self.dataloader.values.items()}
        found |= {f"progress.{k}": v for k, v in self.progress.values.items()}
        return {name: _whole(value) for name, value in found.items()}


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    # Lists travel between processes without shared memory.
    return (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value


def build_run(folder: str | Path, *, width: int = 7, seed: int = 1, **settings: Any) -> Run:
    """A run at step 0 on all ranks; ``settings`` are those of ``build_manager``.

    In a process that is no rank of anything the model stays whole.
    """
    torch.manual_seed(seed)
    model = Tiny(width)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizers = default_adamw(lr=0.01).build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2)
    lr_schedulers = schedule.build(optimizers=optimizers, training_steps=1000)
    dataloader, progress = Counter(row=0), Counter(step=0)
    parts = (model, optimizers, lr_schedulers, dataloader, progress)
    return Run(*parts, build_manager(folder, *parts, **settings))


def build_manager(
    folder: str | Path,
    model: nn.Module,
    optimizers: OptimizersContainer,
    lr_schedulers: LRSchedulersContainer,
    dataloader: Any,
    progress: Any,
    *,
    manager: type[BaseCheckpointManager] = CheckpointManager,
    keywords: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """What saves these parts into ``folder``, after each step unless ``settings`` say otherwise.

    Args:
        manager: the class to build.
        keywords: further ones of its constructor.
    """
    settings = {"enable": True, "interval": 1, **settings}
    return manager.Config(**settings).build(
        dataloader=dataloader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=lr_schedulers,
        states={TRAIN_STATE: progress},
        sd_adapter=None,
        base_folder=str(folder),
        **(keywords or {}),
    )


def names(folder: str | Path) -> list[str]:
    """What lies in the checkpoint folder."""
    return sorted(entry.name for entry in (Path(folder) / "checkpoint").iterdir())


def message_of(action: Callable[..., Any], *arguments: Any) -> str:
    """What a save that fails in ``action`` says."""
    try:
        action(*arguments)
    except CheckpointSaveError as error:
        return str(error)
    return "nothing was raised"


def objects_of(run: Run) -> Any:
    """All that is restored through an object, as opposed to tensors that are filled."""
    groups = [dict(group, params=None) for opt in run.optimizers for group in opt.param_groups]
    schedules = run.lr_schedulers.state_dict()
    return dict(run.dataloader.values), dict(run.progress.values), groups, schedules
