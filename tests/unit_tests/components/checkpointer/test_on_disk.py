"""Real checkpoints of one rank with either manager: a run gets back every bit, and keeps what it should.

No process is started: what stands for the writer process of torch_checkpointing works in a thread.
"""

import logging
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointReadError,
    CheckpointSaveError,
)
from torchtitan.tools import disk

from tests.unit_tests.components.checkpointer.runs import build_run, names, Run
from tests.unit_tests.components.checkpointer.ways import ASYNC, DISABLED, over, TC, TC_WAITING, Way
from tests.unit_tests.noting_disk import RefusingDisk

pytestmark = pytest.mark.usefixtures("one_rank", "writers")

FULL = {"last_save_model_only": False}
of_each_manager = over(DISABLED, TC_WAITING)
in_each_way = over(DISABLED, ASYNC, TC, TC_WAITING)


def saved_run(folder: Path, way: Way, until: int, *, last: bool = False, **settings: Any) -> Run:
    """A run that has saved and ended."""
    run = build_run(folder, **way.settings, **settings)
    run.train(until, last_step=until if last else None)
    run.manager.close()
    return run


def whole(run: Run, name: str) -> torch.Tensor:
    parameter = run.model.get_parameter(name).detach()
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor()


@in_each_way
def test_a_resumed_run_has_every_bit_and_goes_on_as_if_nothing_happened(
    tmp_path: Path, way: Way
) -> None:
    straight = build_run(tmp_path / "straight", **way.settings)
    straight.train(3)
    at_3 = straight.snapshot()
    straight.train(6)
    straight.manager.close()
    for name in ("step-4", "step-5", "step-6"):
        (tmp_path / "straight" / "checkpoint" / name).rename(tmp_path / name)
    resumed = build_run(tmp_path / "straight", seed=99, **way.settings)
    assert resumed.manager.load() is True
    assert resumed.snapshot() == at_3 and resumed.step == 3
    resumed.train(6)
    assert resumed.snapshot() == straight.snapshot()
    resumed.manager.close()


@of_each_manager
def test_the_last_save_of_weights_is_never_resumed_from(tmp_path: Path, way: Way) -> None:
    saved_run(tmp_path, way, 3, last=True, export_dtype="bfloat16")
    resumed = build_run(tmp_path, **way.settings)
    folder = tmp_path / "checkpoint"
    assert resumed.manager.newest_checkpoint() == str(folder / "step-2")
    assert resumed.manager.exported_checkpoint() == str(folder / "step-3")
    assert resumed.manager.load() and resumed.step == 2
    resumed.train(4)
    assert resumed.manager.newest_checkpoint() == str(folder / "step-4")
    assert resumed.manager.exported_checkpoint() is None
    resumed.manager.close()
    assert names(tmp_path) == ["step-1", "step-2", "step-3", "step-4", "superseded"]
    assert [path.name for path in (tmp_path / "checkpoint/superseded").iterdir()] == ["step-3"]


@of_each_manager
def test_weights_alone_are_taken_from_a_full_checkpoint_of_another_run(
    tmp_path: Path, way: Way
) -> None:
    first = saved_run(tmp_path / "first", way, 3)
    path = str(tmp_path / "first/checkpoint/step-3")
    second = build_run(tmp_path / "second", seed=4, initial_load_path=path, **way.settings)
    assert second.manager.load() and second.step == 0
    assert torch.equal(whole(second, "scale"), whole(first, "scale"))
    settings = {"initial_load_path": path, "initial_load_model_only": False}
    third = build_run(tmp_path / "third", seed=4, **settings, **way.settings)
    assert third.manager.load() and third.snapshot() == first.snapshot()
    for run in (second, third):
        run.manager.close()


@of_each_manager
def test_a_rollback_keeps_the_other_history_aside_and_retention_never_takes_the_new_one(
    tmp_path: Path, way: Way
) -> None:
    saved_run(tmp_path, way, 30, interval=10, keep_latest_k=0)
    assert names(tmp_path) == ["step-10", "step-20", "step-30"]
    settings: dict[str, Any] = {"interval": 5, "keep_latest_k": 2, **way.settings}
    second = build_run(tmp_path, **settings)
    second.manager.load(10)
    second.train(15)
    second.manager.close()
    assert names(tmp_path) == ["step-10", "step-15", "superseded"]
    third = build_run(tmp_path, **settings)
    assert third.manager.load() and third.step == 15
    third.train(30)
    third.manager.close()
    assert names(tmp_path) == ["step-25", "step-30", "superseded"]
    assert sorted(p.name for p in (tmp_path / "checkpoint/superseded").iterdir()) == [
        "step-20",
        "step-30",
    ]


@in_each_way
def test_a_rollback_within_one_process_leaves_the_other_history_too(
    tmp_path: Path, way: Way
) -> None:
    run = build_run(tmp_path, **way.settings)
    run.train(3)
    run.manager.load(1)
    run.train(2)
    run.manager.close()
    assert names(tmp_path) == ["step-1", "step-2", "superseded"]


