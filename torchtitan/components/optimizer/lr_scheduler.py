"""Decide the learning rate of every step: warm up, stay, decay.

    factor
      1 |      __________________
        |    /                    \\
        |  /                        \\      lr of step s (from 0) = base lr * factor(s)
      0 |/____________________________\\
         warm-up      stable        decay

The one fact to know: the stable phase is one step longer than what is left of the total, so that the
last step still learns instead of running with a rate of ``min_lr_factor``. A checkpoint keeps the step
count alone; the rates themselves travel with the optimizer's state.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.lr_scheduler import LambdaLR

from torchtitan.components.optimizer.optimizer import OptimizersContainer
from torchtitan.config import Configurable
from torchtitan.config.violations import reject
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import logger

__all__ = ["LRSchedulersContainer"]

DecayType = Literal["linear", "sqrt", "cosine"]

# Progress of the decay, 0 < p <= 1, to the share of the rate that is left.
_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 1.0 - p,
    "sqrt": lambda p: 1.0 - math.sqrt(p),
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
}


class LRSchedulersContainer(Stateful, Configurable):
    """One scheduler per optimizer of a container, all at the same step."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        warmup_steps: int = 200
        """Steps over which the rate rises linearly to its full value; 0 starts at the full rate."""

        total_steps: int | None = None
        """Length of the schedule in steps; None takes the number of training steps. Later steps keep
        the rate at which the decay ended."""

        decay_ratio: float | None = None
        """Share of the total steps spent decaying, 0 to 1; 0 never decays, None decays from the end
        of the warm-up on."""

        decay_type: DecayType = "linear"
        """Shape of the decay."""

        min_lr_factor: float = 0.0
        """Share of the full rate at which the decay ends, 0 to 1."""

        def __post_init__(self) -> None:
            if self.warmup_steps < 0:
                reject(f"lr_scheduler.warmup_steps is {self.warmup_steps}; it must be 0 or more.")
            if self.total_steps is not None and self.total_steps <= 0:
                reject(
                    f"lr_scheduler.total_steps is {self.total_steps}; it must be greater than 0, or "
                    "unset to follow training.steps."
                )
            if self.decay_ratio is not None and not 0.0 <= self.decay_ratio <= 1.0:
                reject(f"lr_scheduler.decay_ratio is {self.decay_ratio}; it must be from 0 to 1.")
            if self.decay_type not in _DECAYS:
                reject(
                    f"lr_scheduler.decay_type is {self.decay_type!r}; choose one of {sorted(_DECAYS)}."
                )
            if not 0.0 <= self.min_lr_factor <= 1.0:
                reject(
                    f"lr_scheduler.min_lr_factor is {self.min_lr_factor}; it must be from 0 to 1."
                )

        def check(self, *, training_steps: int) -> list[str]:
            """What makes no sense for a run of ``training_steps``, one message each."""
            total = self.total_steps
            decays = self.decay_ratio is None or self.decay_ratio > 0
            if total is None or total >= training_steps or not decays or self.min_lr_factor > 0:
                return []
            return [
                f"lr_scheduler.total_steps is {total} and the rate decays to 0 there, so steps "
                f"{total + 1} to {training_steps} (training.steps) would learn nothing. Raise "
                "lr_scheduler.total_steps, leave it out, or set lr_scheduler.min_lr_factor."
            ]

        # The number of training steps is no setting of its own, so building needs it beside the config.
        def build(  # pyrefly: ignore[bad-override]
            self, *, optimizers: OptimizersContainer, training_steps: int
        ) -> "LRSchedulersContainer":
            """The schedulers of ``optimizers``; ``training_steps`` stands in for an unset total."""
            with sl.log_trace_span(f"{type(self).__qualname__}.build"):
                total = training_steps if self.total_steps is None else self.total_steps
                warmup, decay = _fit_phases(self, total)
                factor = functools.partial(
                    _lr_factor,
                    warmup_steps=warmup,
                    stable_steps=total + 1 - warmup - decay,
                    decay_steps=decay,
                    decay_type=self.decay_type,
                    min_lr_factor=self.min_lr_factor,
                )
                return LRSchedulersContainer(optimizers, factor)

    schedulers: list[LambdaLR]

    def __init__(self, optimizers: OptimizersContainer, lr_lambda: Callable[[int], float]) -> None:
        assert len(optimizers) > 0, "a learning rate schedule needs at least one optimizer"
        self.schedulers = [LambdaLR(optimizer, lr_lambda) for optimizer in optimizers]

    def __iter__(self) -> Iterator[LambdaLR]:
        return iter(self.schedulers)

    def __len__(self) -> int:
        return len(self.schedulers)

    def step(self) -> None:
        """Set the rates of the next step."""
        for scheduler in self.schedulers:
            scheduler.step()

    def get_metrics(self) -> dict[str, float]:
        """Current rates: ``lr/<optimizer class>``, with ``/<group index>`` where there are several."""
        metrics: dict[str, float] = {}
        for scheduler in self.schedulers:
            tag = f"lr/{type(scheduler.optimizer).__name__}"
            rates = [float(rate) for rate in scheduler.get_last_lr()]
            if len(rates) == 1:
                metrics[tag] = rates[0]
            else:
                metrics.update({f"{tag}/{index}": rate for index, rate in enumerate(rates)})
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The step count; all schedulers share it."""
        return {"last_epoch": self.schedulers[0].last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved step; the optimizers' own rates come with their own state."""
        last_epoch = int(state_dict["last_epoch"])
        for scheduler in self.schedulers:
            scheduler.last_epoch = last_epoch
            # torch counts the call in its constructor as a step.
            scheduler._step_count = last_epoch + 1
            # Not get_lr(): outside of step() torch warns about calling it.
            scheduler._last_lr = [
                base_lr * factor(last_epoch)
                for base_lr, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            ]


def _fit_phases(config: LRSchedulersContainer.Config, total: int) -> tuple[int, int]:
    """Warm-up and decay steps that fit into ``total`` together; says so when it must cut one."""
    warmup = min(config.warmup_steps, total)
    left = total - warmup
    wanted = left if config.decay_ratio is None else round(total * config.decay_ratio)
    # Every rank has the same schedule: one of them says so.
    if not dist.is_initialized() or dist.get_rank() == 0:
        if warmup < config.warmup_steps:
            logger.warning(
                f"lr_scheduler.warmup_steps is {config.warmup_steps}, but the schedule has {total} steps: "
                "warming up until its end."
            )
        elif wanted > left:
            logger.warning(
                f"{warmup} warm-up steps and {wanted} decay steps (lr_scheduler.decay_ratio "
                f"{config.decay_ratio}) exceed the {total} steps of the schedule: decaying over the last "
                f"{left}."
            )
    return warmup, min(wanted, left)


def _lr_factor(
    step: int,
    *,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    decay_type: DecayType,
    min_lr_factor: float,
) -> float:
    """Share of the base rate at ``step``, counted from 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_start = warmup_steps + stable_steps
    if step < decay_start or decay_steps == 0:
        return 1.0
    # Steps after the end of the schedule keep the last rate; a cosine would rise again.
    progress = min((step + 1 - decay_start) / decay_steps, 1.0)
    return min_lr_factor + (1.0 - min_lr_factor) * _DECAYS[decay_type](progress)
