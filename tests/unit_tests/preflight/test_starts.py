"""Where a run starts from is known before a rank starts, and so is what keeps it from starting."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.preflight import problems
from torchtitan.trainer import Trainer

FULL = {"weight": torch.ones(1), "optimizer": {"step": 1}}
WEIGHTS = {"weight": torch.ones(1)}


def put(folder: Path, step: int, state: dict[str, Any]) -> str:
    path = folder / "checkpoint" / f"step-{step}"
    dcp.save(dict(state), checkpoint_id=str(path), no_dist=True)
    return str(path)


@pytest.fixture
def own(config: Trainer.Config) -> Path:
    """The dump folder of a run of 400 steps."""
    config.training.steps = 400
    return Path(config.dump_folder)


def test_an_initial_path_is_checked_unless_the_run_has_checkpoints_of_its_own(
    config: Trainer.Config, own: Path, tmp_path: Path
) -> None:
    newest = put(tmp_path / "other", 9, FULL)
    for path in (tmp_path / "other", tmp_path / "other/checkpoint"):
        config.checkpoint.initial_load_path = str(path)
        (problem,) = problems(config, 2)
        assert f"{path}, which is not a checkpoint but a folder" in problem
        assert f"the newest is {newest}." in problem
    config.checkpoint.initial_load_path = newest
    assert problems(config, 2) == []
    put(own, 5, FULL)
    config.checkpoint.initial_load_path = str(tmp_path / "nowhere")
    assert problems(config, 2) == []


def test_everything_but_weights_cannot_come_from_weights(
    config: Trainer.Config, tmp_path: Path
) -> None:
    config.checkpoint.initial_load_path = put(tmp_path / "other", 9, WEIGHTS)
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
    config: Trainer.Config, own: Path, has_full: bool
) -> None:
    export = put(own, 400, WEIGHTS)
    if has_full:
        put(own, 350, FULL)
    assert problems(config, 2) == []
    config.training.steps = 401
    found = problems(config, 2)
    if has_full:
        assert found == []
        return
    (problem,) = found
    assert f"--checkpoint.initial_load_path={export} " in problem


def test_a_seed_is_made_from_nothing_whatever_lies_there(config: Trainer.Config, own: Path) -> None:
    put(own, 7, WEIGHTS)
    assert len(problems(config, 1)) == 1
    config.checkpoint.create_seed_checkpoint = True
    assert problems(config, 1) == []


@pytest.mark.parametrize("flag", ["load_step", "initial_load_path", None])
def test_a_start_from_a_damaged_index_is_refused_before_a_rank_starts(
    config: Trainer.Config, own: Path, tmp_path: Path, flag: str | None
) -> None:
    folder = tmp_path / "other" if flag == "initial_load_path" else own
    path = put(folder, 7, FULL)
    Path(path, ".metadata").write_bytes(b"")
    if flag == "load_step":
        put(own, 5, FULL)
        config.checkpoint.load_step = 7
    elif flag == "initial_load_path":
        config.checkpoint.initial_load_path = path
    (problem,) = problems(config, 2)
    assert f"The index {path}/.metadata cannot be read" in problem and "move it away" in problem
    if flag == "load_step":
        config.checkpoint.load_step = -1
        assert problems(config, 2) == []
