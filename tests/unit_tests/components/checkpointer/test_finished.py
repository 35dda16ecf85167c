"""A run is over when its export is there and good; otherwise nothing is lost, and it is made again."""

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from torchtitan.components.checkpointer.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from torchtitan.components.checkpointer.integrity import manifest

from tests.unit_tests.components.checkpointer.runs import build_run, names
from tests.unit_tests.components.checkpointer.ways import DISABLED, over, TC_WAITING, Way

pytestmark = [pytest.mark.usefixtures("one_rank")]

LAST = 3


def finished(folder: Path, way: Way) -> Path:
    """The export of a run of three steps."""
    run = build_run(folder, **way.settings)
    run.train(LAST, last_step=LAST)
    run.manager.close()
    return folder / f"checkpoint/step-{LAST}"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_data(export: Path, way: Way) -> None:
    [data] = {*export.glob("__0_0.distcp"), *export.glob("model_0.pt")}
    data.write_bytes(data.read_bytes()[:-1])


def flip_index(export: Path, way: Way) -> None:
    flip(export / way.format.marker)


def flip_manifest(export: Path, way: Way) -> None:
    flip(export / "manifest.json")


def rename(export: Path, way: Way) -> None:
    export.rename(export.parent / f"step-{LAST + 1}")


@over(DISABLED, TC_WAITING)
@pytest.mark.parametrize("damage", [cut_data, flip_index, flip_manifest, rename])
def test_a_run_whose_export_is_damaged_makes_its_last_steps_once_more(
    tmp_path: Path,
    way: Way,
    damage: Callable[[Path, Way], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    export = finished(tmp_path, way)
    damage(export, way)
    run = build_run(tmp_path, **way.settings)
    caplog.clear()
    assert not run.manager.is_finished(LAST)
    assert run.manager.load() and run.step == LAST - 1
    told = [it.getMessage() for it in caplog.records if it.levelno == logging.WARNING]
    assert re.search(f"{export}.* damaged", "\n".join(told)) or "that of step 3" in told[0]
    run.train(LAST, last_step=LAST)
    assert run.manager.is_finished(LAST)
    run.manager.close()
    assert names(tmp_path) == ["step-1", "step-2", "step-3", "superseded"]


@over(DISABLED, TC_WAITING)
def test_a_damaged_export_with_no_full_checkpoint_before_it_stops_the_run(
    tmp_path: Path, way: Way
) -> None:
    run = build_run(tmp_path, interval=10, **way.settings)
    run.train(LAST, last_step=LAST)
    run.manager.close()
    cut_data(tmp_path / f"checkpoint/step-{LAST}", way)
    run = build_run(tmp_path, **way.settings)
    assert not run.manager.is_finished(LAST)
    with pytest.raises(CheckpointNotFoundError, match="holds only model-only checkpoints"):
        run.manager.load()
    run.manager.close()


@over(DISABLED, TC_WAITING)
def test_a_good_export_ends_a_run_and_one_that_is_not_to_be_checked_as_well(
    tmp_path: Path, way: Way, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    export = finished(tmp_path, way)
    run, unchecked = (build_run(tmp_path, verify=mode, **way.settings) for mode in ("size", "off"))
    caplog.clear()
    assert run.manager.is_finished(LAST) and not caplog.records
    with monkeypatch.context() as older:
        older.setattr(manifest, "SCHEMA", 0)
        with pytest.raises(CheckpointMismatchError, match="has schema 3"):
            run.manager.is_finished(LAST)
    cut_data(export, way)
    assert not run.manager.is_finished(LAST) and unchecked.manager.is_finished(LAST)
    (export / "manifest.json").unlink()  # Of what another program wrote nothing is known.
    assert run.manager.is_finished(LAST)
    for each in (run, unchecked):
        each.manager.close()
