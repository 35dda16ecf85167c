"""Where a run starts from is known before a rank starts, and so is what keeps it from starting.

With either back end alike.
"""

import pickle
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer.formats import DCP, Format, FORMATS, TORCH_CHECKPOINTING
from torchtitan.components.checkpointer.torch_checkpointing import TorchCheckpointingManager
from torchtitan.preflight import problems
from torchtitan.trainer import Trainer

from tests.unit_tests.preflight.conftest import Refusal

FULL = {"weight": torch.ones(1), "optimizer": {"step": 1}}
WEIGHTS = {"weight": torch.ones(1)}
OTHER = {DCP: TORCH_CHECKPOINTING, TORCH_CHECKPOINTING: DCP}


def put(folder: Path, step: int, state: dict[str, Any], chosen: Format) -> str:
    path = folder / "checkpoint" / f"step-{step}"
    if chosen is DCP:
        dcp.save(dict(state), checkpoint_id=str(path), no_dist=True)
        return str(path)
    path.mkdir(parents=True)
    for name in {"model", *(state.keys() - {"weight"})}:
        torch.save(state, path / f"{name}_0.pt")
    (path / "metadata.pkl").write_bytes(pickle.dumps({"metadata": {}}))
    return str(path)


@pytest.fixture(params=FORMATS, ids=lambda chosen: chosen.backend)
def chosen(request: pytest.FixtureRequest) -> Format:
    """The back end of the run."""
    return request.param


@pytest.fixture
def config(config: Trainer.Config, chosen: Format) -> Trainer.Config:
    """The main recipe with that back end."""
    if chosen is TORCH_CHECKPOINTING:
        shared = fields(BaseCheckpointManager.Config)
        values = {each.name: getattr(config.checkpoint, each.name) for each in shared}
        config.checkpoint = TorchCheckpointingManager.Config(**values)
    return config


@pytest.fixture
def own(config: Trainer.Config) -> Path:
    """The dump folder of a run of 400 steps."""
    config.training.steps = 400
    return Path(config.dump_folder)


def test_an_initial_path_is_checked_unless_the_run_has_checkpoints_of_its_own(
    config: Trainer.Config, own: Path, tmp_path: Path, chosen: Format
) -> None:
    newest = put(tmp_path / "other", 9, FULL, chosen)
    for path in (tmp_path / "other", tmp_path / "other/checkpoint"):
        config.checkpoint.initial_load_path = str(path)
        (problem,) = problems(config, 2)
        assert f"{path}, which is not a checkpoint but a folder" in problem
        assert f"the newest is {newest}." in problem
    config.checkpoint.initial_load_path = newest
    assert problems(config, 2) == []
    put(own, 5, FULL, chosen)
    config.checkpoint.initial_load_path = str(tmp_path / "nowhere")
    assert problems(config, 2) == []


def test_everything_but_weights_cannot_come_from_weights(
    config: Trainer.Config, tmp_path: Path, chosen: Format
) -> None:
    config.checkpoint.initial_load_path = put(tmp_path / "other", 9, WEIGHTS, chosen)
    assert problems(config, 2) == []
    config.checkpoint.initial_load_model_only = False
    (problem,) = problems(config, 2)
    assert "holds only the model, but --checkpoint.no-initial-load-model-only" in problem


def test_saves_that_died_and_other_names_keep_no_run_from_starting(
    config: Trainer.Config, own: Path
) -> None:
    for name in ("step-5", "step-07", "notes"):
        (own / "checkpoint" / name).mkdir(parents=True)
    assert problems(config, 2) == []
    config.checkpoint.load_step = 5
    (problem,) = problems(config, 2)
    assert "--checkpoint.load_step=5 was asked for" in problem and "did not finish" in problem


@pytest.mark.parametrize("has_full", [True, False])
def test_weights_of_the_last_step_end_a_run_and_a_longer_one_needs_a_full_checkpoint(
    config: Trainer.Config, own: Path, has_full: bool, chosen: Format
) -> None:
    export = put(own, 400, WEIGHTS, chosen)
    if has_full:
        put(own, 350, FULL, chosen)
    assert problems(config, 2) == []
    config.training.steps = 401
    found = problems(config, 2)
    if has_full:
        assert found == []
        return
    (problem,) = found
    assert f"--checkpoint.initial_load_path={export} " in problem


