import os
import signal
import subprocess
import sys
import threading

import pytest
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_interrupts_and_says_with_what_to_exit(
    number: signal.Signals, code: int
) -> None:
    with StopSignals() as signals:
        assert signals.received is None
        with pytest.raises(StopRequested, match=number.name) as stop:
            signal.raise_signal(number)
        assert signals.received is stop.value
        assert stop.value.exit_code == code


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
