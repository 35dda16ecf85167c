"""A resumed run goes on with its curves: every step once, whatever happened in between."""

import json
import os
from datetime import datetime
from pathlib import Path

import pytest
from torchtitan.components.metrics import continuation
from torchtitan.components.metrics.continuation import RunRecord, wandb_identity

from tests.unit_tests.components.metrics.doubles import begin, log_steps, read_scalars

LOSS = "loss_metrics/global_avg_loss"
ON = {"enable_tensorboard": True}


class Later(datetime):
    """A clock that shows another minute at each look."""

    looks = 0

    @classmethod
    def now(cls, tz=None):
        cls.looks += 1
        return cls(2026, 1, 2, 3, cls.looks % 60)


@pytest.fixture
def minutes_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation, "datetime", Later)


@pytest.mark.usefixtures("minutes_pass")
def test_a_resumed_run_goes_on_in_the_same_folder_and_has_each_step_once(tmp_path: Path) -> None:
    first = begin(tmp_path, **ON)
    log_steps(first, range(1, 8))
    # Killed: never closed, and its last record cut off in the middle.
    (events,) = tmp_path.rglob("events.*")
    os.truncate(events, events.stat().st_size - 5)
    second = begin(tmp_path, 4, **ON)
    log_steps(second, range(5, 10), offset=0.5)
    second.close()
    third = begin(tmp_path, 8, **ON)
    log_steps(third, range(9, 11))
    third.close()
    expected = [(n, n + 0.5 * (4 < n < 9)) for n in range(1, 11)]
    assert read_scalars(tmp_path)[LOSS] == expected
    first.close()


@pytest.mark.usefixtures("minutes_pass")
def test_a_run_that_goes_back_replaces_its_end(tmp_path: Path) -> None:
    for start, end in ((0, 9), (3, 5)):
        built = begin(tmp_path, start, **ON)
        log_steps(built, range(start + 1, end + 1))
        built.close()
    assert [step for step, _ in read_scalars(tmp_path)[LOSS]] == [1, 2, 3, 4, 5]


def folders(tmp_path: Path) -> list[str]:
    return sorted({path.parent.name for path in tmp_path.rglob("events.*")})


@pytest.mark.usefixtures("minutes_pass")
def test_a_start_from_nothing_begins_a_folder_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        begin(tmp_path, **ON).close()
    assert len(folders(tmp_path)) == 2


def test_two_starts_from_nothing_within_a_minute_do_not_mix(tmp_path: Path, monkeypatch) -> None:
    class Stopped(Later):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4)

    monkeypatch.setattr(continuation, "datetime", Stopped)
    for offset in (0.0, 0.5):
        built = begin(tmp_path, **ON)
        log_steps(built, range(1, 4), offset)
        built.close()
    assert folders(tmp_path) == ["20260102-0304"]
    assert read_scalars(tmp_path)[LOSS] == [(1, 1.5), (2, 2.5), (3, 3.5)]


@pytest.mark.usefixtures("minutes_pass")
@pytest.mark.parametrize("content", ["", '{"tensorboard": 3}', "[]", '{"tensorb'])
def test_a_record_that_cannot_be_used_begins_new_curves(
    tmp_path: Path, content: str, caplog
) -> None:
    begin(tmp_path, **ON).close()
    (tmp_path / "metrics_run.json").write_text(content)
    begin(tmp_path, 5, **ON).close()
    assert len(folders(tmp_path)) == 2
    assert "cannot be used" in caplog.text
    begin(tmp_path, 6, **ON).close()
    assert len(folders(tmp_path)) == 2


@pytest.mark.usefixtures("minutes_pass")
def test_a_folder_that_is_gone_is_not_gone_on_with(tmp_path: Path) -> None:
    begin(tmp_path, **ON).close()
    (old,) = folders(tmp_path)
    (tmp_path / "tb" / old).rename(tmp_path / "moved")
    begin(tmp_path, 5, **ON).close()
    (new,) = folders(tmp_path / "tb")
    assert new != old


def test_a_folder_that_cannot_be_written_costs_only_the_continuation(
    tmp_path: Path, caplog
) -> None:
    continuation.write_record(str(tmp_path / "file" / "record.json"), RunRecord(tensorboard="a"))
    (tmp_path / "plain").touch()
    continuation.write_record(str(tmp_path / "plain" / "record.json"), RunRecord())
    assert caplog.text.count("a restart will begin new curves") == 1
    found = continuation.record_of_start(str(tmp_path / "file" / "record.json"), 1)
    assert found == RunRecord(tensorboard="a")
    assert os.listdir(tmp_path / "file") == ["record.json"]


def test_nothing_is_opened_when_no_step_is_left(tmp_path: Path) -> None:
    begin(tmp_path, 1000, **ON).close()
    assert not list(tmp_path.iterdir())


def test_replicas_keep_records_of_their_own() -> None:
    paths = {continuation.record_path("run", replica) for replica in (None, 0, 1)}
    assert paths == {f"run/metrics_run{name}.json" for name in ("", ".replica_0", ".replica_1")}


KNOWN = RunRecord(wandb_id="known")


@pytest.mark.parametrize(
    ("record", "environment", "arguments"),
    [
        (KNOWN, {}, {"id": "known", "resume": "allow"}),
        (KNOWN, {"WANDB_RUN_ID": "given"}, {"id": "given", "resume": "allow"}),
        (RunRecord(), {"WANDB_RUN_ID": "given"}, {"id": "given", "resume": "allow"}),
        (KNOWN, {"WANDB_RESUME_FROM": "a?_step=4"}, {"resume_from": "a?_step=4"}),
        (
            KNOWN,
            {"WANDB_FORK_FROM": "a?_step=4", "WANDB_RUN_ID": "b"},
            {"fork_from": "a?_step=4", "id": "b"},
        ),
    ],
)
def test_the_wandb_run_is_the_recorded_one_unless_the_environment_says_otherwise(
    record: RunRecord, environment: dict[str, str], arguments: dict[str, str]
) -> None:
    assert wandb_identity(record, environment)[1] == arguments


@pytest.mark.parametrize("variable", ["WANDB_RESUME_FROM", "WANDB_FORK_FROM"])
def test_a_fork_or_rewind_is_done_once_for_one_environment(variable: str) -> None:
    environment = {variable: "a?_step=4"}
    record, first = wandb_identity(KNOWN, environment)
    again, second = wandb_identity(record, environment)
    assert "resume" not in first and again == record
    assert second == {"id": record.wandb_id, "resume": "allow"}
    assert (record.wandb_id == "a") == (variable == "WANDB_RESUME_FROM")
    _, third = wandb_identity(record, {variable: "a?_step=5"})
    assert "resume" not in third


def test_after_a_rewind_its_target_goes_on_whatever_other_run_is_named() -> None:
    environment = {"WANDB_RESUME_FROM": "a?_step=4", "WANDB_RUN_ID": "given"}
    record, _ = wandb_identity(KNOWN, environment)
    assert wandb_identity(record, environment)[1] == {"id": "a", "resume": "allow"}


def test_new_wandb_runs_have_ids_of_their_own() -> None:
    ids = {wandb_identity(RunRecord(), {})[1]["id"] for _ in range(10)}
    assert len(ids) == 10 and all(len(each) == 8 for each in ids)


def test_the_record_names_the_curves(tmp_path: Path) -> None:
    begin(tmp_path, **ON).close()
    record = json.loads((tmp_path / "metrics_run.json").read_text())
    assert [record["tensorboard"]] == folders(tmp_path)
