"""What a start after a crash must not meet is noticed, whatever it is."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.checking import Checker, PromiseBrokenError
from tests.crash.operations import note, Operation
from tests.crash.promises import Promises
from tests.crash.small_run import SmallRun
from tests.crash.tree import read_tree
from tests.unit_tests.components.checkpointer.ways import DISABLED, over, TC_WAITING, Way

pytestmark = pytest.mark.usefixtures("one_rank")
of_each_manager = over(DISABLED, TC_WAITING)

Harm = Callable[[Path], object]


def saved(folder: Path, way: Way, by: str = "first") -> list[Operation]:
    """What was said by a run that has saved the steps 1 and 2 below ``folder``."""
    said: list[Operation] = []

    def say(what: str, step: int, content: bytes) -> None:
        said.append(note(0, what, step, content))

    run = SmallRun(folder, way, by=by, note=say)
    run.load()
    run.save(1)
    run.save(2)
    run.close()
    return said


def complaint(tmp_path: Path, way: Way, harm: Harm) -> str:
    """What is said of a folder that ``harm`` has been done to since its run was closed."""
    said = saved(tmp_path / "saved", way)
    harm(tmp_path / "saved/checkpoint")
    checker = Checker.of(way, tmp_path)
    try:
        checker.check(read_tree(tmp_path / "saved"), Promises().after(said))
    except PromiseBrokenError as error:
        return str(error).partition("\n")[0]
    return ""


@of_each_manager
def test_a_folder_as_it_was_left_keeps_all_promises(tmp_path: Path, way: Way) -> None:
    assert complaint(tmp_path, way, lambda folder: None) == ""


HARMS: dict[str, tuple[str, Harm]] = {
    "the newest is gone": (
        "Saved(step=1, by='first', is_full=True) was loaded",
        lambda folder: shutil.rmtree(folder / "step-2"),
    ),
    "an older one is gone": (
        "Saved(step=1, by='first', is_full=True) is gone",
        lambda folder: shutil.rmtree(folder / "step-1"),
    ),
    "all are gone": ("nothing was loaded", shutil.rmtree),
    "the newest is put aside": (
        "was loaded",
        lambda folder: _moved(folder / "step-2", folder / "superseded/step-2"),
    ),
    "two have changed places": (
        "is damaged",
        lambda folder: (
            (folder / "step-1").rename(folder / "other"),
            (folder / "step-2").rename(folder / "step-1"),
            (folder / "other").rename(folder / "step-2"),
        ),
    ),
    "an older one is damaged": (
        "taken for checkpoints, and damaged: step-1",
        lambda folder: _flipped(_largest(folder / "step-1")),
    ),
    "the newest is damaged": (
        "CheckpointDamagedError",
        lambda folder: _flipped(_largest(folder / "step-2")),
    ),
    "something nobody knows is in a checkpoint": (
        "left behind: step-2/more",
        lambda folder: (folder / "step-2/more").touch(),
    ),
    "something nobody knows is in the folder": (
        "left behind: more",
        lambda folder: (folder / "more").mkdir(),
    ),
    "the lock cannot be read": (
        "Waiting up to 10 s",
        lambda folder: (folder / ".run.lock").touch(),
    ),
}


@of_each_manager
@pytest.mark.parametrize("harm", HARMS)
def test_harm_is_noticed(tmp_path: Path, way: Way, harm: str) -> None:
    said, act = HARMS[harm]
    assert said in complaint(tmp_path, way, act)


@of_each_manager
def test_the_right_step_of_another_history_is_not_taken_for_what_was_promised(
    tmp_path: Path, way: Way
) -> None:
    def replaced(folder: Path) -> None:
        saved(tmp_path / "other", way, by="second")
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "other/checkpoint", folder)

    assert "Saved(step=2, by='second', is_full=True) was loaded" in complaint(
        tmp_path, way, replaced
    )


def _moved(path: Path, to: Path) -> None:
    to.parent.mkdir()
    path.rename(to)


def _largest(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda path: path.stat().st_size * (path.suffix != ".json"))


def _flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
