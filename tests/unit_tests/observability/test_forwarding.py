"""Events that libraries log as ordinary records are in the file, once, and nothing else is."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torchtitan.observability import structured_logger as sl
from torchtitan.observability.structured_logger import api
from torchtitan.tools.logging import init_logger

from tests.unit_tests.observability.reading import records_below

pytestmark = pytest.mark.usefixtures("fresh_structured_logger")
library = logging.getLogger("some_library.part")


@pytest.fixture(autouse=True)
def _root_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    root.setLevel(logging.INFO)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sl.init_structured_logger("training", str(tmp_path), rank=0)
    return tmp_path


def log_event(**fields: Any) -> None:
    library.info("saved", extra={"log_type": "event", "log_type_name": "log_metric", **fields})


def test_an_event_of_a_library_is_in_the_file_with_all_that_it_says(folder: Path) -> None:
    log_event(
        event_name="write.latency_ms", value=12, step=5, context=["version:1"], total_time_ms=34
    )
    (record,) = records_below(folder)
    assert (record["log_type"], record["log_type_name"]) == ("event", "log_metric")
    assert (record["event_name"], record["value"], record["step"]) == ("write.latency_ms", 12, 5)
    assert record["context"] == ["version:1"] and record["measured_from_start_time_ms"] == 34
    assert (record["logger_name"], record["message"]) == ("some_library.part", "saved")
    assert record["source"] == "training" and record["log_file"] == Path(__file__).name


def test_only_events_of_libraries_have_the_fields_of_libraries(folder: Path) -> None:
    sl.log_trace_instant("mine")
    log_event(measured_from_start_time_ms=1.5, total_time_ms=9)
    mine, other = records_below(folder)
    assert not {"context", "measured_from_start_time_ms"} & set(mine)
    assert other["measured_from_start_time_ms"] == 1.5 and "context" not in other


def test_what_is_no_event_and_what_is_below_the_level_stays_out(folder: Path) -> None:
    library.warning("plain text")
    library.info("other fields", extra={"log_type": "event"})
    library.setLevel(logging.DEBUG)
    try:
        library.debug("detail", extra={"log_type": "event", "log_type_name": "detail"})
    finally:
        library.setLevel(logging.NOTSET)
    assert records_below(folder) == []


def test_the_step_of_the_event_wins_over_the_step_of_the_loop(folder: Path) -> None:
    sl.set_step(9, relative_step=4)
    sl.add_step_tag("eval")
    for step in (7, None, 9):
        log_event(step=step)
    found = [(r["step"], r["relative_step"], r["step_tags"]) for r in records_below(folder)]
    assert found == [(7, 2, []), (9, 4, ["eval"]), (9, 4, ["eval"])]


def test_an_event_of_a_step_before_the_loop_began_has_no_relative_step(folder: Path) -> None:
    log_event(step=7)
    assert [(r["step"], r["relative_step"]) for r in records_below(folder)] == [(7, None)]


def test_an_event_without_a_name_is_called_like_its_span(folder: Path) -> None:
    for kind in ("checkpoint_write_start", "checkpoint_write_end", "checkpoint_saved"):
        log_event(log_type_name=kind, event_name=None)
    names = [record["event_name"] for record in records_below(folder)]
    assert names == ["checkpoint_write", "checkpoint_write", "checkpoint_saved"]


def test_own_records_arrive_once_even_if_they_propagate(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api._structured_logger, "propagate", True)
    sl.log_trace_instant("once")
    assert [record["event_name"] for record in records_below(folder)] == ["once"]


def test_the_second_init_listens_no_second_time(folder: Path) -> None:
    sl.init_structured_logger("training", str(folder), rank=0)
    init_logger()
    log_event()
    assert len(records_below(folder)) == 1


def test_logging_that_is_configured_anew_loses_events_until_the_next_own_record_only(
    folder: Path,
) -> None:
    logging.basicConfig(force=True, level=logging.INFO, handlers=[logging.NullHandler()])
    sl.log_trace_instant("step_begins")
    log_event(event_name="after")
    assert [r["event_name"] for r in records_below(folder)] == ["step_begins", "after"]
    assert logging.getLogger().handlers.count(api._forwarding) == 1


def test_a_structured_log_that_is_off_takes_nothing_and_does_not_listen(tmp_path: Path) -> None:
    sl.init_structured_logger("training", str(tmp_path), enable=False)
    log_event()
    sl.log_trace_instant("mine")
    assert list(tmp_path.iterdir()) == [] and api._forwarding not in logging.getLogger().handlers


def test_a_handler_left_behind_is_silent_once_the_log_is_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_disabled", True)
    log_event()
    assert records_below(folder) == []


def test_a_thread_that_holds_the_lock_of_the_file_cannot_block_the_way_to_it(folder: Path) -> None:
    # A thread that warns of a full disk holds the lock of the file and comes to this handler; a library that
    # logs an event goes the other way round.
    api._forwarding.acquire()
    try:
        thread = threading.Thread(target=log_event, daemon=True)
        thread.start()
        thread.join(timeout=60)
        assert not thread.is_alive()
    finally:
        api._forwarding.release()
    assert len(records_below(folder)) == 1


def test_a_process_without_a_console_still_prints_its_warnings_and_only_those(
    tmp_path: Path,
) -> None:
    code = (
        "import logging, sys; from torchtitan.observability import structured_logger as sl; "
        "sl.init_structured_logger('training', sys.argv[1]); log = logging.getLogger('a.b'); "
        "log.setLevel('INFO'); log.info('not shown'); log.warning('shown'); "
        "log.addHandler(logging.NullHandler()); log.warning('somebody else listens')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(__file__).resolve().parents[3],
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("", "shown\n")


def test_what_a_process_records_under_can_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sl.init_arguments() is None
    sl.init_structured_logger("training", "outputs", rank=3)
    found = sl.init_arguments()
    assert found == ("training", str(tmp_path / "outputs"), 3)
    assert found.of_helper("writer") == ("training.writer", str(tmp_path / "outputs"), 3)


def test_a_log_that_is_off_was_initialised_with_nothing(tmp_path: Path) -> None:
    sl.init_structured_logger("training", str(tmp_path), enable=False)
    assert sl.init_arguments() is None
