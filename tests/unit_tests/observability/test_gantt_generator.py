"""A trace of the logs: every span once, in its lane, also those that never ended."""

import json
from pathlib import Path
from typing import Any

import pytest
from torchtitan.observability.structured_logger.gantt_generator import generate_gantt_trace

from tests.unit_tests.observability.written import Rank, writer_of


def spans(trace: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    """(name, process, begin in ms, duration in ms) of all spans."""
    return [
        (event["name"], event["pid"], event["ts"] // 1000, event["dur"] // 1000)
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    ]


def test_spans_of_one_name_end_with_their_latest_start(tmp_path: Path) -> None:
    log = Rank(tmp_path)
    with log.span("outer", 1):
        log.now += 2
        with log.span("same", 1):
            log.now += 3
            log.takes("same", 4)
    log.cut_off()
    output = tmp_path / "trace.json"
    trace = generate_gantt_trace(tmp_path / "structured_logs", output)
    assert spans(trace) == [
        ("same", 0, 5000, 4000),
        ("same", 0, 2000, 8000),
        ("outer", 0, 0, 11000),
    ]
    assert json.loads(output.read_text()) == trace


def test_every_file_and_task_has_its_lane(tmp_path: Path) -> None:
    for rank in (0, 1):
        log = Rank(tmp_path, rank)
        log.takes("a", 1)
        log.write("event", "b_start", task_name="saver")
        log.now += 1
        log.write("event", "b_end", task_name="saver")
    trace = generate_gantt_trace(tmp_path, tmp_path / "trace.json")
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert names[0].startswith("rank 0, training.global_rank_0")
    assert names.count("saver") == 2 and len(names) == 6
    lanes = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["ph"] == "X"}
    assert lanes == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert sum(event["ph"] == "i" for event in trace["traceEvents"]) == 2


def test_a_span_that_never_ended_is_drawn_and_marked(tmp_path: Path) -> None:
    log = Rank(tmp_path)
    log.write("event", "step_start")
    log.now += 3
    log.scalar("loss", 1.0)
    log.write("event", "stray_end")
    trace = generate_gantt_trace(tmp_path, tmp_path / "trace.json")
    (event,) = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert event["dur"] == 3_000_000 and event["args"]["unfinished"]


def test_the_writes_of_a_writer_process_have_a_place_of_their_own(tmp_path: Path) -> None:
    Rank(tmp_path).takes("step", 4)
    writer_of(tmp_path, at=1000)
    trace = generate_gantt_trace(tmp_path, tmp_path / "trace.json")
    assert spans(trace) == [("step", 0, 0, 4000), ("save_model", 1, 1000, 2000)]
    places = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert places[0].startswith("rank 0, training.global_rank_0.")
    assert places[1].startswith("rank 0, training.writer.global_rank_0.")


def test_a_span_that_another_task_ends_is_drawn_there_if_it_is_of_the_same_step(
    tmp_path: Path,
) -> None:
    log = Rank(tmp_path)
    for step in (1, 2):
        log.begin_step(step)
        log.write("event", "staging_start", event_name="staging")
        log.now += 1
    log.write("event", "staging_end", step=1, task_name="stager")
    log.write("event", "staging_end", step=3, task_name="stager")
    trace = generate_gantt_trace(tmp_path, tmp_path / "trace.json")
    drawn = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(event["args"]["step"], event["tid"], event["dur"]) for event in drawn] == [
        (1, 1, 2_000_000),
        (2, 0, 1_000_000),
    ]
    assert [event["args"].get("unfinished") for event in drawn] == [None, True]


def test_an_event_without_a_span_is_drawn_with_its_value(tmp_path: Path) -> None:
    writer_of(tmp_path)
    trace = generate_gantt_trace(tmp_path, tmp_path / "trace.json")
    (event,) = [event for event in trace["traceEvents"] if "value" in event.get("args", ())]
    assert (event["ph"], event["name"], event["ts"]) == ("i", "rename.latency_ms", 3_000_000)
    assert (event["args"]["value"], event["args"]["step"]) == (3, 4)


def test_a_folder_without_logs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no structured logs"):
        generate_gantt_trace(tmp_path, tmp_path / "trace.json")
