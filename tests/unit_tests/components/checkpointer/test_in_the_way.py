"""What keeps a folder from being looked into, or written to, is told; nothing is begun instead."""

import errno
import shutil
from pathlib import Path
from traceback import StackSummary
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer import dcp_index
from torchtitan.components.checkpointer.errors import (
    cause_of,
    CheckpointDamagedError,
    CheckpointReadError,
    CheckpointSaveError,
)

from tests.unit_tests.components.checkpointer.runs import build_run, Run
from tests.unit_tests.components.checkpointer.ways import DISABLED, over, TC_WAITING, Way

pytestmark = pytest.mark.usefixtures("one_rank")


def saved(folder: Path, way: Way, steps: int) -> Path:
    """The checkpoint folder of a run of ``steps``."""
    run = build_run(folder, keep_latest_k=0, **way.settings)
    run.train(steps)
    run.manager.close()
    return folder / "checkpoint"


def another(folder: Path, way: Way, **settings: Any) -> Run:
    return build_run(folder, seed=3, **{"keep_latest_k": 0, **way.settings, **settings})


@over(DISABLED, TC_WAITING)
def test_links_to_a_disk_that_is_away_are_no_reason_to_begin_again(
    tmp_path: Path, way: Way
) -> None:
    folder, away = saved(tmp_path, way, 2), tmp_path / "away"
    away.mkdir()
    for name in ("step-1", "step-2"):
        shutil.move(folder / name, away / name)
        (folder / name).symlink_to(away / name)
    away.rename(tmp_path / "unmounted")
    run = another(tmp_path, way)
    with pytest.raises(CheckpointReadError, match="lead nowhere") as failed:
        run.manager.load()
    assert type(failed.value) is CheckpointReadError
    for name in ("step-1", "step-2"):
        assert f"{folder / name} -> {away / name}" in str(failed.value)
    # Whoever saves without a look finds out as well, and leaves the link alone.
    with pytest.raises(CheckpointSaveError, match=f"lead nowhere: {folder}/step-1 ->"):
        run.train(1)
    run.manager.close()
    assert (folder / "step-1").is_symlink()
    (tmp_path / "unmounted").rename(away)
    again = another(tmp_path, way)
    assert again.manager.load() and again.step == 2
    again.manager.close()


@over(DISABLED, TC_WAITING)
@pytest.mark.parametrize("obstacle", ["a record that is none", "a disk that fails"])
def test_damage_is_told_whatever_else_is_wrong_with_the_folder(
    tmp_path: Path, way: Way, obstacle: str
) -> None:
    folder = saved(tmp_path, way, 2)
    path = folder / "step-2/manifest.json"
    path.write_bytes(path.read_bytes()[:-2])
    run = another(tmp_path, way)
    load = run.manager._load

    def then_hinder(step: int) -> bool:
        try:
            return load(step)
        finally:
            if obstacle == "a disk that fails":
                (folder / "step-1").rename(tmp_path / "step-1")
                (folder / "step-1").symlink_to("step-1")
            else:
                (folder / "superseded.json").write_text("{")

    with patch.object(run.manager, "_load", then_hinder):
        with pytest.raises(CheckpointDamagedError, match="step-2/manifest.json") as failed:
            run.manager.load(2)
    assert "Whether there is another full checkpoint could not be seen" in str(failed.value)
    run.manager.close()


@over(DISABLED, TC_WAITING)
@pytest.mark.parametrize("asked", ["the newest", "a step", "the end"])
def test_a_disk_that_does_not_answer_says_nothing_about_the_checkpoints(
    tmp_path: Path, way: Way, asked: str
) -> None:
    folder = saved(tmp_path, way, 2)
    # As on a mount that has become stale, or without permission: nobody can look at it.
    marker = folder / "step-2" / way.format.marker
    marker.unlink()
    marker.symlink_to(marker.name)
    run = another(tmp_path, way)
    with pytest.raises(CheckpointReadError, match=f"{marker}.*says nothing about") as failed:
        if asked == "the end":
            run.manager.is_finished(2)
        else:
            run.manager.load(-1 if asked == "the newest" else 2)
    assert type(failed.value) is CheckpointReadError
    run.manager.close()


