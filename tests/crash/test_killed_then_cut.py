"""A run is killed, another one goes on from what it has left, and then the power is cut.

A kill leaves all names that were given, a power cut only those that were synced. So what a run goes on from
may be there in the memory of the system alone, and the run must not delete what is older before it has seen
to that.

    history of a run up to a rename -> its tree -> history of the next run in it
                                    -> one disk on which both have happened -> what a power cut leaves of it
"""

from pathlib import Path

import pytest
from torchtitan.tools import disk

from tests.crash.checking import Checker
from tests.crash.model import as_written, DiskModel
from tests.crash.operations import Kind, Operation, read_log
from tests.crash.promises import Promises
from tests.crash.recording import RecordingDisk
from tests.crash.scenarios import evenly
from tests.crash.small_run import SmallRun
from tests.crash.tree import Directory, EMPTY, lay_out, Tree
from tests.unit_tests.components.checkpointer.ways import DISABLED, over, TC_WAITING, Way

pytestmark = pytest.mark.usefixtures("one_rank")


ABOVE = ("runs", "mine")
"""The folder of the run below the root: what is made on the way there is recorded as well."""


def history(root: Path, way: Way, by: str, *steps: int) -> list[Operation]:
    """What a run does that goes on from what is in ``root`` and saves ``steps``."""
    recording = RecordingDisk(str(root), f"{root}.log")
    with disk.using(recording):
        folder = root
        for name in ABOVE:
            # As others in the trainer do, which keep a config or metrics there: without any sync.
            folder /= name
            if not folder.exists():
                recording.mkdir(str(folder))
        run = SmallRun(folder, way, by=by, note=recording.note)
        if by != "first":
            run.load()
        run.delete_before_writing()
        for step in steps:
            run.save(step)
        run.close()
    return read_log(f"{root}.log")


def killed_at(history: list[Operation]) -> list[int]:
    """How much had happened: evenly chosen, and wherever a name of the last step may not be synced yet."""
    last = max(number for number, each in enumerate(history) if each.path == "begun")
    named = [number for number, each in enumerate(history) if each.kind is Kind.RENAME]
    made = [number for number, each in enumerate(history) if each.kind is Kind.MKDIR]
    some = evenly(range(len(history)), 5)
    return sorted(
        {
            number + 1
            for number in (*some, *made[:3], *named)
            if number > last or number not in named
        }
    )


def below(tree: Tree) -> Tree:
    """The folder of the run in ``tree``."""
    for name in ABOVE:
        found = tree.entries.get(name, EMPTY)
        assert isinstance(found, Directory)
        tree = found
    return tree


@over(DISABLED, TC_WAITING)
def test_what_a_run_goes_on_from_is_durable_before_anything_older_is_deleted(
    way: Way, tmp_path: Path
) -> None:
    (tmp_path / "root").mkdir()
    first = history(tmp_path / "root", way, "first", 2, 4)
    checker = Checker.of(way, tmp_path)
    checked = set[tuple[bytes, Promises]]()
    for count in killed_at(first):
        model = DiskModel()
        for each in first[:count]:
            model.apply(each)
        again = tmp_path / f"again-{count}"
        lay_out(model.tree(), again)
        done = first[:count]
        for each in history(again, way, "second", 6):
            model.apply(each)
            done.append(each)
            # With the power all names are gone that were not synced.
            tree, promises = below(model.tree(as_written, ())), Promises().after(done)
            if (tree.digest, promises) in checked:
                continue
            checked.add((tree.digest, promises))
            try:
                checker.check(tree, promises)
            except AssertionError as error:
                pytest.fail(f"killed after {first[count - 1]}, then cut after {each}: {error}")
    assert len(checked) > 20
