"""One folder and both back ends, with real checkpoints: nobody begins again, and nothing is lost."""

import shutil
from pathlib import Path

import pytest
from torchtitan.components.checkpointer.discovery import Kind
from torchtitan.components.checkpointer.errors import CheckpointMismatchError

from tests.unit_tests.components.checkpointer.runs import build_run, names
from tests.unit_tests.components.checkpointer.ways import DISABLED, over, TC_WAITING, Way

OTHER = {DISABLED: TC_WAITING, TC_WAITING: DISABLED}

pytestmark = pytest.mark.usefixtures("one_rank")


def saved_by(way: Way, folder: Path, until: int, last_step: int | None = None) -> None:
    run = build_run(folder, **way.settings)
    run.train(until, last_step=last_step)
    run.manager.close()


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@over(DISABLED, TC_WAITING)
def test_a_start_in_a_folder_of_the_other_says_what_to_pass_and_changes_nothing(
    way: Way, tmp_path: Path
) -> None:
    other = OTHER[way]
    saved_by(other, tmp_path, 2)
    before = contents(tmp_path)
    run = build_run(tmp_path, **way.settings)
    for step in (-1, 1):
        with pytest.raises(CheckpointMismatchError) as caught:
            run.manager.load(step)
        assert f"Pass --checkpoint.backend {other.format.backend} to go on from" in str(
            caught.value
        )
    assert run.manager.newest_checkpoint() is None
    run.manager.close()
    assert contents(tmp_path) == before and run.step == 0


@over(DISABLED, TC_WAITING)
def test_a_run_goes_on_from_its_own_and_keeps_what_the_other_left(way: Way, tmp_path: Path) -> None:
    other = OTHER[way]
    saved_by(way, tmp_path / "run", 2)
    saved_by(other, tmp_path / "other", 4, last_step=4)
    for step in (3, 4):
        shutil.copytree(
            tmp_path / f"other/checkpoint/step-{step}", tmp_path / f"run/checkpoint/step-{step}"
        )
    run = build_run(tmp_path / "run", keep_latest_k=3, **way.settings)
    own = run.manager._own_folder()
    kinds = {step: own.kind_of(path) for step, path in sorted(own.step_paths.items())}
    assert kinds == {1: Kind.FULL, 2: Kind.FULL, 3: Kind.FULL, 4: Kind.MODEL_ONLY}
    assert own.others == dict.fromkeys((3, 4), other.format.backend)
    assert run.manager.is_finished(4) and not run.manager.is_finished(5)
    assert run.manager.load(2) and run.step == 2
    run.train(5)
    run.manager.close()
    assert names(tmp_path / "run") == ["step-3", "step-4", "step-5", "superseded"]
    aside = tmp_path / "run/checkpoint/superseded"
    assert sorted(path.name for path in aside.iterdir()) == ["step-3", "step-4"]
    assert contents(aside / "step-3") == contents(tmp_path / "other/checkpoint/step-3")
    assert way.complete(tmp_path / "run") == ["step-3", "step-4", "step-5"]


@over(DISABLED, TC_WAITING)
def test_a_checkpoint_of_the_other_is_no_weights_to_begin_from(way: Way, tmp_path: Path) -> None:
    saved_by(OTHER[way], tmp_path / "other", 1)
    path = str(tmp_path / "other/checkpoint/step-1")
    run = build_run(tmp_path / "run", initial_load_path=path, **way.settings)
    backend = OTHER[way].format.backend
    with pytest.raises(ValueError, match=f"pass --checkpoint.backend {backend} as well"):
        run.manager.load()
    run.manager.close()
