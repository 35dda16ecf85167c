"""Nothing that lies in a checkpoint runs, wherever it was planted, and the error names the file.

Also where no digest stands in the way: in a checkpoint without a manifest, and in one whose manifest
was made to fit.
"""

import logging
from pathlib import Path

import pytest
import torch.distributed as dist
from torchtitan.components.checkpointer.errors import CheckpointDamagedError
from torchtitan.components.checkpointer.integrity.manifest import MANIFEST

from tests.fixtures.make_checkpoints import build
from tests.ranks.damage import Step
from tests.ranks.plants import PLANTS, sign
from tests.ranks.pool import run_on_ranks
from tests.unit_tests.components.checkpointer.ways import DISABLED, TC_WAITING, Way

CONDITIONS = ("foreign", "made to fit", "as it was")
"""What becomes of the manifest."""


def save_two(folder: Path, way: Way) -> None:
    run = build(folder, way, seed=1)
    for step in (1, 2):
        run.train_step()
        run.manager.save(step)
    run.manager.close()


def attack(folder: Path, way: Way, plants: str) -> list[str]:
    """Plant each of ``PLANTS[plants]`` and load; what went wrong."""
    save_two(folder, way)
    dist.barrier()
    logging.disable(logging.WARNING)
    step, trace = Step.of(folder / "checkpoint" / "step-2"), folder / "trace"
    wrong = []
    for place, plant in PLANTS[plants].items():
        for condition in CONDITIONS:
            if place == "manifest" and condition != "as it was":
                continue
            told = [("", lambda: None)]
            if dist.get_rank() == 0:
                told = [plant(step.path, trace)]
                if condition == "foreign":
                    (step.path / MANIFEST).unlink()
                elif condition == "made to fit":
                    sign(step.path)
            dist.barrier()
            name = step.path / _shared(told[0][0])
            wrong += [
                f"{place}, {condition}: {problem}"
                for problem in _load(folder, way, name, condition)
            ]
            if trace.exists():
                wrong.append(f"{place}, {condition}: it ran")
            dist.barrier()
            if dist.get_rank() == 0:
                told[0][1]()
                if not trace.exists():
                    wrong.append(f"{place}, {condition}: what was planted does nothing")
                trace.rmdir()
                step.restore()
            dist.barrier()
    return wrong


def _shared(name: str) -> str:
    names = [name]
    dist.broadcast_object_list(names, src=0)
    return names[0]


def _load(folder: Path, way: Way, file: Path, condition: str) -> list[str]:
    run = build(folder, way, seed=2, load_only=True)
    wrong = []
    try:
        run.manager.load(2)
        wrong.append("it was loaded")
    except CheckpointDamagedError as error:
        if str(file.parent) not in str(error) or file.name not in str(error):
            wrong.append(f"{file.name} is not named: {error}")
        if condition != "as it was" and "os.makedirs" not in str(error):
            wrong.append(f"what it asks for is not named: {error}")
    except Exception as error:
        wrong.append(f"{type(error).__name__}: {error}")
    if run.manager.load() is not True or run.progress.values["step"] != 1:
        wrong.append(f"the run does not go on from step 1: {run.progress.values}")
    run.manager.close()
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "way", "plants"),
    [
        (1, DISABLED, "dcp"),
        (2, DISABLED, "dcp of rank 1"),
        (1, TC_WAITING, "tc"),
        (2, TC_WAITING, "tc of rank 1"),
    ],
    ids=list(PLANTS),
)
def test_a_planted_program_never_runs_and_its_file_is_named(
    tmp_path: Path, world_size: int, way: Way, plants: str
) -> None:
    for wrong in run_on_ranks(world_size, attack, tmp_path, way, plants, timeout_seconds=120):
        assert not wrong, "\n".join(wrong)
