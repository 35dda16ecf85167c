"""A load that fills nothing is not measured, and two trainings that differ are not compared."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from benchmarks.harness.models import Run, SIZES
from benchmarks.saving.load import require_loaded, SUMS
from benchmarks.saving.sides import Side
from benchmarks.stepping import distance
from torch import nn

from tests.ranks.pool import run_on_ranks


class Idle:
    """A side that restores all but the last few tensors."""

    def __init__(self, run: Run, num_left_out: int) -> None:
        self._run, self._num_left_out = run, num_left_out
        self._saved = [tensor.clone() for tensor in run.tensors()]

    def load(self, step: int) -> None:
        pairs = list(zip(self._run.tensors(), self._saved, strict=True))
        for tensor, saved in pairs[: len(pairs) - self._num_left_out]:
            tensor.copy_(saved)


def load_less(folder: Path) -> list[str]:
    run = Run(SIZES["tiny"], str(folder))
    (folder / SUMS).write_text(json.dumps(run.sums()))
    said = []
    sides = [Idle(run, num_left_out) for num_left_out in (0, 3)]
    for side in sides:
        try:
            require_loaded(run, cast(Side, side), folder, "it")
            said.append("fine")
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.ranks
def test_a_load_that_leaves_something_out_is_found(tmp_path: Path) -> None:
    ((complete, incomplete),) = run_on_ranks(1, load_less, tmp_path, timeout_seconds=120)
    assert complete == "fine"
    assert "it: saved" in incomplete and "this would measure nothing" in incomplete


def test_the_distance_of_two_trainings_is_told_over_how_far_they_went() -> None:
    left, right = nn.Linear(3, 2), nn.Linear(3, 2)
    start = [torch.zeros_like(parameter) for parameter in right.parameters()]

    def fill(model: nn.Module, value: float) -> Any:
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)

    fill(left, 1.0)
    fill(right, 1.0)
    assert distance(left, right, start) == 0.0
    fill(left, 1.5)
    assert distance(left, right, start) == pytest.approx(0.5)