@of_each_manager
def test_a_run_that_counts_from_0_again_is_not_buried_by_the_steps_it_came_from(
    tmp_path: Path, way: Way
) -> None:
    saved_run(tmp_path, way, 20, interval=10)
    settings = {"interval": 5, "keep_latest_k": 2, "exclude_from_loading": ["train_state"]}
    second = build_run(tmp_path, **settings, **way.settings)
    assert second.manager.load() and second.step == 0
    second.train(15)
    second.manager.close()
    assert names(tmp_path) == ["step-10", "step-15", "superseded"]
    third = build_run(tmp_path, **way.settings)
    assert third.manager.load() and third.step == 15
    third.manager.close()


@of_each_manager
def test_the_dead_are_swept_and_strangers_stay(tmp_path: Path, way: Way) -> None:
    folder = tmp_path / "checkpoint"
    dead = {way.unfinished(3), way.unfinished(50), "step-51"}
    strangers = {"step-07", "tmp_step-07", "step-7.bak", "step-7.partial", "notes", "notes-step-5"}
    for name in dead | strangers:
        (folder / name).mkdir(parents=True)
        (folder / name / "__0_0.distcp").write_bytes(b"half")
    (folder / "step-9").write_bytes(b"a file")
    run = build_run(tmp_path, **way.settings)
    assert run.manager.load() is False
    run.train(1)
    run.manager.close()
    assert names(tmp_path) == sorted({*strangers, "step-9", "step-1"})


@in_each_way
def test_a_step_that_is_saved_again_stays_until_the_new_one_is_complete(
    tmp_path: Path, way: Way
) -> None:
    run = build_run(tmp_path, **way.settings)
    run.train(1)
    run.manager.maybe_wait_for_saving()
    run.train(2, save=False)
    folder = tmp_path / "checkpoint"
    seen = []
    make_ready = run.manager._make_ready

    def noted(*arguments: Any, **keywords: Any) -> None:
        make_ready(*arguments, **keywords)
        seen.append((names(tmp_path), (folder / "replaced/step-1" / way.format.marker).is_file()))

    with patch.object(run.manager, "_make_ready", noted):
        assert run.manager.save(1) is True
        run.manager.close()
    assert seen == [(["replaced"], True)]
    assert names(tmp_path) == ["step-1"]


@of_each_manager
def test_what_a_save_that_died_was_to_replace_is_loaded_and_gets_its_name_back(
    tmp_path: Path, way: Way
) -> None:
    run = saved_run(tmp_path, way, 2, keep_latest_k=0)
    folder = tmp_path / "checkpoint"
    (folder / "replaced").mkdir()
    (folder / "step-2").rename(folder / "replaced/step-2")
    (folder / way.unfinished(2)).mkdir()
    again = build_run(tmp_path, seed=99, keep_latest_k=0, **way.settings)
    assert again.manager.load() and again.snapshot() == run.snapshot()
    assert again.manager.newest_checkpoint() == str(folder / "replaced/step-2")
    again.train(3)
    again.manager.close()
    assert [name for name in names(tmp_path) if name[:3] != "tmp"] == ["step-1", "step-2", "step-3"]
    assert (folder / "step-2" / way.format.marker).is_file()


@in_each_way
def test_a_step_that_another_program_saved_is_kept_aside_when_it_is_saved_again(
    tmp_path: Path, way: Way
) -> None:
    run = build_run(tmp_path, **way.settings)
    run.train(1)
    run.manager.maybe_wait_for_saving()
    (tmp_path / "checkpoint/step-1/manifest.json").unlink()
    assert run.manager.save(1) is True
    run.manager.close()
    assert names(tmp_path) == ["step-1", "superseded"]
    assert (tmp_path / "checkpoint/superseded/step-1" / way.format.marker).is_file()


@of_each_manager
def test_a_checkpoint_of_another_model_is_refused_with_all_its_keys(
    tmp_path: Path, way: Way
) -> None:
    saved_run(tmp_path, way, 1)
    other = build_run(tmp_path, width=6, **way.settings)
    with pytest.raises(CheckpointMismatchError) as caught:
        other.manager.load()
    text = str(caught.value)
    assert "tok_embeddings.weight (here [11, 6], there [11, 7])" in text
    assert "optimizer.state.layers.1.weight.exp_avg (here [6, 6], there [7, 7])" in text
    other.manager.close()


@of_each_manager
@pytest.mark.parametrize("damage", ["truncated data", "missing data", "broken index"])
def test_damage_is_an_error_that_names_the_checkpoint(
    tmp_path: Path, way: Way, damage: str
) -> None:
    saved_run(tmp_path, way, 1)
    step = tmp_path / "checkpoint/step-1"
    data = next(
        step / name for name in ("__0_0.distcp", "optimizer_0.pt") if (step / name).exists()
    )
    if damage == "truncated data":
        data.write_bytes(data.read_bytes()[:500])
    elif damage == "missing data":
        data.unlink()
    else:
        (step / way.format.marker).write_bytes(b"junk")
    again = build_run(tmp_path, **way.settings)
    with pytest.raises(CheckpointReadError, match=f"{step}.*damaged|damaged.*{step}"):
        again.manager.load()
    again.manager.close()


