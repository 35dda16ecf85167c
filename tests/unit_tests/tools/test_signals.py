import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import NoReturn

import pytest
from torchtitan.tools import signals as signals_module
from torchtitan.tools.signals import LAUNCHER_PID, stop_with_launcher, StopRequested, StopSignals

RANK = """
import sys, threading
from torchtitan.tools.signals import stop_with_launcher, StopRequested, StopSignals

seconds = float(sys.argv[1])
with StopSignals():
    try:
        stop_with_launcher(poll_seconds=0.01)
        print("ready", flush=True)
        threading.Event().wait(seconds)
        print("left alone", flush=True)
    except StopRequested as stop:
        print("stopped by", stop, flush=True)
"""
LAUNCHER = """
import subprocess, sys

subprocess.run([sys.executable, "-c", *sys.argv[1:]], start_new_session=True)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_the_first_signal_interrupts_and_says_with_what_to_exit(
    number: signal.Signals, code: int
) -> None:
    with StopSignals() as signals:
        assert signals.received is None
        with pytest.raises(StopRequested, match=number.name) as stop:
            signal.raise_signal(number)
        assert signals.received is stop.value
        assert stop.value.exit_code == code


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
        assert signals.received is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_later_signals_do_not_disturb_the_closing() -> None:
    with StopSignals() as signals:
        with pytest.raises(StopRequested):
            signal.raise_signal(signal.SIGTERM)
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                signal.raise_signal(number)
        except StopRequested:
            pytest.fail("interrupted a second time")
        assert signals.received is not None and signals.received.signal_number == signal.SIGTERM


class EndedAtOnceError(Exception):
    pass


class Watched(StopSignals):
    """Tells of the end of the process instead of ending it."""

    def end_at_once(self) -> NoReturn:
        raise EndedAtOnceError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(signals_module, "time", clock)
    return clock


def test_a_second_ctrl_c_ends_at_once_and_the_first_one_says_so(
    clock: SimpleNamespace, capfd: pytest.CaptureFixture[str]
) -> None:
    with Watched():
        with pytest.raises(StopRequested):
            signal.raise_signal(signal.SIGINT)
        hint = capfd.readouterr().err
        assert "Press Ctrl-C again to end at once; the save in flight is then lost." in hint
        clock.now += 1.9  # the same press, passed on by a launcher
        signal.raise_signal(signal.SIGINT)
        clock.now += 0.1
        with pytest.raises(EndedAtOnceError):
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == ""


def test_sigterm_never_ends_at_once(clock: SimpleNamespace) -> None:
    with Watched():
        with pytest.raises(StopRequested):
            signal.raise_signal(signal.SIGTERM)
        # Ctrl-C after a scheduler's signal is a first one.
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            clock.now += 10.0
            signal.raise_signal(number)
        clock.now += 10.0
        with pytest.raises(EndedAtOnceError):
            signal.raise_signal(signal.SIGINT)


def test_a_rank_leaves_the_hint_to_its_launcher(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LAUNCHER_PID, str(os.getppid()))
    with StopSignals(), pytest.raises(StopRequested):
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == ""


def test_an_end_at_once_has_the_exit_code_of_ctrl_c() -> None:
    program = "from torchtitan.tools.signals import StopSignals; StopSignals().end_at_once()"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 130


def test_code_that_catches_every_exception_does_not_swallow_a_stop() -> None:
    with StopSignals(), pytest.raises(StopRequested):
        try:
            signal.raise_signal(signal.SIGINT)
        except Exception:
            pytest.fail("caught as an ordinary exception")


@pytest.mark.parametrize("fails", [False, True])
def test_the_handlers_of_before_are_back_afterwards(fails: bool) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        with StopSignals():
            assert all(signal.getsignal(number) not in before for number in numbers)
            if fails:
                raise ValueError
    except ValueError:
        pass
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize(
    ("run_id", "seconds", "end"), [("none", 60, "stopped by SIGTERM\n"), (None, 1, "left alone\n")]
)
def test_a_rank_that_torchrun_started_ends_when_torchrun_is_killed(
    run_id: str | None, seconds: int, end: str
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for name in (LAUNCHER_PID, "TORCHELASTIC_RUN_ID"):
        environment.pop(name, None)
    if run_id is not None:
        environment["TORCHELASTIC_RUN_ID"] = run_id
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK, str(seconds)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    with launcher:
        assert launcher.stdout.readline() == "ready\n"
        launcher.kill()
        # To the end of the output, which is that of the rank.
        assert launcher.stdout.read() == end


def test_a_launcher_that_was_gone_before_the_rank_looked_counts_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setenv(LAUNCHER_PID, str(gone.pid))
    with StopSignals():
        try:
            stop_with_launcher(poll_seconds=0.01)
            threading.Event().wait(30)
            pytest.fail("not stopped")
        except StopRequested as stop:
            assert stop.signal_number == signal.SIGTERM
