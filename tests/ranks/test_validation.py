"""A run that validates trains and saves, bit for bit, as the same run without validation."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from tests.ranks.pool import run_on_ranks
from tests.ranks.tiny_run import make_config, run, Trace

pytestmark = pytest.mark.ranks

NUM_STEPS = 4
Keys = set[str]


def _without_and_with(folder: str) -> list[tuple[Trace, Keys]]:
    """The trace of each run, and what its last checkpoint holds."""
    found = []
    for validates in (False, True):
        config = make_config(Path(folder), f"validates-{validates}", interval=2)
        config.training.steps = NUM_STEPS
        if validates:
            config.validator.enable, config.validator.freq, config.validator.steps = True, 2, 3
            # The same rows in another order than the training meets them.
            changes: dict[str, Any] = {"seed": 5}
            config.validator.dataloader = replace(config.dataloader, **changes)
        trace = run(config)
        checkpoint = Path(config.dump_folder) / "checkpoint" / f"step-{NUM_STEPS}"
        metadata = FileSystemReader(checkpoint).read_metadata()
        found.append((trace, set(metadata.state_dict_metadata)))
    return found


def test_validation_changes_neither_the_training_nor_its_checkpoints(tmp_path: Path) -> None:
    [[(plain, keys), (validated, its_keys)]] = run_on_ranks(
        1, _without_and_with, str(tmp_path), init=False
    )
    losses = validated.validation_losses
    assert sorted(losses) == [1, 2, 4] and plain.validation_losses == {}
    # Far from one another, so each is of the model of its step; and all are numbers.
    assert len(set(losses.values())) == 3 and all(map(math.isfinite, losses.values()))
    assert sorted(plain.losses) == list(range(1, NUM_STEPS + 1))
    validated.validation_losses = {}
    assert validated == plain
    assert its_keys == keys and "dataloader.next_row" in keys
