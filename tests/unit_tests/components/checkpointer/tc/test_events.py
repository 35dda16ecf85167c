"""What torch_checkpointing tells about a save is in the structured log, with step and durations."""

import inspect
import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch_checkpointing import checkpoint_reader, default_resharder
from torch_checkpointing.logging_utils import checkpoint_logging_context, EventLogger, EventType
from torchtitan.components.checkpointer.tc import events
from torchtitan.components.checkpointer.torch_checkpointing import TorchCheckpointingManager
from torchtitan.observability import structured_logger as sl
from torchtitan.observability.run_log import read_run
from torchtitan.observability.run_log.rank_log import _PARTS
from torchtitan.observability.structured_logger.gantt_generator import generate_gantt_trace
from torchtitan.observability.structured_logger.records import span_and_phase
from torchtitan.tools import console_filter
from torchtitan.tools.logging import init_logger, logger

from tests.unit_tests.components.checkpointer.runs import build_run
from tests.unit_tests.components.checkpointer.tc import bare_writer
from tests.unit_tests.observability.reading import records_below
from tests.unit_tests.structure.sources import ROOT

pytestmark = pytest.mark.usefixtures("fresh_structured_logger")
BACKEND = logging.getLogger(events.BACKEND_LOGGER_NAME)
METRIC = "train.checkpoint_write.execute.rename.latency_ms"


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    handlers, level, backend_level = [*logger.handlers], logger.level, BACKEND.level
    context = checkpoint_logging_context.export_context()
    yield
    checkpoint_logging_context.import_context(context)
    logger.handlers[:] = handlers
    logger.setLevel(level)
    BACKEND.setLevel(backend_level)


def test_a_metric_of_the_library_is_in_the_log_and_not_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init_logger()
    sl.init_structured_logger("training", str(tmp_path), rank=0)
    sl.set_step(12)
    events.stamp(11)
    event_logger = EventLogger()
    writer = logging.getLogger("torch_checkpointing.checkpoint_writer")
    writer.info("Renamed", extra=event_logger(EventType.LOG_METRIC, metric_name=METRIC, value=8.5))
    writer.info("Started", extra=event_logger(EventType.CHECKPOINT_WRITE_START))
    writer.warning("The disk is slow")
    metric, start = records_below(tmp_path)
    assert (metric["event_name"], metric["value"], metric["step"]) == (METRIC, 8.5, 11)
    assert [each.partition(":")[0] for each in metric["context"]] == ["checkpointing_version"]
    assert metric["measured_from_start_time_ms"] >= 0
    assert (start["log_type_name"], start["event_name"]) == (
        "checkpoint_write_start",
        "checkpoint_write",
    )
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("WARNING The disk is slow")


def test_a_process_that_writes_has_a_log_and_a_console_of_its_own(tmp_path: Path) -> None:
    sl.init_structured_logger("training", str(tmp_path), rank=3)
    sl.log_trace_instant("structured_logger_started")
    events.stamp(7)
    arguments = (events.structured_logger_init_args(), init_logger, ())
    done = subprocess.run(
        [
            *(sys.executable, bare_writer.__file__, str(tmp_path / "step-7")),
            json.dumps(checkpoint_logging_context.export_context()),
        ],
        input=pickle.dumps((events.init_subprocess_logging, arguments)),
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "RANK": "3"},
        capture_output=True,
        check=True,
        timeout=120,
    )
    (line,) = done.stdout.decode().splitlines()
    assert line.startswith("[titan rank 3] ") and line.endswith("WARNING the disk is slow")
    assert not done.stderr
    (log,) = (tmp_path / "structured_logs").glob("training.writer.global_rank_3.*.jsonl")
    records = [json.loads(line) for line in log.open()]
    assert {record["step"] for record in records} == {7}
    assert {record["rank"] for record in records} == {3}
    durations = {record["event_name"]: record["value"] for record in records}
    name = "train.checkpoint_write.execute.storage.model.save_task.e2e.latency_ms"
    assert isinstance(durations[name], int) and all(record["context"] for record in records)

    run = read_run(tmp_path)
    assert len(run.starts) == 1 and [log.rank for log in run.helpers] == [3]
    trace = generate_gantt_trace(tmp_path, tmp_path / "trace.json")
    spans = {
        (event["name"], event["args"]["step"])
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    }
    assert ("checkpoint_persistent_save_model", 7) in spans
    assert not any(event["args"].get("unfinished") for event in trace["traceEvents"])


