"""What a load asks of DCP, and what is said when there is nothing to load."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torchtitan.components.checkpointer import (
    CheckpointManager,
    dcp,
    dcp_index,
    matching,
    ModelWrapper,
)

from tests.unit_tests.components.checkpointer.fakes import without_parts
from tests.unit_tests.components.checkpointer.test_dcp_dispatch import build, Calls, calls

__all__ = ["calls"]


def put(folder: Path, step: int) -> None:
    path = folder / "checkpoint" / f"step-{step}"
    path.mkdir(parents=True)
    (path / ".metadata").touch()


@pytest.fixture(autouse=True)
def _readable(request: pytest.FixtureRequest) -> Any:
    """Empty index files stand for full checkpoints that fit."""
    full = dcp_index.Kind.FULL
    with (
        patch.object(dcp_index, "kind_of", return_value=full),
        patch.object(dcp_index, "read_outline", return_value={}),
        patch.object(matching, "require_match"),
    ):
        yield


def test_a_fresh_start_says_so_and_loads_nothing(calls: Calls, tmp_path: Path) -> None:
    manager = build(tmp_path)
    with patch.object(dcp, "logger") as logger:
        assert manager.load() is False
    logger.info.assert_called_once_with("No checkpoint was provided, this is a fresh start.")
    assert calls.loaded == []
    manager.close()


def test_the_newest_step_is_loaded_whole_and_warns_of_nothing(calls: Calls, tmp_path: Path) -> None:
    put(tmp_path, 3)
    put(tmp_path, 12)
    manager = build(tmp_path, initial_load_path="/not/looked/at")
    with patch.object(dcp, "logger") as logger:
        assert manager.load() is True
    ((states, checkpoint_id),) = calls.loaded
    assert checkpoint_id == f"{tmp_path}/checkpoint/step-12"
    assert set(states) == {"weight", "bias", "trainer", "optimizer", "dataloader", "lr_scheduler"}
    logger.warning.assert_not_called()
    manager.close()


def test_a_seed_loads_the_model_alone_whatever_is_excluded(calls: Calls, tmp_path: Path) -> None:
    put(tmp_path, 0)
    manager = build(tmp_path, exclude_from_loading=["dataloader"])
    assert manager.load(0) is True
    assert set(calls.loaded[0][0]) == {"weight", "bias"}
    manager.close()


def test_excluded_parts_are_not_asked_for(calls: Calls, tmp_path: Path) -> None:
    put(tmp_path, 5)
    manager = build(tmp_path, exclude_from_loading=["optimizer", "lr_scheduler"])
    manager.load()
    assert set(calls.loaded[0][0]) == {"weight", "bias", "trainer", "dataloader"}
    manager.close()


def test_an_unknown_exclusion_is_refused_by_name(calls: Calls, tmp_path: Path) -> None:
    put(tmp_path, 5)
    manager = build(tmp_path, exclude_from_loading=["data_loader"])
    with pytest.raises(ValueError, match="data_loader not found in state_dict."):
        manager.load()
    manager.close()


def test_loaded_tensors_reach_the_model(calls: Calls, tmp_path: Path) -> None:
    put(tmp_path, 5)
    manager, model = build(tmp_path), nn.Linear(2, 2)
    manager.states["model"] = ModelWrapper(model)

    def fill(states: dict[str, Any], checkpoint_id: str | None = None) -> None:
        states["weight"].fill_(8.0)

    with patch.object(torch_dcp, "load", fill):
        manager.load()
    assert model.weight.unique().tolist() == [8.0]
    manager.close()


@pytest.mark.parametrize("present", [[], [3, 5]])
def test_an_explicit_step_that_is_missing_names_the_flag(
    calls: Calls, tmp_path: Path, present: list[int]
) -> None:
    for step in present:
        put(tmp_path, step)
    manager = build(tmp_path)
    with pytest.raises(FileNotFoundError, match="--checkpoint.load_step=4"):
        manager.load(4)
    assert calls.loaded == []
    manager.close()


def test_hugging_face_formats_are_refused_and_not_ignored(calls: Calls, tmp_path: Path) -> None:
    manager = build(tmp_path)
    with pytest.raises(ValueError, match="Hugging Face"):
        manager.dcp_load({}, "x", from_hf=True, from_quantized=False)
    with pytest.raises(ValueError, match="Hugging Face"):
        manager.dcp_save({}, "x", dcp.AsyncMode.DISABLED, to_hf=True)
    manager.close()


def test_parts_may_be_missing(calls: Calls, tmp_path: Path) -> None:
    manager = without_parts(
        CheckpointManager.Config(enable=True, interval=1),
        model_parts=[nn.Linear(1, 1)],
        base_folder=str(tmp_path),
    )
    manager.save(1)
    assert calls.saved[0][0]["dataloader"] is None
    manager.close()
