"""The log goes to stdout, one line an event, and says which rank speaks."""

import logging
import os
import re
from collections.abc import Iterator

import pytest
from torchtitan.tools.logging import init_logger, logger, warn_once


@pytest.fixture(autouse=True)
def _restore_root_logger() -> Iterator[None]:
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_lines_go_to_stdout_with_the_prefix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RANK", raising=False)
    init_logger()
    logger.info("hello")
    logger.debug("not shown")
    out = capsys.readouterr().out
    assert re.fullmatch(r"\[titan\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO hello\n", out)


def test_another_rank_is_named_in_its_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RANK", "3")
    init_logger()
    logger.info("hello")
    assert capsys.readouterr().out.startswith("[titan rank 3] ")


def test_a_second_call_writes_no_line_twice_and_keeps_foreign_handlers(
    capsys: pytest.CaptureFixture[str],
):
    foreign = logging.NullHandler()
    logger.addHandler(foreign)
    init_logger()
    init_logger()
    logging.getLogger("some.library").info("once")
    assert capsys.readouterr().out.count("once") == 1
    assert foreign in logger.handlers


def test_a_handler_that_a_library_left_behind_prints_nothing_twice(
    capsys: pytest.CaptureFixture[str],
):
    logger.addHandler(logging.StreamHandler())
    init_logger()
    logger.info("once")
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("once") == 1


def test_kineto_is_told_to_be_quiet(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "0")
    init_logger()
    assert os.environ["KINETO_LOG_LEVEL"] == "5"


def test_warn_once_warns_once_for_each_message_and_logger(caplog: pytest.LogCaptureFixture):
    other = logging.getLogger("test_warn_once.other")
    for _ in range(2):
        warn_once(logger, "test_warn_once: careful")
        warn_once(logger, "test_warn_once: really")
        warn_once(other, "test_warn_once: careful")
    assert len(caplog.records) == 3
    assert {record.levelname for record in caplog.records} == {"WARNING"}
