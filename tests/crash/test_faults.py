"""Whatever a disk refuses, at any operation: a save is good or clearly failed, and nothing is lost by it.

EIO and ENOSPC, for once, twice or from then on; with nothing done, with all of it done, with half. A
run goes on or ends with one error, and a start afterwards finds all that was promised. Without more ado
some faults of each story are tried, evenly chosen; ``--crash-points all`` tries all of them.
"""

import errno
import itertools
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from torchtitan.tools import disk

from tests.crash.checking import Checker
from tests.crash.faults import Fault, Faults, faults_at, FaultyDisk, few_writes, How, Place
from tests.crash.listening import Lines
from tests.crash.model import as_synced, DiskModel
from tests.crash.operations import append, Kind, Operation, read_log
from tests.crash.points import crash_points, KILLED
from tests.crash.promises import ACKNOWLEDGED
from tests.crash.recording import RecordingDisk
from tests.crash.scenarios import Earlier, evenly, RESUMED
from tests.crash.stories import STORIES
from tests.crash.tree import lay_out, Tree
from tests.crash.troubled import (
    is_nothing_to_go_on_from,
    Life,
    owed_after,
    RAISE,
    RunEndedError,
    TROUBLE,
    TroubledStage,
    WARN,
)
from tests.unit_tests.components.checkpointer.ways import DISABLED, TC_WAITING, Way

pytestmark = pytest.mark.usefixtures("one_rank")

TOLD = ("first saves", "saved again", "last save", "last weights", "gone back", "expired", RESUMED)
_NUM_KILLED = 2
_FAULTS_PER_POINT = 1 / 6
"""A fault takes longer than a crash point, and is worth more: it is tried with a run that lives."""

of_each_story = pytest.mark.parametrize("story", TOLD)
_numbers = itertools.count()
in_each_way = pytest.mark.parametrize("way", [DISABLED, TC_WAITING], ids=str)


@dataclass(frozen=True)
class Trial:
    """One story with one fault."""

    story: str
    way: Way
    fault: Fault | None = None
    policy: str = RAISE
    start: Earlier = Earlier()
    """What a run before it has left."""

    def __str__(self) -> str:
        return f"{self.story}, {self.way}, on_save_failure {self.policy}: {self.fault}"

    def play(self, root: Path) -> tuple[Faults, list[Operation]]:
        """Live through it in ``root``, which is made; what has failed, and what was done and said."""
        lay_out(self.start.left, root)
        append(f"{root}.log", self.start.operations)
        faults = Faults(self.fault)
        recording = RecordingDisk(str(root), f"{root}.log")
        life = Life(faults, self.policy, recording.note)
        with disk.using(FaultyDisk(str(root), faults, recording)):
            try:
                STORIES[self.story](TroubledStage(self.way, recording, life=life))
            except RunEndedError:
                pass
        return faults, read_log(f"{root}.log")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with TemporaryDirectory(prefix="faults-", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def trials(story: str, way: Way, place: Path) -> list[Trial]:
    """Each fault at each operation of ``story``, by turns of a run that goes on and of one that ends."""
    found = []
    for start in _killed(way, place) if story == RESUMED else [Earlier()]:
        faults, _ = Trial(story, way, start=start).play(place / f"{next(_numbers)}/root")
        for number, at in enumerate(few_writes(faults.seen)):
            for turn, fault in enumerate([*faults_at(at), *_twice(at)]):
                policy = (RAISE, WARN)[(number + turn) % 2]
                found.append(Trial(story, way, fault, policy, start))
    return found


def _killed(way: Way, place: Path) -> Iterator[Earlier]:
    """What kills in the middle of other stories leave."""
    for story in ("first saves", "saved again"):
        _, operations = Trial(story, way).play(place / f"{next(_numbers)}/root")
        killed = [each for each in crash_points(operations) if each.variant == KILLED]
        for point in evenly(killed[len(killed) // 2 :], _NUM_KILLED):
            # As after a start of the machine: what is there is durable.
            yield Earlier(point.notes, start=point.tree, left=point.tree)


def _twice(at: Place) -> Iterator[Fault]:
    """Where a failed save cleans up, something is refused once more."""
    for again in (1, 2, 3, 5):
        yield Fault(at, How.DONE if again % 2 else How.REFUSED, errno.EIO, again=again)


def check(trial: Trial, place: Path) -> bool:
    """Live through ``trial`` and start again after it; whether its fault has come."""
    # A run that has not been closed, as one that has failed a check, still holds its own.
    number = next(_numbers)
    root = place / f"{number}/root"
    with Lines() as lines:
        try:
            faults, operations = trial.play(root)
            checker = Checker.of(trial.way, root.parent / "checked")
            assert trial.fault is not None
            if trial.fault.at.kind in (Kind.SYNC, Kind.SYNC_DIRECTORY):
                _check_power_cut(operations, trial.start.start, checker)
            owed = owed_after(operations)
            if not is_nothing_to_go_on_from(owed):
                checker.check_folder(root, owed, steps=1 + number % 2)
            return faults.has_come
        except Exception as error:
            raise AssertionError(
                f"{trial}\n{type(error).__name__}: {error}\n\nlogged:\n{lines}"
            ) from error
        finally:
            shutil.rmtree(root.parent, ignore_errors=True)


def _check_power_cut(operations: list[Operation], start: Tree, checker: Checker) -> None:
    """Cut the power when the first save after a sync that failed is told to be good."""
    model, has_failed = DiskModel(start), False
    for number, each in enumerate(operations):
        model.apply(each)
        has_failed |= each.path == TROUBLE and each.kind is Kind.NOTE
        if has_failed and each.kind is Kind.NOTE and each.path == ACKNOWLEDGED:
            tree, owed = model.tree(as_synced, ()), owed_after(operations[: number + 1])
            if not is_nothing_to_go_on_from(owed):
                checker.check(tree, owed)
            return


@of_each_story
@in_each_way
def test_a_fault_costs_no_more_than_the_save_that_it_falls_into(
    story: str,
    way: Way,
    place: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    wanted = request.config.getoption("--crash-points")
    found = trials(story, way, place)
    share = math.inf if wanted == "all" else wanted * _FAULTS_PER_POINT / (2 * len(TOLD))
    chosen = found if math.isinf(share) else evenly(found, math.ceil(share))
    is_odd = [each for each in found if each.fault and each.fault.number == errno.EINVAL]
    chosen += [each for each in is_odd[len(chosen) % 3 :: 7] if each not in chosen][:1]
    record_property("faults", [f"{story}, {way}", len(chosen), len(found)])
    missed = [trial for trial in chosen if not check(trial, place)]
    # Threads may do a few things in another order than when they were counted.
    assert len(missed) < 0.1 * len(chosen), "never met: " + "; ".join(map(str, missed))
