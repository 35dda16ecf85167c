"""What a rank keeps for itself survives a restart: generators bit for bit, and registered state.

The trainer here draws from every generator in each forward pass, on each rank from a stream of its
own, so that its losses show any stream that is one draw off.
"""

import logging
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import dropout
from torchtitan.distributed.activation_checkpoint import FullAC

from tests.ranks.pool import run_on_ranks
from tests.ranks.tiny_run import CrashError, digest, make_config, NUM_STEPS, Recorded
from tests.unit_tests.components.checkpointer.ways import ASYNC, DISABLED, over, TC_WAITING, Way

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

    def __init__(
        self, config: Any, *, crash_after: int | None, torch_only: bool, seed: int
    ) -> None:
        super().__init__(config, crash_after=crash_after)
        self.drawn = Draws()
        self.rank_state.register("draws", self.drawn)
        self.torch_only = torch_only
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        for block in self.model_parts[0].layers.values():
            # Inside of what activation checkpointing runs twice.
            inner = getattr(block, "_checkpoint_wrapped_module", block)
            inner.register_forward_hook(self.disturb)

    def disturb(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        output = dropout(output, 0.25)
        if not self.torch_only:
            # Both of these keep every second value for the next call.
            self.drawn.numbers += [random.gauss(1.0, 0.01), 0.01 * np.random.standard_normal()]
            output = output * self.drawn.numbers[-2] + self.drawn.numbers[-1]
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
    recomputes: bool = False,
    same_seed: bool = False,
    saves_rank_state: bool = True,
    **options: Any,
) -> Seen:
    """A run of ``Drawing`` on this rank, seeded apart from the other ranks if not ``same_seed``."""
    lines = Lines()
    logging.getLogger().addHandler(lines)
    logging.getLogger().setLevel(logging.INFO)
    config = make_config(Path(folder), name, **options)
    if recomputes:
        config.activation_checkpoint = FullAC.Config()
    seed = 100 if same_seed else 100 + int(os.environ["RANK"])
    trainer = Drawing(config, crash_after=crash_after, torch_only=torch_only, seed=seed)
    manager: Any = trainer.checkpointer
    if not saves_rank_state:
        del manager.states["rank_state"]
    try:
        trainer._train()
    except CrashError:
        pass
    after = random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))
    trainer.close()
    weights = manager.states["model"].state_dict()
    seen = Seen(
        losses=trainer.trace.losses,
        weights={key: digest(value) for key, value in weights.items()},
        numbers=trainer.drawn.numbers,
        after=after,
        lines=[line for line in lines.seen if "random number generators" in line],
    )
    trainer.peers.close()
    dist.destroy_process_group()
    return seen


def straight_and_resumed(folder: str) -> list[Seen]:
    seen = [train(folder, "straight"), train(folder, "torch", torch_only=True)]
    for way in (DISABLED, ASYNC, TC_WAITING):
        train(folder, way.name, STOP, interval=STOP, **way.settings)
        seen.append(train(folder, way.name, interval=STOP, **way.settings))
    for crash_after in (STOP, None):
        last = train(folder, "ac", crash_after, torch_only=True, recomputes=True, interval=STOP)
    return [*seen, last]


def saved_by(folder: str, way: Way) -> None:
    train(folder, "run", STOP, interval=STOP, **way.settings)


def resumed_twice(folder: str, way: Way) -> list[Seen]:
    return [train(folder, "run", STOP + 2, load_only=True, **way.settings) for _ in range(2)]


def loaded_apart_and_alike(folder: str, way: Way) -> list[Seen]:
    # Stopping where the checkpoint was taken shows the generators as they were restored.
    return [
        train(folder, "run", STOP, load_only=True, same_seed=same, **way.settings)
        for same in (False, True)
    ]


def loads_without_rank_state(folder: str, way: Way) -> list[Seen]:
    """A fresh start, then loads that have no generators to restore, each without a step."""
    train(folder, "old", STOP, interval=STOP, saves_rank_state=False, **way.settings)
    train(folder, "new", STOP, interval=STOP, **way.settings)
    weights = f"{folder}/new/checkpoint/step-{STOP}"
    at_once = {"load_only": True, **way.settings}
    return [
        train(folder, "fresh", 0, **at_once),
        train(folder, "old", STOP, **at_once),
        train(folder, "new", STOP, exclude_from_loading=["rank_state"], **at_once),
        train(folder, "tuned", 0, initial_load_path=weights, **at_once),
        train(folder, "new", STOP, **at_once, saves_rank_state=False),
    ]


@pytest.mark.ranks
def test_a_resumed_run_draws_what_the_uninterrupted_one_would_have_drawn(tmp_path: Path) -> None:
    per_rank = run_on_ranks(2, straight_and_resumed, str(tmp_path), init=False)
    for whole, torch_only, *ways, recomputed in per_rank:
        # The last one shows that blocks that are computed twice draw the same numbers twice.
        pairs = [*((resumed, whole) for resumed in ways), (recomputed, torch_only)]
        for resumed, straight in pairs:
            assert sorted(resumed.losses) == list(range(STOP + 1, NUM_STEPS + 1))
            assert resumed.losses.items() <= straight.losses.items()
            assert resumed.weights == straight.weights
            assert resumed.numbers == straight.numbers
            assert resumed.after == straight.after
            assert resumed.lines == []
    (first, *_), (second, *_) = per_rank
    assert first.after != second.after and first.numbers != second.numbers


@pytest.mark.ranks
@over(DISABLED, TC_WAITING)
def test_another_number_of_ranks_draws_anew_always_the_same_and_says_so(
    tmp_path: Path, way: Way
) -> None:
    run_on_ranks(2, saved_by, str(tmp_path), way, init=False)
    [(first, again)] = run_on_ranks(1, resumed_twice, str(tmp_path), way, init=False)
    assert len(first.losses) == 2
    assert (first.losses, first.after) == (again.losses, again.after)
    assert len(first.lines) == 1
    for part in ("on 2 ranks and this run has 1", "python, numpy, torch", "built it: draws"):
        assert part in first.lines[0]


@pytest.mark.ranks
@over(DISABLED, TC_WAITING)
def test_ranks_that_shared_a_generator_go_on_sharing_one(tmp_path: Path, way: Way) -> None:
    run_on_ranks(1, saved_by, str(tmp_path), way, init=False)
    (apart, alike), (other_apart, other_alike) = run_on_ranks(
        2, loaded_apart_and_alike, str(tmp_path), way, init=False
    )
    assert alike.after == other_alike.after == apart.after, "rank 0 leads in all of these"
    assert all(here != there for here, there in zip(apart.after, other_apart.after, strict=True))
    assert len(apart.lines) == 1 and other_apart.lines == []


@pytest.mark.ranks
@over(DISABLED, TC_WAITING)
def test_generators_stay_as_seeded_where_no_state_of_ranks_is_loaded(
    tmp_path: Path, way: Way
) -> None:
    [runs] = run_on_ranks(1, loads_without_rank_state, str(tmp_path), way, init=False)
    fresh, from_old, excluded, tuned, without = runs
    for loaded in (from_old, excluded, tuned, without):
        assert loaded.after == fresh.after
    # Only the older checkpoint is worth a line; and neither kind is taken for an export.
    assert [len(run.lines) for run in runs] == [0, 1, 0, 0, 0]
    assert "older" in from_old.lines[0]
