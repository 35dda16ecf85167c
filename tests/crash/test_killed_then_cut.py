"""A run is killed, another one goes on from what it has left, and then the power is cut.

A kill leaves all names that were given, a power cut only those that were synced. So what a run goes on from
may be there in the memory of the system alone, and the run must not delete what is older before it has seen
to that.

    history of a run up to a rename -> its tree -> history of the next run in it
                                    -> one disk on which both have happened -> what a power cut leaves of it
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torchtitan.tools import disk

from tests.crash.checking import Checker
from tests.crash.model import as_written, DiskModel
from tests.crash.operations import Kind, Operation, read_log
from tests.crash.promises import Promises
from tests.crash.recording import RecordingDisk
from tests.crash.small_run import SmallRun
from tests.crash.tree import lay_out
from tests.unit_tests.components.checkpointer.ways import DISABLED, over, TC_WAITING, Way

pytestmark = pytest.mark.usefixtures("one_rank")


def history(root: Path, way: Way, by: str, *steps: int) -> list[Operation]:
    """What a run does that goes on from what is in ``root`` and saves ``steps``."""
    recording = RecordingDisk(str(root), f"{root}.log")
    with disk.using(recording):
        run = SmallRun(root, way, by=by, note=recording.note)
        if by != "first":
            run.load()
        delete_before_writing(run)
        for step in steps:
            run.save(step)
        run.close()
    return read_log(f"{root}.log")


def delete_before_writing(run: SmallRun) -> None:
    """Let deletions be as fast as they can be, where they would be over at any time."""
    make_ready = run.manager._make_ready

    def make_ready_and_wait(*args: Any, **keywords: Any) -> None:
        make_ready(*args, **keywords)
        run.manager.purge_queue.join()

    run.manager._make_ready = make_ready_and_wait


def killed_at(history: list[Operation], way: Way) -> Iterator[int]:
    """How much had happened where a kill leaves the last step complete by a name that is not synced."""
    last = max(number for number, each in enumerate(history) if each.path == "begun")
    for number, each in enumerate(history[last:], start=last):
        if each.kind is Kind.RENAME:
            yield number + 1


@over(DISABLED, TC_WAITING)
def test_what_a_run_goes_on_from_is_durable_before_anything_older_is_deleted(
    way: Way, tmp_path: Path
) -> None:
    (tmp_path / "root").mkdir()
    first = history(tmp_path / "root", way, "first", 2, 4)
    checker = Checker.of(way, tmp_path)
    num_checked = 0
    for count in killed_at(first, way):
        model = DiskModel()
        for each in first[:count]:
            model.apply(each)
        again = tmp_path / f"again-{count}"
        lay_out(model.tree(), again)
        done = first[:count]
        for each in history(again, way, "second", 6):
            model.apply(each)
            done.append(each)
            if each.kind is Kind.NOTE:
                continue
            # With the power all names are gone that were not synced.
            tree = model.tree(as_written, ())
            try:
                checker.check(tree, Promises().after(done))
            except AssertionError as error:
                pytest.fail(f"killed after {first[count - 1]}, then cut after {each}: {error}")
            num_checked += 1
    assert num_checked > 20
