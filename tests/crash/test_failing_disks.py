"""Disks that fill or become read-only in the middle of anything: the run saves again, and resumes.

tests/ranks/test_full_disk.py has what is said of it. Here it is any moment of a save or a deletion that is
hit, by any process, with retention; and it is a start after that in which all has to be as it should.
"""

import os
import random
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torchtitan.components.checkpointer import room_check
from torchtitan.components.checkpointer.agreement import gather
from torchtitan.components.checkpointer.integrity.manifest import RunDescription
from torchtitan.tools.disk import using

from tests.crash.failing_disks import disk_with_view, FailingDisk, Trouble
from tests.crash.killed_checks import check_ends, Survival
from tests.crash.killed_runs import (
    KEPT,
    OF_THE_RUN,
    start,
    started,
    tell,
    tell_newest,
    train_and_save,
)
from tests.crash.moments import draw_moment, Moment
from tests.ranks.steering import await_end_of_save
from tests.unit_tests.components.checkpointer.runs import build_run
from tests.unit_tests.components.checkpointer.ways import ASYNC, DISABLED, PINNED, TC, Way

pytestmark = pytest.mark.ranks

FULL, READ_ONLY = "full", "read-only"
SAVES_IN_TROUBLE = 2
SAVES_AFTER = 2

THROUGH = "through"
"""What a rank tells that has come to its end."""


def go_through_trouble(way: Way, moment: Moment, trouble: Trouble, notes: Path) -> None:
    """On each rank: save through the trouble and a little longer, and be killed."""
    os.environ[OF_THE_RUN] = str(trouble.disk)
    rank, pids = dist.get_rank(), tuple(gather(os.getpid()))
    patient = {"on_save_failure": "warn", "max_failed_saves": 2 * SAVES_IN_TROUBLE + 1}
    with (
        using(FailingDisk(notes, rank, pids, moment, trouble)),
        # A tmpfs counts what was deleted as free at once.
        patch.object(room_check, "_LATE_SECONDS", 0),
    ):
        run = build_run(trouble.disk, keep_latest_k=KEPT, **patient, **way.settings)
        run.manager.describe_run(RunDescription({}, {}))
        while not any(gather((notes / "0").exists())):
            train_and_save(run, notes)
        for _ in range(SAVES_IN_TROUBLE):
            train_and_save(run, notes)
        await_end_of_save(run.manager)
        dist.barrier()  # what another rank still does is to be done in trouble
        if rank == 0:
            trouble.end()
        dist.barrier()
        for _ in range(SAVES_AFTER):
            train_and_save(run, notes)
        await_end_of_save(run.manager)
        tell_newest(run, notes)
        tell(notes, THROUGH, run.step)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("way", "what"),
    [(DISABLED, FULL), (PINNED, FULL), (ASYNC, READ_ONLY), (TC, READ_ONLY)],
    ids=str,
)
def test_a_disk_that_fails_for_a_while_costs_the_saves_of_that_while(
    tmp_path: Path, way: Way, what: str, kills_seed: int, states: list[list[str]]
) -> None:
    draw = random.Random(f"{kills_seed} {way} {what}")
    moment = draw_moment(draw, has_writer=way.has_writer, num_saves=8)
    with disk_with_view(tmp_path) as (disk, view):
        trouble = Trouble(disk, view if what == READ_ONLY else None)
        survival = Survival(disk, way, states)
        begun = started(tmp_path / "start-0", go_through_trouble, way, moment, trouble)
        story = f"KILLS_SEED={kills_seed}, {way}, {what} {moment}: {begun}"
        print(story)
        assert len(begun.steps(THROUGH)) == 2, story
        survival.after(begun, story)
        # It saves again at once, and what the trouble cost is what was saved meanwhile.
        begun_steps = sorted({*begun.steps("begun")})
        assert {*begun_steps[-SAVES_AFTER:]} <= {*survival.acknowledged}, story
        # The moment came in the save that is left out here, or while the one before was written.
        before = begun_steps[: -SAVES_AFTER - SAVES_IN_TROUBLE - 2]
        assert {*before} <= {*survival.acknowledged}, story
        begun = start(disk, tmp_path / "start-1", way)
        story = f"{story}\nand then: {begun}"
        check_ends(begun, way, story)
        survival.after(begun, story)
        survival.in_the_end(story)
