"""A run that torchrun restarts by itself must not be told to go back each time."""

import pytest
from torchtitan.preflight import problems
from torchtitan.trainer import Trainer

from tests.unit_tests.preflight.conftest import Refusal

EXCLUDE = "--checkpoint.exclude_from_loading"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCHELASTIC_MAX_RESTARTS", "3"),
        ("TORCHRUN_ARGS", "--rdzv_id=x --max-restarts 3"),
        ("TORCHRUN_ARGS", "--max_restarts=3"),
    ],
)
def test_restarts_that_would_go_back_each_time_are_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    monkeypatch.setenv(name, value)
    [message] = refusal(f"{EXCLUDE} lr_scheduler")
    assert message.startswith(f"{EXCLUDE} lr_scheduler with --max-restarts 3: each restart would")
    assert "start once without --max-restarts, then leave the flag out" in message
    messages = refusal("--checkpoint.load_step 0")
    assert any("load_step 0 with --max-restarts 3" in message for message in messages)


@pytest.mark.parametrize("value", ["", "--max-restarts 0", "--no-max-restarts 3", "--max-restarts"])
def test_going_back_without_restarts_is_accepted(
    value: str, monkeypatch: pytest.MonkeyPatch, config: Trainer.Config
) -> None:
    monkeypatch.setenv("TORCHRUN_ARGS", value)
    config.checkpoint.exclude_from_loading = ["lr_scheduler"]
    assert problems(config, 1) == []


def test_restarts_that_resume_are_accepted(
    monkeypatch: pytest.MonkeyPatch, config: Trainer.Config
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert problems(config, 1) == []
