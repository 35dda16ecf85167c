"""What a rank keeps for itself survives a restart: generators bit for bit, and registered state.

The trainer here draws from every generator in each forward pass, on each rank from a stream of its
own, so that its losses show any stream that is one draw off.
"""

import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import dropout
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.distributed.activation_checkpoint import FullAC

from tests.ranks.pool import run_on_ranks
from tests.ranks.tiny_run import CrashError, digest, make_config, NUM_STEPS, Recorded

STOP = 5


class Draws:
    """Rank-local state that grows: all numbers drawn so far."""

    def __init__(self) -> None:
        self.numbers: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.numbers = state_dict["numbers"]


class Drawing(Recorded):
    """A run whose losses depend on every generator."""

    @dataclass(kw_only=True, slots=True)
    class Config(Recorded.Config):
        pass

    def __init__(self, config: Any, *, crash_after: int | None, draws_outside_torch: bool) -> None:
        super().__init__(config, crash_after=crash_after)
        self.draws = Draws()
        self.rank_state.register("draws", self.draws)
        self.draws_outside_torch = draws_outside_torch
        self.seed(100 + dist.get_rank())
        for block in self.model_parts[0].layers.values():
            block.register_forward_hook(self.disturb)

    def seed(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def disturb(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        output = dropout(output, 0.25)
        if self.draws_outside_torch:
            # Both of these keep every second value for the next call.
            self.draws.numbers += [random.gauss(1.0, 0.01), 0.01 * np.random.standard_normal()]
            output = output * self.draws.numbers[-2] + self.draws.numbers[-1]
        return output


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@dataclass
class Seen:
    losses: dict[int, float]
    weights: dict[str, str]
    numbers: list[float]
    after: tuple[float, float, float]
    """The next number of each generator."""
    lines: list[str]


def train(
    folder: str,
    name: str,
    crash_after: int | None = None,
    *,
    torch_only: bool = False,
    **options: Any,
) -> Seen:
    """A run of ``Drawing`` on this rank."""
    lines = Lines()
    logging.getLogger().addHandler(lines)
    logging.getLogger().setLevel(logging.INFO)
    config = make_config(Path(folder), name, **options)
    if torch_only:
        config.activation_checkpoint = FullAC.Config()
    trainer = Drawing(config, crash_after=crash_after, draws_outside_torch=not torch_only)
    try:
        trainer._train()
    except CrashError:
        pass
    after = random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))
    trainer.close()
    assert isinstance(trainer.checkpointer, CheckpointManager)
    weights = trainer.checkpointer.states["model"].state_dict()
    seen = Seen(
        losses=trainer.trace.losses,
        weights={key: digest(value) for key, value in weights.items()},
        numbers=trainer.draws.numbers,
        after=after,
        lines=[line for line in lines.seen if "random number generators" in line],
    )
    trainer.peers.close()
    dist.destroy_process_group()
    return seen


def straight_and_resumed(folder: str) -> list[Seen]:
    whole = train(folder, "straight")
    plain = [whole, train(folder, "checkpointing", torch_only=True)]
    for mode in ("disabled", "async"):
        train(folder, mode, STOP, async_mode=mode, interval=STOP)
        plain.append(train(folder, mode, async_mode=mode, interval=STOP))
    train(folder, "ac", STOP, torch_only=True, interval=STOP)
    plain.append(train(folder, "ac", torch_only=True, interval=STOP))
    return plain


@pytest.mark.ranks
def test_a_resumed_run_draws_what_the_uninterrupted_one_would_have_drawn(tmp_path: Path) -> None:
    per_rank = run_on_ranks(2, straight_and_resumed, str(tmp_path), init=False)
    for whole, whole_ac, disabled, background, resumed_ac in per_rank:
        for resumed, straight in ((disabled, whole), (background, whole), (resumed_ac, whole_ac)):
            assert sorted(resumed.losses) == list(range(STOP + 1, NUM_STEPS + 1))
            assert resumed.losses.items() <= straight.losses.items()
            assert resumed.weights == straight.weights
            assert resumed.numbers == straight.numbers
            assert resumed.after == straight.after
            assert resumed.lines == []
    (first, *_), (second, *_) = per_rank
    assert first.after != second.after and first.numbers != second.numbers
