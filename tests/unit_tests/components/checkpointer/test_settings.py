"""Contradictory settings are refused before anything is built, all of them at once."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torchtitan.components.checkpointer import AsyncMode, base, CheckpointManager
from torchtitan.config.violations import collecting

from tests.unit_tests.components.checkpointer.fakes import without_parts

IGNORED_FIRST_STEP = "checkpoint.load_only is True; enable_first_step_checkpoint will be ignored."
IDLE_MODEL_ONLY = "initial_load_model_only=True has no effect without an initial_load_path."

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"folder": ""}, "folder.*cannot be empty"),
    ({"folder": " \t"}, "folder.*cannot be empty"),
    ({"interval": 0}, "interval.*at least 1"),
    ({"interval": -5}, "interval.*at least 1"),
    ({"keep_latest_k": -1}, "cannot be negative"),
    ({"keep_latest_k": 1}, "at least 2 checkpoint replicas"),
    ({"keep_every": -1}, "keep_every=-1 cannot be negative"),
    ({"max_failed_saves": 0}, "max_failed_saves=0 must be at least 1"),
    ({"max_failed_saves": 5}, "max_failed_saves=5 has no effect with on_save_failure raise"),
    ({"lock_timeout_seconds": 9}, "lock_timeout_seconds=9 must be at least 10"),
    ({"on_save_failure": "ignore"}, "Invalid checkpoint.on_save_failure 'ignore'.*'warn'"),
    ({"load_step": -2}, r"load_step=-2 is not a step"),
    ({"exclude_from_loading": ["model"]}, "model key shouldn't be in exclude_from_loading."),
    ({"exclude_from_loading": ["optimizer"]}, "optimizer.*lr_scheduler"),
    ({"initial_load_path": "runs/step-1"}, "absolute path or a remote"),
    ({"initial_load_path": "  ./step-1"}, "absolute path or a remote"),
    (
        {"initial_load_in_hf": True, "initial_load_model_only": False},
        "requires initial_load_model_only",
    ),
    ({"initial_load_in_hf_quantized": True}, "requires initial_load_in_hf"),
    (
        {"initial_load_in_hf_quantized": True, "initial_load_path": "/w"},
        "requires initial_load_in_hf",
    ),
    (
        {"initial_load_in_hf_quantized": True, "initial_load_in_hf": True},
        "requires initial_load_in_hf",
    ),
    (
        {"last_save_in_hf": True, "last_save_model_only": False},
        "requires last_save_model_only=True",
    ),
    (
        {"last_save_in_hf": True, "folder": "s3://bucket/run"},
        "last_save_in_hf is not supported with a remote",
    ),
    (
        {"initial_load_in_hf": True, "initial_load_path": "s3://bucket/w"},
        "initial_load_in_hf is not supported with a remote",
    ),
    ({"async_mode": "sometimes"}, "Invalid async_mode"),
    ({"async_mode": None}, "Invalid async_mode"),
    ({"async_mode": 3}, "Invalid async_mode"),
    ({"verify": "some"}, r"Invalid checkpoint.verify 'some': choose one of .*'size'"),
    ({"on_damaged": "retry"}, "Invalid checkpoint.on_damaged 'retry': choose one of .*'fail'"),
]

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"interval": 1, "keep_latest_k": 0},
    {"keep_latest_k": 2, "load_step": 0},
    {"exclude_from_loading": ["lr_scheduler"]},
    {"exclude_from_loading": ["optimizer", "lr_scheduler", "dataloader", "train_state"]},
    {"initial_load_path": "s3://bucket/step-1"},
    {"initial_load_path": "   "},
    {"initial_load_in_hf": True},
    {"initial_load_in_hf": True, "initial_load_in_hf_quantized": True, "initial_load_path": "/w"},
    {"last_save_in_hf": True},
    {"on_save_failure": "warn", "max_failed_saves": 5},
]


@pytest.mark.parametrize("settings,message", REFUSED)
def test_a_contradiction_is_refused_with_its_reason(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointManager.Config(**settings)


@pytest.mark.parametrize("settings", ACCEPTED)
def test_settings_at_the_edge_of_the_rules_are_accepted(settings: dict[str, Any]) -> None:
    CheckpointManager.Config(**settings)


def test_every_message_names_its_setting_the_value_and_a_way_out() -> None:
    for settings, _ in REFUSED:
        with pytest.raises(ValueError) as caught:
            CheckpointManager.Config(**settings)
        text = str(caught.value)
        assert any(name in text for name in settings), text
        assert len(text) > 50, text


def test_all_violations_are_reported_together_while_a_command_line_is_parsed() -> None:
    with collecting() as found:
        CheckpointManager.Config(
            folder=" ",
            interval=0,
            keep_latest_k=1,
            load_step=-7,
            exclude_from_loading=["model", "optimizer"],
            initial_load_path="here",
            initial_load_in_hf=True,
            initial_load_model_only=False,
            last_save_in_hf=True,
            last_save_model_only=False,
            async_mode="never",  # pyrefly: ignore[bad-argument-type]  (the mistake under test)
        )
    text = "\n".join(found)
    for word in (
        "folder=",
        "interval=",
        "keep_latest_k=1",
        "load_step=-7",
        "names the model",
        "without lr_scheduler",
        "initial_load_path='here'",
        "initial_load_in_hf requires",
        "last_save_in_hf requires",
        "Invalid async_mode",
    ):
        assert word in text
    assert len(found) == 10


def test_the_initial_path_is_stripped_in_place() -> None:
    assert CheckpointManager.Config(initial_load_path=" /a/step-1 ").initial_load_path == (
        "/a/step-1"
    )


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_the_async_mode_is_taken_in_any_case_and_as_an_enum(mode: str) -> None:
    spellings: list[Any] = [mode, mode.upper(), mode.title(), AsyncMode(mode)]
    for spelled in spellings:
        assert CheckpointManager.Config(async_mode=spelled).async_mode == mode


def test_the_manager_for_dcp_adds_one_setting() -> None:
    assert set(CheckpointManager.Config.__annotations__) == {"async_mode"}


def test_the_default_config_warns_once_that_model_only_has_no_effect() -> None:
    with patch.object(base, "logger") as logger:
        CheckpointManager.Config()
    logger.warning.assert_called_once_with(IDLE_MODEL_ONLY)


def test_load_only_warns_that_the_first_step_is_not_saved() -> None:
    with patch.object(base, "logger") as logger:
        CheckpointManager.Config(load_only=True, enable_first_step_checkpoint=True)
    logger.warning.assert_any_call(IGNORED_FIRST_STEP)


@pytest.mark.parametrize(
    "settings",
    [{"initial_load_path": "/a/step-1"}, {"initial_load_model_only": False, "load_only": True}],
)
def test_consistent_settings_warn_of_nothing(settings: dict[str, Any]) -> None:
    with patch.object(base, "logger") as logger:
        CheckpointManager.Config(**settings)
    logger.warning.assert_not_called()


def test_a_run_is_told_that_a_load_only_manager_ignores_the_first_step() -> None:
    with collecting():  # as on the command line, where the config itself says nothing
        config = CheckpointManager.Config(
            enable=True, load_only=True, enable_first_step_checkpoint=True
        )
    with patch.object(base, "logger") as logger:
        without_parts(config)
    logger.warning.assert_called_once_with(
        "checkpoint.load_only is True; enable_first_step_checkpoint will be ignored."
    )


def test_the_export_dtype_is_a_torch_dtype_on_the_manager() -> None:
    config = CheckpointManager.Config(enable=True, export_dtype="bfloat16", load_only=True)
    manager = without_parts(config)
    assert manager.export_dtype is torch.bfloat16