def test_an_index_that_may_not_be_opened_is_told_as_that(tmp_path: Path) -> None:
    folder = saved(tmp_path, DISABLED, 2)
    (folder / "step-2/manifest.json").unlink()  # it says that the step is full
    index = str(folder / "step-2/.metadata")
    run = another(tmp_path, DISABLED)
    refused = PermissionError(errno.EACCES, "Permission denied", index)
    with patch.object(dcp_index, "open", side_effect=refused, create=True):
        with pytest.raises(CheckpointReadError, match=f"{index}.*says nothing about") as failed:
            run.manager.load()
    assert type(failed.value) is CheckpointReadError
    run.manager.close()


@over(DISABLED, TC_WAITING)
def test_a_folder_in_the_place_of_a_marker_is_not_deleted_and_fails_the_save(
    tmp_path: Path, way: Way
) -> None:
    folder = saved(tmp_path, way, 2)
    step, marker = folder / "step-2", way.format.marker
    (step / "manifest.json").unlink()
    (step / marker).unlink()
    (step / marker).mkdir()
    before = sorted(step.iterdir())
    run = another(tmp_path, way)
    assert run.manager.load() and run.step == 1
    with pytest.raises(CheckpointSaveError, match=f"{step} holds {marker} as a folder.*Move it"):
        run.train(2)
    run.manager.close()
    assert sorted(step.iterdir()) == before
    step.rename(tmp_path / "away")
    again = another(tmp_path, way)
    again.manager.load()
    again.train(2)
    again.manager.close()
    assert way.complete(tmp_path) == ["step-1", "step-2"]


@over(DISABLED, TC_WAITING)
@pytest.mark.parametrize("name", ["superseded", "replaced"])
def test_a_file_in_the_place_of_a_folder_for_checkpoints_fails_the_save_by_name(
    tmp_path: Path, way: Way, name: str
) -> None:
    folder = saved(tmp_path, way, 2)
    (folder / name).touch()
    run = another(tmp_path, way)
    run.manager.load(1 if name == "superseded" else 2)
    run.progress.values["step"] = 1
    with pytest.raises(CheckpointSaveError, match=f"{folder / name} is a file.*Move the file away"):
        run.train(2)
    run.manager.close()
    assert way.complete(tmp_path) == ["step-1", "step-2"]


@over(DISABLED, TC_WAITING)
def test_a_file_in_the_place_of_a_checkpoint_is_put_aside_and_the_step_is_saved(
    tmp_path: Path, way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path, way, 1)
    for number, kept in enumerate(("step-2", "step-2.2")):
        shutil.rmtree(folder / "step-2", ignore_errors=True)
        (folder / "step-2").write_text(f"notes {number}")
        run = another(tmp_path, way)
        assert run.manager.load()
        run.train(2)
        run.manager.close()
        assert way.complete(tmp_path) == ["step-1", "step-2"]
        assert (folder / "superseded" / kept).read_text() == f"notes {number}"
        assert f"{folder}/step-2 was a file, in the place of a checkpoint" in caplog.text


@over(DISABLED, TC_WAITING)
def test_a_file_in_the_place_of_what_waits_is_put_aside_and_that_gets_its_name_back(
    tmp_path: Path, way: Way
) -> None:
    folder = saved(tmp_path, way, 2)
    (folder / "replaced").mkdir()
    (folder / "step-2").rename(folder / "replaced/step-2")
    (folder / "step-2").write_text("notes")
    run = another(tmp_path, way)
    assert run.manager.load() and run.step == 2
    run.train(3)
    run.manager.close()
    assert way.complete(tmp_path) == ["step-1", "step-2", "step-3"]
    assert (folder / "superseded/step-2").read_text() == "notes"


def test_an_error_of_the_disk_is_told_with_its_path() -> None:
    error = FileExistsError(errno.EEXIST, "File exists", "/run/superseded")
    assert "File exists: '/run/superseded'" in cause_of(error)
    failed = dcp.CheckpointException("write", {1: (error, StackSummary())})
    assert cause_of(failed).startswith("rank 1: FileExistsError(")
    assert "File exists: '/run/superseded'" in cause_of(failed)
