"""What runs go through while their disk is recorded: each story is a function that all its ranks call.

Stage -> story -> SmallRun (real managers, in any of the ways) -> the log of the stage's disk
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torchtitan.components.checkpointer.deletions import PIN

from tests.crash.operations import read_log
from tests.crash.promises import PINNED, Promises
from tests.crash.recording import RecordingDisk
from tests.crash.small_run import SmallRun
from tests.unit_tests.components.checkpointer.ways import Way


@dataclass(frozen=True)
class Stage:
    """Where a story takes place."""

    way: Way
    disk: RecordingDisk

    def run(self, by: str, **settings: Any) -> SmallRun:
        """A run at step 0 that nobody has told to load yet."""
        return SmallRun(self.disk.root, self.way, by=by, note=self.disk.note, **settings)

    def pin(self, step: int) -> None:
        """Do what a user does who wants to keep a checkpoint."""
        if dist.get_rank() == 0:
            folder = f"{self.disk.root}/checkpoint/step-{step}"
            self.disk.create(f"{folder}/{PIN}").close()
            self.disk.sync_directory(folder)
            self.disk.note(PINNED, step)


def first_saves(stage: Stage) -> None:
    """A run begins, saves four times and keeps two."""
    run = stage.run("first", keep=2)
    assert not run.load()
    for step in range(1, 5):
        run.save(step)
    run.close()


def saved_again(stage: Stage) -> None:
    """A step is saved again that is there already."""
    run = stage.run("first", keep=3)
    run.load()
    run.save(1)
    run.save(2)
    run.save(2, by="second")
    run.save(3)
    run.close()


def last_save(stage: Stage) -> None:
    """A run comes to its end, saves everything then, and is given more steps."""
    _end_and_go_on(stage, 4)


def last_weights(stage: Stage) -> None:
    """The same, but the last save holds weights alone, so that its step is trained once more."""
    _end_and_go_on(stage, 3, last_save_model_only=True)


def _end_and_go_on(stage: Stage, next_step: int, **settings: Any) -> None:
    run = stage.run("first", keep=2, **settings)
    run.load()
    run.save(1)
    run.save(2)
    run.save(3, is_last=True)
    run.close()
    more = stage.run("second", keep=2)
    assert more.load()
    more.save(next_step)
    more.close()


def gone_back(stage: Stage) -> None:
    """A run is told to go on from an older step, and leaves a history behind."""
    run = stage.run("first", keep=0)
    run.load()
    for step in range(1, 5):
        run.save(step)
    run.close()
    other = stage.run("second", keep=2)
    assert other.load(2)
    other.save(3)
    other.save(4)
    other.close()


def expired(stage: Stage) -> None:
    """Several checkpoints expire at once, and one of them is pinned."""
    run = stage.run("first", keep=0)
    run.load()
    for step in range(1, 6):
        run.save(step)
    run.close()
    stage.pin(2)
    other = stage.run("second", keep=2)
    assert other.load()
    other.save(6)
    other.save(7)
    other.close()


def resumed(stage: Stage) -> None:
    """A run starts on what a crash has left, and saves twice."""
    owed = Promises().after(read_log(stage.disk.log))
    run = stage.run("resumed", keep=2)
    if run.load():
        # What follows is judged by what was loaded, so that has to be right.
        assert run.found() in owed.may_load, f"{run.found()} was loaded, and is none of {owed}"
    else:
        assert owed.may_begin_anew, f"nothing was loaded, and there should be one of {owed}"
    step = run.progress.values["step"]
    run.save(step + 1)
    run.save(step + 2)
    run.close()


Story = Callable[[Stage], None]
STORIES: dict[str, Story] = {
    story.__name__.replace("_", " "): story
    for story in (
        first_saves,
        saved_again,
        last_save,
        last_weights,
        gone_back,
        expired,
        resumed,
    )
}
