"""What one rank does to compare the trainer with a bare loop; ``train_step.py`` starts it.

Both train a model of the same size from the same first weights on the same rows, each with its own copy,
in the same processes in turns. The trainer runs its real loop, ``Trainer.train``: between two of its steps
it asks whether to go on, and there the bare loop has its turn. In the end the weights are compared,
so that nobody measures two different things.

    Trainer.train: [ should_continue_training -> step ]*
                              |
                     block over? -> bare loop, a block of steps
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan import assembly
from torchtitan.components.data import GrainDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from benchmarks.harness import usage
from benchmarks.harness.models import all_ranks, config_of, SIZES
from benchmarks.harness.pairs import turns

TRAINER, BARE = "trainer", "bare"
# Rounding alone makes a few hundredths: AdamW makes whole steps of gradients that are next to nothing.
_SAME = 0.2
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(kw_only=True, slots=True)
class BareLoop:
    """What one would write without a trainer: FSDP2, cross entropy, clipping, AdamW."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    max_norm: float

    def step(self) -> None:
        tokens, positions, labels = next(self.batches)
        loss = F.cross_entropy(self.model(tokens, positions), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


class PacedTrainer(Trainer):
    """A trainer that stands aside for the bare loop after each block of its steps."""

    turn: Callable[[], bool] = staticmethod(lambda: True)
    """Called in front of every step; False ends the training."""

    def should_continue_training(self) -> bool:
        return self.turn()


class Pace:
    """Decides whose turn it is, and times the blocks."""

    def __init__(
        self,
        bare: BareLoop,
        *,
        num_pairs: int,
        num_steps: int,
        budget_seconds: float,
        tell: Callable[[str], None],
    ) -> None:
        # The first pair starts kernels and threads and is not counted.
        self._order = [
            side for pair in range(num_pairs + 1) for side in turns((TRAINER, BARE), pair)
        ]
        self._bare, self._num_steps, self._tell = bare, num_steps, tell
        self._until = time.monotonic() + budget_seconds
        self._num_done = 0
        self._steps_left = 0
        self._clocks = usage.cpu_clocks()
        self._started = 0.0
        self.seconds: dict[str, list[float]] = {TRAINER: [], BARE: []}
        self.cpu: list[list[float]] = []

    def next(self) -> bool:
        """Whether the trainer is to take another step."""
        if self._steps_left:
            self._steps_left -= 1
            return True
        if self._started:
            self._end(TRAINER)
        while self._may_go_on() and self._order[self._num_done] == BARE:
            self._begin()
            # Python's own collection, which a trainer switches off, is part of a bare loop.
            gc.enable()
            for _ in range(self._num_steps):
                self._bare.step()
            gc.disable()
            self._end(BARE)
        if not self._may_go_on():
            return False
        self._begin()
        self._steps_left = self._num_steps - 1
        return True

    def _may_go_on(self) -> bool:
        if self._num_done == len(self._order):
            return False
        is_between_pairs = self._num_done % 2 == 0
        return not is_between_pairs or all_ranks(
            self._num_done <= 2 or time.monotonic() < self._until
        )

    def _begin(self) -> None:
        if self._num_done % 2 == 0 and self._num_done:
            self._tell(f"pair {self._num_done // 2} of {len(self._order) // 2 - 1}")
        self._clocks = usage.cpu_clocks()
        dist.barrier()
        self._started = time.perf_counter()

    def _end(self, side: str) -> None:
        seconds = (time.perf_counter() - self._started) / self._num_steps
        self._started = 0.0
        if self._num_done >= 2:
            self.seconds[side].append(seconds)
            self.cpu.append(usage.since(self._clocks))
        self._num_done += 1


def measure(
    tell: Callable[[str], None],
    *,
    model: str,
    folder: str,
    num_pairs: int,
    num_steps: int,
    budget_seconds: float,
) -> dict[str, Any]:
    """Seconds of a step of this rank, block by block."""
    init_logger()
    config = trainer_config(model, folder, num_steps)
    sl.init_structured_logger(source="training", output_dir=folder)
    trainer = PacedTrainer(config)
    try:
        bare = bare_loop(trainer, num_steps * (num_pairs + 1))
        pace = Pace(
            bare,
            num_pairs=num_pairs,
            num_steps=num_steps,
            budget_seconds=budget_seconds,
            tell=tell,
        )
        start = [_local(parameter).detach().clone() for parameter in bare.model.parameters()]
        trainer.turn = pace.next
        trainer.train()
        apart = distance(trainer.model_parts[0], bare.model, start)
    finally:
        trainer.close()
    trainer.peers.close()
    if not apart < _SAME:
        raise RuntimeError(
            f"trainer and bare loop ended {apart:.3f} of their way apart, so they did not do the same"
        )
    return {
        "seconds": pace.seconds,
        "cpu": pace.cpu,
        "apart": apart,
        "num_tokens": config.training.num_tokens_per_microbatch_per_dp_rank,
    }


def trainer_config(model: str, folder: str, num_steps: int) -> Trainer.Config:
    """The recipe ``llama3_jargon`` with another model, that logs once in a block and never saves."""
    recipe = config_of(SIZES[model], folder)
    # The bare loop has the plain loss: in chunks it needs less memory and more time.
    recipe.loss = CrossEntropyLoss.Config()
    recipe.training.steps = 1_000_000  # it is told when to stop
    recipe.checkpoint.interval = 1_000_000
    recipe.metrics.log_freq = num_steps
    assert isinstance(recipe.dataloader, GrainDataLoader.Config)
    recipe.dataloader.cache_dir = f"{folder}/cache"
    return recipe


def bare_loop(trainer: PacedTrainer, num_batches: int) -> BareLoop:
    """A loop that starts where ``trainer`` does."""
    config = trainer.config
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = assembly.build_model(config)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model.tok_embeddings, mesh=mesh)
    fully_shard([model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
        for own, theirs in zip(
            model.parameters(), trainer.model_parts[0].parameters(), strict=True
        ):
            _local(own).copy_(_local(theirs))
    settings = trainer.optimizers.optimizers[0].param_groups[0]
    names = ("lr", "betas", "eps", "weight_decay", "fused", "foreach")
    return BareLoop(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), **{name: settings[name] for name in names}),
        batches=iter(_batches(trainer, num_batches)),
        max_norm=config.training.max_norm,
    )


def _batches(trainer: PacedTrainer, num_batches: int) -> Sequence[Batch]:
    """The first batches that the trainer is going to see, in memory."""
    share = assembly.DataShare(
        dp_world_size=trainer.dp_degree,
        dp_rank=trainer.dp_rank,
        tokenizer=trainer.tokenizer,
        num_tokens_per_batch=trainer.config.training.num_tokens_per_microbatch_per_dp_rank,
    )
    loader = assembly.build_dataloader(trainer.config, share)
    rows = iter(loader)
    found = []
    for _ in range(num_batches):
        inputs, labels = next(rows)
        found.append((inputs["input"].clone(), inputs["positions"].clone(), labels.clone()))
    loader.close()
    return found


@torch.no_grad()
def distance(left: nn.Module, right: nn.Module, start: Sequence[torch.Tensor]) -> float:
    """How far this rank's parameters are apart, over how far they went since ``start``."""
    apart = moved = 0.0
    for a, b, origin in zip(left.parameters(), right.parameters(), start, strict=True):
        apart += (_local(a) - _local(b)).double().square().sum().item()
        moved += (_local(b) - origin).double().square().sum().item()
    return (apart / moved) ** 0.5


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