@pytest.mark.parametrize(
    # Only DCP's index tells what a checkpoint holds, and so has to be read to choose one.
    "way,content",
    [(DISABLED, b"junk"), (DISABLED, b""), (TC_WAITING, b"")],
    ids=str,
)
def test_an_unreadable_newest_is_passed_over_and_moved_aside_by_the_next_save(
    tmp_path: Path, way: Way, content: bytes
) -> None:
    saved_run(tmp_path, way, 3)
    (tmp_path / "checkpoint/step-3" / way.format.marker).write_bytes(content)
    again = build_run(tmp_path, **way.settings)
    assert again.manager.load() and again.step == 2
    again.train(3)
    again.manager.close()
    aside = tmp_path / "checkpoint/superseded/step-3" / way.format.marker
    assert aside.read_bytes() == content


@of_each_manager
def test_the_folder_around_a_checkpoint_is_no_checkpoint(tmp_path: Path, way: Way) -> None:
    saved_run(tmp_path, way, 1)
    path = str(tmp_path / "checkpoint")
    other = build_run(tmp_path / "other", initial_load_path=path, **way.settings)
    with pytest.raises(ValueError, match=f"folder around checkpoints .* newest is {path}/step-1"):
        other.manager.load()
    other.manager.close()


def _train_and_wait(run: Run) -> None:
    run.train(1)
    run.manager.maybe_wait_for_saving()


@in_each_way
def test_a_folder_that_is_a_file_fails_the_save_and_the_next_one_works(
    tmp_path: Path, way: Way
) -> None:
    run = build_run(tmp_path, **way.settings)
    folder = tmp_path / "checkpoint"
    folder.write_bytes(b"in the way")
    with pytest.raises(CheckpointSaveError, match="step 1 to .*checkpoint/step-1"):
        _train_and_wait(run)
    folder.unlink()
    run.train(2)
    run.manager.close()
    assert names(tmp_path) == ["step-2"]


@of_each_manager
def test_only_exports_in_the_folder_is_an_error_before_anything_is_read(
    tmp_path: Path, way: Way
) -> None:
    saved_run(tmp_path, way, 2, last=True, interval=100)
    again = build_run(tmp_path, **way.settings)
    with pytest.raises(CheckpointNotFoundError, match="initial_load_path="):
        again.manager.load()
    again.manager.close()


@over(ASYNC, TC)
def test_each_save_is_one_line_with_its_size_and_time(
    tmp_path: Path, way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = saved_run(tmp_path, way, 3, last=True, **FULL)
    lines = [r.getMessage() for r in caplog.records if "Saved checkpoint" in r.getMessage()]
    assert [line.split(":")[0] for line in lines] == [
        f"Saved checkpoint of step {step}" for step in (1, 2, 3)
    ]
    assert all("MiB in" in line and str(tmp_path) in line for line in lines)
    assert ["training waited" in line for line in lines] == [True, True, False]
    assert run.manager.newest_checkpoint() == str(tmp_path / "checkpoint/step-3")


class Steps:
    """The trainer's own state."""

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.step = state_dict["step"]


@of_each_manager
def test_a_copied_directory_is_refused_for_the_step_in_its_name(tmp_path: Path, way: Way) -> None:
    run = build_run(tmp_path, **way.settings, **FULL)
    run.manager.states["train_state"] = Steps(2)
    run.train(2, last_step=2)
    run.manager.close()
    shutil.copytree(tmp_path / "checkpoint/step-2", tmp_path / "checkpoint/step-60")
    again = build_run(tmp_path, **way.settings)
    again.manager.states["train_state"] = Steps(0)
    with pytest.raises(
        CheckpointDamagedError, match="expected that of step 60, found that of step 2"
    ):
        again.manager.load(60)
    assert again.manager.load() and again.manager.states["train_state"].step == 2
    # Of what no manifest speaks of, the state itself tells.
    (tmp_path / "checkpoint/step-60/manifest.json").unlink()
    with pytest.raises(CheckpointMismatchError, match="step 2, not of step 60"):
        again.manager.load()
    again.manager.close()


@over(ASYNC, TC)
def test_the_last_save_is_made_although_the_one_before_failed(tmp_path: Path, way: Way) -> None:
    with disk.using(RefusingDisk("step-2")):
        run = build_run(tmp_path, **way.settings, **FULL)
        with pytest.raises(CheckpointSaveError, match="step 2 to.*Input/output error"):
            run.train(3, last_step=3)
        run.manager.close()
    assert run.manager.newest_checkpoint() == str(tmp_path / "checkpoint/step-3")


@in_each_way
def test_a_run_is_finished_once_its_export_is_there(tmp_path: Path, way: Way) -> None:
    run = build_run(tmp_path, **way.settings)
    run.train(2)
    assert not run.manager.is_finished(2), "a full checkpoint can be trained on from"
    run.train(3, last_step=3)
    run.manager.close()
    assert run.manager.is_finished(3) and not run.manager.is_finished(4)
