"""W&B: one run over all starts, each step once; a clear word where it cannot be used."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.metrics import MetricsProcessor, wandb_logger
from torchtitan.components.metrics.wandb_logger import settings_of

from tests.unit_tests.components.metrics import fake_wandb
from tests.unit_tests.components.metrics.doubles import begin, dims, log_steps

ON = {"enable_wandb": True}
LOSS = "loss_metrics/global_avg_loss"


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TEAM", "PROJECT", "RESUME_FROM", "FORK_FROM"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    for name in ("NAME", "ID", "NOTES", "TAGS", "GROUP", "JOB_TYPE"):
        monkeypatch.delenv(f"WANDB_RUN_{name}", raising=False)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    for store in (fake_wandb.HISTORIES, fake_wandb.STARTS, fake_wandb.EXIT_CODES):
        store.clear()
    monkeypatch.setattr(wandb_logger, "_PACKAGE", fake_wandb.__name__)
    return fake_wandb


def losses(wandb: Any) -> dict[int, float]:
    (history,) = wandb.HISTORIES.values()
    return {step: metrics[LOSS] for step, metrics in sorted(history.items())}


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path: Path, wandb: Any, caplog) -> None:
    first = begin(tmp_path, **ON)  # killed: never closed
    log_steps(first, range(1, 8))
    second = begin(tmp_path, 4, **ON)
    log_steps(second, range(5, 10), offset=0.5)
    second.close()
    assert losses(wandb) == {n: n + 0.5 * (n > 7) for n in range(1, 10)}
    assert [start["resume"] for start in wandb.STARTS] == ["allow", "allow"]
    assert wandb.STARTS[0]["id"] == wandb.STARTS[1]["id"]
    assert wandb.STARTS[0]["config"] == {"a": 1} and wandb.STARTS[0]["project"] == "torchtitan"
    assert caplog.text.count("computed again up to there is left out") == 1
    assert f"WANDB_RESUME_FROM='{wandb.STARTS[0]['id']}?_step=4'" in caplog.text


def test_a_rewound_run_takes_the_new_values(tmp_path: Path, wandb: Any, monkeypatch) -> None:
    first = begin(tmp_path, **ON)
    log_steps(first, range(1, 8))
    monkeypatch.setenv("WANDB_RESUME_FROM", f"{wandb.STARTS[0]['id']}?_step=4")
    log_steps(begin(tmp_path, 4, **ON), range(5, 7), offset=0.5)
    log_steps(begin(tmp_path, 6, **ON), range(7, 9), offset=0.5)  # the same environment again
    assert losses(wandb) == {n: n + 0.5 * (n > 4) for n in range(1, 9)}


def test_a_start_from_nothing_is_a_new_wandb_run(tmp_path: Path, wandb: Any) -> None:
    for _ in range(2):
        log_steps(begin(tmp_path, **ON), range(1, 3))
    assert len(wandb.HISTORIES) == 2


def test_only_the_rank_with_the_loss_sends(tmp_path: Path, wandb: Any) -> None:
    begin(tmp_path, rank_dims=dims(pp=2, world_size=2), **ON).close()
    assert not wandb.STARTS and not list(tmp_path.iterdir())


def test_names_stand_under_the_tag(tmp_path: Path, wandb: Any) -> None:
    built = MetricsProcessor.Config(enable_wandb=True).build(
        parallel_dims=dims(), dump_folder=str(tmp_path), tag="mine"
    )
    built.log_validation(2.0, 3)
    (history,) = wandb.HISTORIES.values()
    assert history == {3: {"mine/validation_metrics/loss": 2.0}}


def test_a_run_that_failed_is_closed_as_failed(tmp_path: Path, wandb: Any) -> None:
    begin(tmp_path / "a", **ON).close()
    failed = begin(tmp_path / "b", **ON)
    try:
        raise RuntimeError
    except RuntimeError:
        failed.close()
    assert wandb.EXIT_CODES == [0, 1]


def test_the_environment_names_the_run() -> None:
    environment = {
        "WANDB_TEAM": "team",
        "WANDB_PROJECT": "project",
        "WANDB_RUN_NAME": "name",
        "WANDB_RUN_NOTES": "notes",
        "WANDB_RUN_TAGS": "one, two,",
        "WANDB_RUN_GROUP": "group",
        "WANDB_RUN_JOB_TYPE": "type",
    }
    assert settings_of(environment) == {
        "entity": "team",
        "project": "project",
        "name": "name",
        "notes": "notes",
        "tags": ["one", "two"],
        "group": "group",
        "job_type": "type",
    }
    empty = settings_of({})
    assert empty.pop("project") == "torchtitan" and set(empty.values()) == {None}


def test_a_refusal_says_what_to_do(tmp_path: Path, wandb: Any, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_TEAM", "refused")
    with pytest.raises(RuntimeError, match="No API key.*wandb login.*WANDB_MODE=offline"):
        begin(tmp_path, **ON)


def test_a_missing_package_is_named_before_the_run_and_in_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(wandb_logger, "_PACKAGE", "no_such_package_of_this_name")
    (message,) = MetricsProcessor.Config(enable_wandb=True).check()
    assert "wandb is not installed" in message
    with pytest.raises(ImportError, match="wandb is not installed"):
        begin(tmp_path, **ON)


@pytest.mark.usefixtures("wandb")
def test_a_fork_and_a_rewind_at_once_are_refused(monkeypatch) -> None:
    config = MetricsProcessor.Config(enable_wandb=True)
    assert config.check() == []
    monkeypatch.setenv("WANDB_RESUME_FROM", "a?_step=1")
    monkeypatch.setenv("WANDB_FORK_FROM", "b?_step=1")
    assert ["exclude each other" in message for message in config.check()] == [True]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_the_real_package_keeps_to_this_offline(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for start in (0, 4):
        built = begin(tmp_path, start, **ON)
        log_steps(built, range(start + 1, start + 6))
        log_steps(built, range(start + 2, start + 4))  # as a run does that repeats steps
        built.close()
    names = sorted(path.stem for path in (tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(names) == 2 and len(set(names)) == 1
    assert caplog.text.count("left out") == 2
