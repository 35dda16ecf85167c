"""Real checkpoints of one rank: what lies in them, and that a run gets back every bit."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointReadError,
    CheckpointSaveError,
)

from tests.unit_tests.components.checkpointer.runs import build_run, names, Run, Tiny

pytestmark = pytest.mark.usefixtures("one_rank")

MODES = ["disabled", "async"]
FULL = {"last_save_model_only": False}


def entries(path: Path) -> dict[str, Any]:
    return torch_dcp.FileSystemReader(path).read_metadata().state_dict_metadata


def whole(run: Run, name: str) -> torch.Tensor:
    parameter = run.model.get_parameter(name).detach()
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor()


def test_the_keys_are_those_that_other_programs_read(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    run.train(1)
    run.manager.close()
    step = tmp_path / "checkpoint" / "step-1"
    assert sorted(entry.name for entry in step.iterdir()) == [".metadata", "__0_0.distcp"]
    found = entries(step)
    model = set(Tiny().state_dict())
    trainable = model - {"seen"}
    state = {
        f"optimizer.state.{n}.{s}" for n in trainable for s in ("step", "exp_avg", "exp_avg_sq")
    }
    groups = {name for name in found if name.startswith("optimizer.param_groups.")}
    rest = {"lr_scheduler.last_epoch", "train_state.inner.step", "dataloader.inner.row"}
    assert set(found) == model | state | groups | rest
    assert {f"optimizer.param_groups.{name}.initial_lr" for name in trainable} <= groups
    index = torch_dcp.FileSystemReader(step).read_metadata()
    key = "optimizer.state.scale.step"
    assert index.planner_data[key] == ("optimizer", "state.scale.step")


def test_plain_dcp_reads_what_was_saved(tmp_path: Path) -> None:
    run = build_run(tmp_path, async_mode="async")
    run.train(2)
    run.manager.close()
    plain = {"tok_embeddings.weight": torch.zeros(11, 7), "seen": torch.zeros(3, dtype=torch.int64)}
    torch_dcp.load(plain, checkpoint_id=str(tmp_path / "checkpoint" / "step-2"))
    assert torch.equal(plain["tok_embeddings.weight"], whole(run, "tok_embeddings.weight"))
    assert plain["seen"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_has_every_bit_and_goes_on_as_if_nothing_happened(
    tmp_path: Path, mode: str
) -> None:
    straight = build_run(tmp_path / "straight", async_mode=mode)
    straight.train(3)
    at_3 = straight.snapshot()
    straight.train(6)
    straight.manager.close()
    for name in ("step-4", "step-5", "step-6"):
        (tmp_path / "straight" / "checkpoint" / name).rename(tmp_path / name)
    resumed = build_run(tmp_path / "straight", async_mode=mode, seed=99)
    assert resumed.manager.load() is True
    assert resumed.snapshot() == at_3 and resumed.step == 3
    resumed.train(6)
    assert resumed.snapshot() == straight.snapshot()
    resumed.manager.close()


def test_the_last_save_of_weights_is_never_resumed_from(tmp_path: Path) -> None:
    run = build_run(tmp_path, export_dtype="bfloat16")
    run.train(3, last_step=3)
    run.manager.close()
    found = entries(tmp_path / "checkpoint" / "step-3")
    assert set(found) == set(Tiny().state_dict())
    dtypes = {name: entry.properties.dtype for name, entry in found.items()}
    assert dtypes.pop("seen") is torch.int64 and set(dtypes.values()) == {torch.bfloat16}
    resumed = build_run(tmp_path)
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


def test_weights_alone_are_taken_from_a_full_checkpoint_of_another_run(tmp_path: Path) -> None:
    first = build_run(tmp_path / "first")
    first.train(3)
    first.manager.close()
    path = str(tmp_path / "first/checkpoint/step-3")
    second = build_run(tmp_path / "second", seed=4, initial_load_path=path)
    assert second.manager.load() and second.step == 0
    assert torch.equal(whole(second, "scale"), whole(first, "scale"))
    third = build_run(
        tmp_path / "third", seed=4, initial_load_path=path, initial_load_model_only=False
    )
    assert third.manager.load() and third.snapshot() == first.snapshot()
    for run in (second, third):
        run.manager.close()


def test_a_rollback_keeps_the_other_history_aside_and_retention_never_takes_the_new_one(
    tmp_path: Path,
) -> None:
    first = build_run(tmp_path, interval=10, keep_latest_k=0)
    first.train(30)
    first.manager.close()
    assert names(tmp_path) == ["step-10", "step-20", "step-30"]
    settings = {"interval": 5, "keep_latest_k": 2}
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


def test_a_rollback_within_one_process_leaves_the_other_history_too(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    run.train(3)
    run.manager.load(1)
    run.train(2)
    run.manager.close()
    assert names(tmp_path) == ["step-1", "step-2", "superseded"]


def test_a_run_that_counts_from_0_again_is_not_buried_by_the_steps_it_came_from(
    tmp_path: Path,
) -> None:
    first = build_run(tmp_path, interval=10)
    first.train(20)
    first.manager.close()
    second = build_run(tmp_path, interval=5, keep_latest_k=2, exclude_from_loading=["train_state"])
    assert second.manager.load() and second.step == 0
    second.train(15)
    second.manager.close()
    assert names(tmp_path) == ["step-10", "step-15", "superseded"]
    third = build_run(tmp_path)
    assert third.manager.load() and third.step == 15
    third.manager.close()


def test_the_dead_are_swept_and_strangers_stay(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    for name in ("step-3", "step-50", "step-07", "tmp_step-7", "step-7.bak", "notes"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__0_0.distcp").write_bytes(b"half")
    (folder / "step-9").write_bytes(b"a file")
    run = build_run(tmp_path)
    assert run.manager.load() is False
    run.train(1)
    run.manager.close()
    assert names(tmp_path) == sorted(
        ["step-07", "tmp_step-7", "step-7.bak", "notes", "step-9", "step-1"]
    )


def test_saving_a_step_again_keeps_the_earlier_one_aside(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    run.train(1)
    run.train(2, save=False)
    assert run.manager.save(1) is True
    run.manager.close()
    assert names(tmp_path) == ["step-1", "superseded"]
    assert (tmp_path / "checkpoint/superseded/step-1/.metadata").is_file()


def test_a_checkpoint_of_another_model_is_refused_with_all_its_keys(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    run.train(1)
    run.manager.close()
    other = build_run(tmp_path, width=6)
    with pytest.raises(CheckpointMismatchError) as caught:
        other.manager.load()
    text = str(caught.value)
    assert "tok_embeddings.weight (here [11, 6], there [11, 7])" in text
    assert "optimizer.state.layers.1.weight.exp_avg (here [6, 6], there [7, 7])" in text
    other.manager.close()


@pytest.mark.parametrize("damage", ["truncated data", "missing data", "broken index"])
def test_damage_is_an_error_that_names_the_checkpoint(tmp_path: Path, damage: str) -> None:
    run = build_run(tmp_path)
    run.train(1)
    run.manager.close()
    step = tmp_path / "checkpoint/step-1"
    data = step / "__0_0.distcp"
    if damage == "truncated data":
        data.write_bytes(data.read_bytes()[:500])
    elif damage == "missing data":
        data.unlink()
    else:
        (step / ".metadata").write_bytes(b"junk")
    again = build_run(tmp_path)
    with pytest.raises(CheckpointReadError, match=str(step)):
        again.manager.load()
    again.manager.close()


def test_an_unreadable_newest_is_passed_over_and_moved_aside_by_the_next_save(
    tmp_path: Path,
) -> None:
    run = build_run(tmp_path)
    run.train(3)
    run.manager.close()
    (tmp_path / "checkpoint/step-3/.metadata").write_bytes(b"junk")
    again = build_run(tmp_path)
    assert again.manager.load() and again.step == 2
    again.train(3)
    again.manager.close()
    assert (tmp_path / "checkpoint/superseded/step-3/.metadata").read_bytes() == b"junk"


def test_the_folder_around_a_checkpoint_is_no_checkpoint(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    run.train(1)
    run.manager.close()
    path = str(tmp_path / "checkpoint")
    other = build_run(tmp_path / "other", initial_load_path=path)
    with pytest.raises(ValueError, match=f"folder around checkpoints .* newest is {path}/step-1"):
        other.manager.load()
    other.manager.close()


def _train_and_wait(run: Run) -> None:
    run.train(1)
    run.manager.maybe_wait_for_saving()


@pytest.mark.parametrize("mode", MODES)
def test_a_folder_that_is_a_file_fails_the_save_and_the_next_one_works(
    tmp_path: Path, mode: str
) -> None:
    run = build_run(tmp_path, async_mode=mode)
    folder = tmp_path / "checkpoint"
    folder.write_bytes(b"in the way")
    with pytest.raises(CheckpointSaveError, match="step 1 to .*checkpoint/step-1"):
        _train_and_wait(run)
    folder.unlink()
    run.train(2)
    run.manager.close()
    assert names(tmp_path) == ["step-2"]


def test_only_exports_in_the_folder_is_an_error_before_anything_is_read(tmp_path: Path) -> None:
    run = build_run(tmp_path, interval=100)
    run.train(2, last_step=2)
    run.manager.close()
    again = build_run(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="initial_load_path="):
        again.manager.load()
    again.manager.close()


def test_each_save_is_one_line_with_its_size_and_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = build_run(tmp_path, async_mode="async", **FULL)
    run.train(3, last_step=3)
    run.manager.close()
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


def test_a_copied_directory_is_refused_for_the_step_in_its_name(tmp_path: Path) -> None:
    run = build_run(tmp_path, **FULL)
    run.manager.states["train_state"] = Steps(2)
    run.train(2, last_step=2)
    run.manager.close()
    shutil.copytree(tmp_path / "checkpoint/step-2", tmp_path / "checkpoint/step-60")
    again = build_run(tmp_path)
    again.manager.states["train_state"] = Steps(0)
    with pytest.raises(CheckpointMismatchError, match="step 2, not of step 60"):
        again.manager.load()
    again.manager.close()


def test_the_last_save_is_made_although_the_one_before_failed(tmp_path: Path) -> None:
    run = build_run(tmp_path, async_mode="async", **FULL)
    blocked = tmp_path / "checkpoint" / "step-2"
    run.train(1)
    run.manager.maybe_wait_for_saving()
    blocked.write_bytes(b"in the way")
    with pytest.raises(CheckpointSaveError, match="step 2 to"):
        run.train(3, last_step=3)
    run.manager.close()
    assert run.manager.newest_checkpoint() == str(tmp_path / "checkpoint/step-3")


def test_a_run_is_finished_once_its_export_is_there(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    run.train(2)
    assert not run.manager.is_finished(2), "a full checkpoint can be trained on from"
    run.train(3, last_step=3)
    run.manager.close()
    assert run.manager.is_finished(3) and not run.manager.is_finished(4)
