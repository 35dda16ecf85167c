"""Turn structured logs into a trace that Chrome and Perfetto draw: a lane for each task of each rank.

    <log_dir>/*.jsonl -> spans, instants -> {"traceEvents": [...]} -> chrome://tracing, ui.perfetto.dev

A span ends with the latest start of its name in the same file and task that has not ended yet. One
that never ended is drawn up to the last record of its file, and marked. Two things are for libraries, which log
events in their own way: a span that another task ends is drawn where it ends, and an event that is no
part of a span is an instant, with its value.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.observability.run_log.records import BrokenLines, log_files, read_records
from torchtitan.observability.structured_logger.records import span_and_phase

_SCALAR = "metric_value"


def generate_gantt_trace(log_dir: str | Path, output_path: str | Path) -> dict[str, Any]:
    """Write the trace of all logs in ``log_dir`` to ``output_path``, and return it.

    Raises ``FileNotFoundError`` if ``log_dir`` has no logs.
    """
    events: list[dict[str, Any]] = []
    for number, path in enumerate(log_files(Path(log_dir))):
        events += _events_of(path, number)
    begin = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] -= begin
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"begin_us": begin}}
    Path(output_path).write_text(json.dumps(trace), encoding="utf-8")
    return trace


def _events_of(path: Path, number: int) -> Iterator[dict[str, Any]]:
    """The events of one file; ``number`` tells files apart, as restarts have the same ranks."""
    lanes: dict[str, int] = {}
    open_spans: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    now = 0
    for record in read_records(path, BrokenLines()):
        now, task = int(record["time"] * 1e6), str(record.get("task_name"))
        if not lanes:
            yield _name("process_name", f"rank {record.get('rank')}, {path.name}", pid=number)
        if task not in lanes:
            lanes[task] = len(lanes)
            yield _name("thread_name", task, pid=number, tid=lanes[task])
        kind = str(record.get("log_type_name"))
        event = {
            "name": str(record.get("event_name")),
            "cat": str(record.get("source")),
            "pid": number,
            "tid": lanes[task],
            "ts": now,
            "args": {key: record.get(key) for key in ("step", "step_tags", "caller")},
        }
        if record.get("log_type") == "instant":
            yield {**event, "name": kind, "ph": "i", "s": "t"}
        elif record.get("log_type") == "event" and kind != _SCALAR:
            span, phase = span_and_phase(kind)
            waiting = open_spans.setdefault(task, [])
            if not phase:
                event["args"]["value"] = record.get("value")
                yield {**event, "ph": "i", "s": "t"}
            elif phase == "start":
                waiting.append((span, event))
            elif phase == "end":
                begun = _take_latest(waiting, span) or _take_from_others(open_spans, span, event)
                if begun is not None:
                    yield {**begun, "ph": "X", "dur": max(now - begun["ts"], 0)}
    for waiting in open_spans.values():
        for _, begun in waiting:
            begun["args"]["unfinished"] = True
            yield {**begun, "ph": "X", "dur": max(now - begun["ts"], 0)}


def _take_latest(waiting: list[tuple[str, dict[str, Any]]], span: str) -> dict[str, Any] | None:
    for index in reversed(range(len(waiting))):
        if waiting[index][0] == span:
            return waiting.pop(index)[1]
    return None


def _take_from_others(
    open_spans: dict[str, list[tuple[str, dict[str, Any]]]], span: str, end: dict[str, Any]
) -> dict[str, Any] | None:
    """What one task began and another one ends, moved to the latter: in the former it may lie across others."""
    for waiting in open_spans.values():
        for index, (name, begun) in enumerate(waiting):
            if name == span and begun["args"]["step"] == end["args"]["step"]:
                del waiting[index]
                return {**begun, "tid": end["tid"]}
    return None


def _name(what: str, name: str, *, pid: int, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
