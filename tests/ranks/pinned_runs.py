"""What the tests of saves through a writer process share."""

from pathlib import Path
from typing import Any

import torch

from tests.unit_tests.components.checkpointer.runs import build_run, Run
from tests.unit_tests.components.checkpointer.ways import stager_of, Way

# Starting a writer process takes 3 s of CPU; many at once on few cores take far longer.
PATIENCE = {"timeout_seconds": 240.0}


def writer_pid(run: Run) -> int:
    """The writer process of this rank."""
    stager = stager_of(run.manager)
    assert stager is not None and stager.writer_pid is not None
    return stager.writer_pid


def load_newest(folder: Path, way: Way) -> Any:
    """The step and the state that a restart goes on with."""
    run = build_run(folder, seed=77, load_only=True, **way.settings)
    run.manager.states["ballast"] = torch.zeros(2 * 2**20)
    assert run.manager.load()
    return run.step, run.snapshot()
