"""What spans, instants and scalars leave in the file, and when they leave nothing."""

import asyncio
import inspect
import json
import logging
import math
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.observability import structured_logger as sl
from torchtitan.observability.structured_logger import api

pytestmark = pytest.mark.usefixtures("fresh_structured_logger")

Records = Any


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """A function that returns all records written so far."""
    sl.init_structured_logger("training", str(tmp_path), rank=0)

    def read() -> list[dict[str, Any]]:
        (file,) = (tmp_path / "structured_logs").iterdir()
        return [json.loads(line) for line in file.read_text().splitlines()]

    return read


@contextmanager
def no_handlers() -> Generator[None]:
    kept, api._structured_logger.handlers = api._structured_logger.handlers, []
    try:
        yield
    finally:
        api._structured_logger.handlers = kept


def test_a_span_has_a_start_and_an_end_with_its_milliseconds(records: Records):
    with sl.log_trace_span("fwd_bwd", "microbatch 0"):
        pass
    start, end = records()
    assert (start["log_type_name"], end["log_type_name"]) == ("fwd_bwd_start", "fwd_bwd_end")
    assert start["value"] is None and 0 <= end["value"] < 1000
    assert {start["event_name"], end["event_name"]} == {"microbatch 0"}
    assert {start["log_type"], end["log_type"]} == {"event"}


def test_a_span_that_fails_says_so_and_lets_the_error_through(records: Records):
    with pytest.raises(KeyError), sl.log_trace_span("optim"):
        raise KeyError("lost")
    names = [record["log_type_name"] for record in records()]
    assert names == ["optim_start", "optim_error", "optim_end"]
    assert "KeyError: 'lost'" in records()[1]["message"]


def test_nested_and_overlapping_calls_of_one_function_keep_their_own_times(records: Records):
    @sl.log_trace_span("countdown")
    def countdown(number: int) -> int:
        return number and countdown(number - 1)

    assert countdown(2) == 0
    ends = [record["value"] for record in records() if record["log_type_name"].endswith("_end")]
    assert ends == sorted(ends) and len(ends) == 3


def test_an_async_function_is_timed_until_it_is_done(records: Records):
    order: list[str] = []

    @sl.log_trace_span("rollout")
    async def rollout(name: str) -> str:
        order.append(name)
        await asyncio.sleep(0)
        order.append(name)
        return name

    async def both() -> list[str]:
        return list(await asyncio.gather(rollout("a"), rollout("b")))

    assert asyncio.run(both()) == ["a", "b"] and order == ["a", "b", "a", "b"]
    assert inspect.iscoroutinefunction(rollout) and rollout.__name__ == "rollout"
    names = [(record["log_type_name"], record["task_name"]) for record in records()]
    assert [name for name, _ in names] == ["rollout_start"] * 2 + ["rollout_end"] * 2
    assert len({task for _, task in names}) == 2


def test_a_record_names_the_line_that_asked_for_it(records: Records):
    @sl.log_trace_span("decorated")
    def decorated() -> None:
        sl.log_trace_instant("from_caller", stacklevel=3)

    with sl.log_trace_span("block"):
        sl.log_trace_instant("instant")
        sl.log_trace_scalar({"loss": 1})
    decorated()
    here = test_a_record_names_the_line_that_asked_for_it.__name__
    for record in records():
        file, _, function = record["caller"].split(":")
        if record["event_name"] == "from_caller":
            assert function == "timed"
        else:
            assert (file, function) == ("test_spans.py", here), record


def test_an_instant_is_one_record_of_its_own_kind(records: Records):
    sl.log_trace_instant("training_start")
    (record,) = records()
    assert (record["log_type"], record["log_type_name"]) == ("instant", "training_start")


def test_scalars_are_records_with_a_value_and_only_numbers_count(
    records: Records, caplog: pytest.LogCaptureFixture
):
    wrong: Any = {"flag": True, "text": "1", "tensor": torch.ones(1)}
    sl.log_trace_scalar({"loss": 2.5, "tokens": 7, "norm": math.nan} | wrong)
    found = [(r["log_type_name"], r["event_name"], r["value"]) for r in records()]
    assert found == [
        ("metric_value", "loss", 2.5),
        ("metric_value", "tokens", 7),
        ("metric_value", "norm", None),
    ]
    assert records()[2]["message"] == "norm = nan"
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.split("'")[1] for text in warned] == ["flag", "text", "tensor"]


def test_records_carry_the_step_the_relative_step_and_the_tags(records: Records):
    sl.log_trace_instant("before")
    sl.set_step(12, relative_step=2)
    sl.add_step_tag("eval")
    sl.log_trace_instant("during")
    before, during = records()
    assert (before["step"], before["relative_step"], before["step_tags"]) == (None, None, [])
    assert (during["step"], during["relative_step"], during["step_tags"]) == (12, 2, ["eval"])


def test_without_init_nothing_is_written_and_functions_still_work(tmp_path: Path):
    @sl.log_trace_span("decorated")
    def double(number: int) -> int:
        return 2 * number

    with no_handlers(), sl.log_trace_span("block"):
        sl.log_trace_instant("instant")
        sl.log_trace_scalar({"loss": 1})
        assert double(2) == 4
    assert list(tmp_path.iterdir()) == []


def test_a_logger_that_is_off_stays_off(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    sl.init_structured_logger("training", str(tmp_path), enable=False)
    sl.init_structured_logger("training", str(tmp_path))
    with sl.log_trace_span("block"):
        sl.log_trace_instant("instant")
    assert list(tmp_path.iterdir()) == [] and not caplog.records


def test_the_first_init_decides(records: Records, tmp_path: Path):
    sl.init_structured_logger("other", str(tmp_path / "other"))
    sl.log_trace_instant("once")
    assert len(records()) == 1 and not (tmp_path / "other").exists()


def test_the_rank_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "5")
    sl.init_structured_logger("training", str(tmp_path))
    (file,) = (tmp_path / "structured_logs").iterdir()
    assert file.name.startswith("training.global_rank_5.")


def keep_in_memory(*, structured_logger: logging.Logger, **settings: Any) -> None:
    """A handler factory, as the environment may name one."""
    handler = logging.NullHandler()
    handler.set_name(json.dumps(settings))
    structured_logger.addHandler(handler)


def test_handlers_named_in_the_environment_replace_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(api.HANDLERS_VARIABLE, f" {__name__}.keep_in_memory, ")
    sl.init_structured_logger("training", str(tmp_path), rank=1)
    names = [handler.get_name() for handler in api._structured_logger.handlers]
    expected = {"rank": 1, "source": "training", "output_dir": str(tmp_path)}
    assert json.dumps(expected) in names
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["nowhere.factory", f"{__name__}.missing", "bare"])
def test_an_unknown_handler_is_an_error_that_names_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(api.HANDLERS_VARIABLE, name)
    with pytest.raises(ImportError, match=f"names the handler factory '{name}'"):
        sl.init_structured_logger("training", str(tmp_path))


def test_compiled_code_runs_whole_and_leaves_no_record(records: Records):
    @sl.log_trace_span("decorated")
    def compute(x: torch.Tensor) -> torch.Tensor:
        with sl.log_trace_span("block"):
            sl.log_trace_instant("instant")
            sl.log_trace_scalar({"loss": 1})
            return x.sin()

    compiled = torch.compile(compute, backend="eager", fullgraph=True)
    x = torch.ones(3)
    assert torch.equal(compiled(x), x.sin())
    assert records() == []