def test_damaged_weights_of_the_last_step_end_no_run(
    config: Trainer.Config, own: Path, chosen: Format
) -> None:
    export = put(own, 400, WEIGHTS, chosen)
    Path(export, "manifest.json").write_bytes(b"junk")
    (problem,) = problems(config, 2)
    assert "holds only model-only checkpoints" in problem
    put(own, 350, FULL, chosen)
    assert problems(config, 2) == []
    shutil.rmtree(own / "checkpoint/step-350")
    config.checkpoint.verify = "off"
    assert problems(config, 2) == []


def test_a_seed_is_made_from_nothing_whatever_lies_there(
    config: Trainer.Config, own: Path, chosen: Format
) -> None:
    put(own, 7, WEIGHTS, chosen)
    assert len(problems(config, 1)) == 1
    config.checkpoint.create_seed_checkpoint = True
    assert problems(config, 1) == []


@pytest.mark.parametrize("flag", ["load_step", "initial_load_path", None])
def test_a_start_from_a_damaged_index_is_refused_before_a_rank_starts(
    config: Trainer.Config, own: Path, tmp_path: Path, flag: str | None, chosen: Format
) -> None:
    folder = tmp_path / "other" if flag == "initial_load_path" else own
    path = put(folder, 7, FULL, chosen)
    Path(path, chosen.marker).write_bytes(b"")
    if flag == "load_step":
        put(own, 5, FULL, chosen)
        config.checkpoint.load_step = 7
    elif flag == "initial_load_path":
        config.checkpoint.initial_load_path = path
    (problem,) = problems(config, 2)
    assert (
        f"The index {path}/{chosen.marker} cannot be read" in problem and "move it away" in problem
    )
    if flag == "load_step":
        assert "The newest other full one is step-5: --checkpoint.load_step 5" in problem
        config.checkpoint.load_step = -1
        assert problems(config, 2) == []


@pytest.mark.parametrize("content", [b"", b"junk"])
def test_a_run_that_will_go_back_past_damage_is_let_start_unless_it_is_told_not_to(
    config: Trainer.Config, own: Path, content: bytes, chosen: Format
) -> None:
    put(own, 5, FULL, chosen)
    paths = [put(own, step, FULL, chosen) for step in (7, 9)]
    for path in paths:
        Path(path, chosen.marker).write_bytes(content)
    assert problems(config, 2) == []
    config.checkpoint.on_damaged = "fail"
    (problem,) = problems(config, 2)
    assert f"The index {paths[1]}/{chosen.marker} cannot be read" in problem
    config.checkpoint.on_damaged = "fallback"
    shutil.rmtree(own / "checkpoint/step-5")
    (problem,) = problems(config, 2)
    assert "step-7: " in problem and "step-9: " in problem


def test_metadata_that_would_run_code_keeps_the_run_from_starting(
    config: Trainer.Config, own: Path, chosen: Format
) -> None:
    path = put(own, 7, FULL, TORCH_CHECKPOINTING)
    Path(path, "metadata.pkl").write_bytes(pickle.dumps({"metadata": {}, "more": problems}))
    (problem,) = problems(config, 2)
    if chosen is TORCH_CHECKPOINTING:
        assert "asks for torchtitan.preflight.problems" in problem and "no code" in problem
    else:
        assert "--checkpoint.backend torch_checkpointing" in problem


def test_a_folder_of_the_other_back_end_stops_the_run_before_a_rank_starts(
    config: Trainer.Config, own: Path, chosen: Format
) -> None:
    other = OTHER[chosen]
    path = put(own, 7, FULL, other)
    (problem,) = problems(config, 2)
    assert (
        f"{path} is a full checkpoint of {other.backend}, and this run uses {chosen.backend}"
        in problem
    )
    assert f"Pass --checkpoint.backend {other.backend} to go on from it" in problem
    config.checkpoint.load_step = 7
    (problem,) = problems(config, 2)
    assert problem.startswith(f"--checkpoint.load_step=7 was asked for, but {path} is a full")
    config.checkpoint.load_step = -1
    put(own, 9, FULL, chosen)
    assert problems(config, 2) == []


