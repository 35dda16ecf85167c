"""What keeps a folder from being looked into, or written to, is told; nothing is begun instead."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torchtitan.components.checkpointer.errors import (
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