@pytest.mark.usefixtures("one_rank")
def test_a_run_shows_one_line_a_save_and_records_the_parts_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init_logger()
    sl.init_structured_logger("training", str(tmp_path), rank=0)
    run = build_run(tmp_path, manager=TorchCheckpointingManager, interval=2)
    capsys.readouterr()
    for step in range(1, 6):
        sl.set_step(step)
        run.train(step)
    run.manager.close()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all("Saved checkpoint of step" in line for line in lines)

    trace = generate_gantt_trace(tmp_path, tmp_path / "trace.json")
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    found = {(event["cat"], event["name"], event["args"]["step"]) for event in spans}
    for step in (2, 4):
        assert ("training", "checkpoint_staging", step) in found
        assert ("training.writer", "checkpoint_write", step) in found
        assert ("training.writer", "checkpoint_persistent_save_optim", step) in found
    assert not any(event["args"].get("unfinished") for event in spans)
    records = records_below(tmp_path)
    written = [r["value"] for r in records if r["log_type_name"] == "checkpoint_write_end"]
    assert len(written) == 2 and min(written) >= 0 and len(read_run(tmp_path).starts) == 1


def test_a_trainer_that_records_nothing_has_a_writer_that_records_nothing(tmp_path: Path) -> None:
    sl.init_structured_logger("training", str(tmp_path), enable=False)
    assert events.structured_logger_init_args() is None
    called: list[int] = []
    events.init_subprocess_logging(None, called.append, (5,))
    assert called == [5] and sl.init_arguments() is None and list(tmp_path.iterdir()) == []


def test_the_function_that_is_given_comes_before_the_log(tmp_path: Path) -> None:
    seen: list[sl.InitArguments | None] = []
    events.init_subprocess_logging(
        ("training.writer", str(tmp_path), 2), lambda: seen.append(sl.init_arguments()), ()
    )
    assert seen == [None] and sl.init_arguments() == ("training.writer", str(tmp_path), 2)


@pytest.mark.parametrize(
    ("own", "inherited", "expected"),
    [
        (logging.NOTSET, logging.WARNING, logging.INFO),
        (logging.NOTSET, logging.INFO, logging.NOTSET),
        (logging.NOTSET, logging.DEBUG, logging.NOTSET),
        (logging.ERROR, logging.WARNING, logging.ERROR),
        (logging.DEBUG, logging.WARNING, logging.DEBUG),
    ],
)
def test_the_library_is_raised_to_info_only_where_nobody_chose(
    own: int, inherited: int, expected: int
) -> None:
    BACKEND.setLevel(own)
    logger.setLevel(inherited)
    events.init_subprocess_logging(None, None, ())
    assert BACKEND.level == expected


def test_a_context_without_a_step_leaves_the_step_alone() -> None:
    sl.set_step(3)
    events.adopt({"job": "a"})
    assert sl.get_step() == 3 and checkpoint_logging_context.get("job") == "a"
    events.adopt({"step": 0})
    assert sl.get_step() == 0


def test_no_event_of_the_library_is_taken_for_a_part_of_a_step() -> None:
    assert not {span_and_phase(str(kind))[0] for kind in EventType} & set(_PARTS)


def test_the_warnings_that_the_console_leaves_out_are_worded_as_in_the_library() -> None:
    table = console_filter._UNHELPFUL_WARNINGS
    for module in (default_resharder, checkpoint_reader):
        source = inspect.getsource(module)
        assert module.logger.name in table
        for text in table[module.logger.name]:
            assert f'"{text}' in source, text
    source = inspect.getsource(sys.modules["torch.distributed.device_mesh"])
    assert f'"{table["torch.distributed.device_mesh"][0]}' in source