def test_weights_that_the_other_back_end_saved_last_end_the_run(
    config: Trainer.Config, own: Path, chosen: Format
) -> None:
    put(own, 400, WEIGHTS, OTHER[chosen])
    assert problems(config, 2) == []
    config.training.steps = 401
    (problem,) = problems(config, 2)
    assert (
        f"--checkpoint.backend {OTHER[chosen].backend}, --checkpoint.initial_load_path=" in problem
    )


def test_a_path_to_a_checkpoint_of_the_other_back_end_is_refused(
    config: Trainer.Config, chosen: Format, tmp_path: Path
) -> None:
    path = put(tmp_path / "other", 9, FULL, OTHER[chosen])
    config.checkpoint.initial_load_path = path
    (problem,) = problems(config, 2)
    assert problem.startswith(f"--checkpoint.initial_load_path names {path}, which is a full")
    assert f"pass --checkpoint.backend {OTHER[chosen].backend} as well" in problem


@pytest.mark.parametrize(
    "flags",
    [
        "--checkpoint.exclude_from_loading nonsense",
        "--checkpoint.exclude_from_loading model --checkpoint.keep_latest_k 1",
        "--checkpoint.load_step 3",
        "--checkpoint.load_step -2 --checkpoint.interval 0 --checkpoint.timeout_seconds 0",
        "--checkpoint.folder /proc/x",
        "--checkpoint.folder s3://bucket/run",
        "--checkpoint.initial_load_path /nowhere/step-1",
        "--checkpoint.initial_load_path relative/step-1",
        "--checkpoint.no-enable --checkpoint.load_step 3",
        "--checkpoint.load_only --checkpoint.create_seed_checkpoint",
        "--checkpoint.export_dtype bfloat16",
        "--checkpoint.last_save_in_hf --checkpoint.last_save_model_only",
        "--checkpoint.initial_load_in_hf",
    ],
)
def test_both_back_ends_refuse_the_same_settings_in_the_same_words(
    refusal: Refusal, flags: str
) -> None:
    found = [refusal(f"--checkpoint.backend {each.backend} {flags}") for each in FORMATS]
    assert found[0] == found[1] and found[0]


def test_both_back_ends_refuse_to_go_back_at_each_restart(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHRUN_ARGS", "--max-restarts=2")
    flags = "--checkpoint.exclude_from_loading dataloader"
    found = [refusal(f"--checkpoint.backend {each.backend} {flags}") for each in FORMATS]
    assert found[0] == found[1] and "--max-restarts 2" in found[0][0]


def test_links_that_lead_nowhere_stop_the_run_before_a_rank_starts(
    config: Trainer.Config, own: Path, tmp_path: Path, chosen: Format
) -> None:
    path = Path(put(own, 7, FULL, chosen))
    shutil.move(path, tmp_path / "away")
    path.symlink_to(tmp_path / "away")
    assert problems(config, 2) == []
    (tmp_path / "away").rename(tmp_path / "unmounted")
    (problem,) = problems(config, 2)
    assert f"{path} -> {tmp_path}/away" in problem and "Mount what they lead to" in problem


def test_what_every_save_would_stop_at_is_told_before_a_rank_starts(
    config: Trainer.Config, own: Path, chosen: Format
) -> None:
    path = Path(put(own, 7, FULL, chosen))
    (path / chosen.marker).unlink()
    (path / chosen.marker).mkdir()
    for name in ("superseded", "replaced"):
        (own / "checkpoint" / name).touch()
    found = problems(config, 2)
    assert len(found) == 3
    for problem, name in zip(found, ("superseded", "replaced", "step-7"), strict=True):
        assert f"{own}/checkpoint holds {name}" in problem and "away" in problem
    config.checkpoint.load_only = True
    assert problems(config, 2) == []
