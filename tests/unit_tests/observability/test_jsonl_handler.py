"""The file of structured records: named, complete, flushed, and never in the way of training."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from torchtitan.observability import structured_logger as sl
from torchtitan.observability.growing_file import GrowingFile
from torchtitan.observability.structured_logger.jsonl_handler import (
    MAX_MESSAGE_SIZE,
    register_jsonl_handler,
    TraceJsonlFormatter,
    TraceJsonlHandler,
)

from tests.unit_tests.small_disk import fill, small_disk

KEYS = set(
    "delta_ms tid rank global_rank local_rank source host_name pid step relative_step step_tags time "
    "time_ms time_us log_type log_type_name event_name value task_name caller log_file log_function "
    "log_level logger_name seq_id message".split()
)


def make_record(message: str = "text", **extra: object) -> logging.LogRecord:
    logger = logging.getLogger("test_jsonl_handler")
    return logger.makeRecord(
        logger.name, logging.INFO, "/src/file.py", 3, message, (), None, "work", extra
    )


def read(handler: TraceJsonlHandler) -> list[dict[str, object]]:
    """The records in the file; every line has to be a whole one."""
    return [json.loads(line) for line in Path(handler.baseFilename).read_text().splitlines()]


@pytest.fixture
def handler(tmp_path: Path) -> Iterator[TraceJsonlHandler]:
    handler = TraceJsonlHandler(2, "training", str(tmp_path))
    yield handler
    handler.close()


def test_a_record_has_all_its_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    formatter = TraceJsonlFormatter(rank=9, source="training")
    first = formatter._log_dict(make_record(**sl.event_extra("optim_end", value=1.5)))
    second = json.loads(formatter.format(make_record()))
    assert set(first) == set(second) == KEYS
    assert (first["rank"], first["global_rank"], first["local_rank"]) == (9, 9, 1)
    assert (first["log_type_name"], first["value"]) == ("optim_end", 1.5)
    assert first["caller"] == "file.py:3:work" and first["pid"] == os.getpid()
    assert first["time_us"] // 1000 == first["time_ms"] == int(first["time"] * 1000)
    assert (first["seq_id"], second["seq_id"]) == (0, 1)
    assert first["delta_ms"] == 0 and second["delta_ms"] >= 0
    assert second["log_type"] == "text"


def test_a_long_message_is_cut():
    formatter = TraceJsonlFormatter(rank=0, source="training")
    assert len(formatter._log_dict(make_record("x" * 5000))["message"]) == MAX_MESSAGE_SIZE == 1000


def test_the_file_is_named_after_source_rank_and_start(handler: TraceJsonlHandler, tmp_path: Path):
    pattern = r"training\.global_rank_2\.\d{8}-\d{6}-[0-9a-z]{6}\.jsonl"
    again = TraceJsonlHandler(2, "training", str(tmp_path))
    again.close()
    names = os.listdir(tmp_path / "structured_logs")
    assert len(names) == 2 and all(re.fullmatch(pattern, name) for name in names)


def test_plain_text_does_not_reach_the_file(handler: TraceJsonlHandler):
    handler.handle(make_record("plain"))
    handler.handle(make_record(**sl.event_extra("start", log_type=sl.LogType.INSTANT)))
    lines = Path(handler.baseFilename).read_text().splitlines()
    assert [json.loads(line)["log_type_name"] for line in lines] == ["start"]


def test_the_filter_tells_events_from_text():
    events_only = sl.TraceEventsOnlyFilter()
    for kind, passes in zip(sl.LogType, (True, True, False), strict=True):
        record = make_record(**sl.event_extra("name", log_type=kind))
        assert events_only.filter(record) is passes
    assert not events_only.filter(make_record())
    assert set(sl.event_extra("name")) == {field.value for field in sl.ExtraFields}


def test_registering_adds_one_handler_to_the_logger_that_is_given(tmp_path: Path):
    logger = logging.Logger("private")
    register_jsonl_handler(
        structured_logger=logger, rank=0, source="training", output_dir=str(tmp_path)
    )
    (handler,) = logger.handlers
    assert isinstance(handler, TraceJsonlHandler)
    handler.close()


def log_events(handler: TraceJsonlHandler, *names: str) -> None:
    for name in names:
        handler.handle(make_record(**sl.event_extra(name)))


def test_a_disk_that_fails_is_reported_once_and_raises_nothing(
    handler: TraceJsonlHandler, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    with patch.object(handler, "_file", GrowingFile("/dev/full")):
        log_events(handler, "a", "b", "c")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "misses records" in caplog.text and handler.baseFilename in caplog.text
    assert "Traceback" not in capfd.readouterr().err
    # Once there is room, it goes on.
    log_events(handler, "d")
    assert [record["event_name"] for record in read(handler)] == ["d"]


def test_a_log_that_cannot_even_begin_is_one_warning_and_begins_when_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    in_the_way = tmp_path / "structured_logs"
    in_the_way.write_text("a file where the folder should be")
    handler = TraceJsonlHandler(0, "training", str(tmp_path))
    log_events(handler, "a", "b")
    in_the_way.unlink()
    log_events(handler, "c")
    handler.close()
    assert [record["event_name"] for record in read(handler)] == ["c"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_full_disk_leaves_whole_lines_and_the_log_goes_on_when_there_is_room(tmp_path: Path):
    with small_disk(tmp_path / "disk", 64) as disk:
        handler = TraceJsonlHandler(0, "training", str(disk))
        log_events(handler, "before")
        ballast = fill(disk)
        names = [f"lost {number}" for number in range(20)]
        log_events(handler, *names)
        ballast.unlink()
        log_events(handler, "after")
        handler.close()
        found = [str(record["event_name"]) for record in read(handler)]
    # The page that was begun takes a few more.
    kept = found[1:-1]
    assert found[0] == "before" and found[-1] == "after" and kept == names[: len(kept)]
    assert len(kept) < len(names)


def test_an_event_that_nobody_can_write_down_is_left_out(
    handler: TraceJsonlHandler, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    class Unspeakable:
        def __repr__(self) -> str:
            raise ValueError("mine")

    for value in (Unspeakable(), Unspeakable(), 3):
        record = make_record(**sl.event_extra("name"))
        record.value = value
        handler.handle(record)
    assert [record["value"] for record in read(handler)] == [3]
    assert len(caplog.records) == 1 and "Traceback" not in capfd.readouterr().err


def test_a_killed_process_leaves_every_record_it_made(tmp_path: Path):
    code = (
        "import os, signal, sys; from torchtitan.observability import structured_logger as sl; "
        "sl.init_structured_logger('training', sys.argv[1]); sl.set_step(1); "
        "sl.log_trace_instant('a'); sl.log_trace_instant('b'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(__file__).resolve().parents[3],
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    (file,) = (tmp_path / "structured_logs").iterdir()
    assert [json.loads(line)["event_name"] for line in file.read_text().splitlines()] == ["a", "b"]


def test_the_package_needs_only_the_standard_library():
    code = (
        "import sys; import torchtitan.observability.structured_logger; "
        "assert not {'torch', 'numpy', 'tyro'} & set(sys.modules)"
    )
    repository = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=repository, check=True, timeout=60)
