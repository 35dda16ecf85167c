"""A standard output that is closed, full or read by nobody ends no program, and is told once."""

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from unittest.mock import MagicMock

import pytest
from torchtitan.components.data.progress import byte_progress
from torchtitan.tools.lasting_output import LastingOutput

from tests.unit_tests.small_disk import fill, small_disk
from tests.unit_tests.structure.sources import ROOT

BEGIN = "import sys; from torchtitan.tools.logging import init_logger, logger; init_logger(); "
THREE_LINES = BEGIN + "[logger.info(f'line {n} ' + 'x' * 5000) for n in range(3)]"


# Where it is set, Python holds nothing back, and there is less that can go wrong.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def run(code: str, stdout: int | IO[bytes]) -> str:
    """Run ``code``, which has to end well; what it says on the standard error."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@contextmanager
def nobody_reads() -> Generator[int]:
    """A descriptor to write to, whose other end is closed."""
    for_nobody, writes_there = os.pipe()
    os.close(for_nobody)
    try:
        yield writes_there
    finally:
        os.close(writes_there)


def told_once(stderr: str) -> bool:
    return stderr.count("\n") == 1 and "lines of the log are lost" in stderr


def test_a_reader_that_is_gone_is_told_once_and_ends_nothing() -> None:
    with nobody_reads() as stdout:
        stderr = run(f"{THREE_LINES}; print('of a library', flush=True)", stdout)
    assert told_once(stderr) and "BrokenPipeError" in stderr


def test_a_full_disk_under_the_output_is_told_once_and_ends_nothing() -> None:
    with open("/dev/full", "wb") as full:
        stderr = run(f"{THREE_LINES}; print('of a library')", full)
    assert told_once(stderr) and "No space left" in stderr


def test_lines_come_again_when_the_disk_has_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        with open(disk / "log", "wb") as log:
            ballast = fill(disk)
            code = f"{THREE_LINES}; import os; os.unlink({str(ballast)!r}); logger.info('room')"
            assert told_once(run(code, log))
        text = (disk / "log").read_text()
    assert text.rstrip().endswith("INFO room")


@pytest.mark.parametrize("closed", ["1", "2", "1 2"])
def test_a_program_that_was_started_with_closed_streams_opens_no_file_in_their_place(
    closed: str, tmp_path: Path
) -> None:
    code = (
        "import os; from torchtitan.tools.lasting_output import fill_closed_descriptors as fill; "
        f"fill(); {THREE_LINES}; file = open({str(tmp_path / 'data')!r}, 'w'); "
        "os.write(1, b'of C++'); os.write(2, b'of C++'); sys.exit(file.fileno() <= 2)"
    )
    closing = " ".join(f"{number}>&-" for number in closed.split())
    shell = f'exec "$0" -c "$1" {closing}'
    done = subprocess.run(
        ["sh", "-c", shell, sys.executable, code], cwd=ROOT, capture_output=True, timeout=60
    )
    assert done.returncode == 0 and (tmp_path / "data").read_bytes() == b""


CTRL_C = """
import os, signal
from torchtitan.tools.signals import StopRequested, StopSignals
with StopSignals():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except StopRequested:
        raise SystemExit(7)
"""
GIVEN_UP = """
import threading
from concurrent.futures import Future
from torchtitan.components.checkpointer import waiting
threading.Thread(target=threading.Event().wait).start()
try:
    waiting.result_within(Future(), 0)
except waiting.WaitExpiredError:
    pass
try:
    raise SystemExit(7) from ValueError("first")
finally:
    waiting.leave_if_given_up()
"""


@pytest.mark.parametrize(
    "code,closing",
    [(CTRL_C, ""), (CTRL_C, "2>&-"), (GIVEN_UP, "2>&-")],
    ids=["Ctrl-C", "Ctrl-C, closed", "given up"],
)
def test_a_standard_error_that_is_gone_changes_no_ending(code: str, closing: str) -> None:
    with nobody_reads() as stderr:
        command = ["sh", "-c", f'exec "$0" -c "$1" {closing}', sys.executable, code]
        done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, stderr=stderr, timeout=60)
    assert done.returncode == 7


@pytest.mark.parametrize("stream", ["output", "error"])
def test_it_is_told_which_stream_cannot_be_written(
    stream: str, capsys: pytest.CaptureFixture[str]
) -> None:
    full = MagicMock(write=MagicMock(side_effect=OSError("full")))
    full.name = {"output": "<stdout>", "error": "<stderr>"}[stream]
    assert LastingOutput(full).write("text") == 4
    assert f"because the standard {stream} cannot be written: OSError" in capsys.readouterr().err


def test_a_bar_is_drawn_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with nobody_reads() as stderr, open(stderr, "w", closefd=False) as gone:
        for stream in (gone, None):
            monkeypatch.setattr(sys, "stderr", stream)
            with byte_progress(3, "reading") as bar:
                bar.update(3)
