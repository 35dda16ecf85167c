"""Turn Ctrl-C, SIGTERM, SIGHUP and the death of the launcher into one orderly end.

A launcher passes the signal on although the terminal has already delivered it to every process,
and schedulers repeat theirs. Only the first one interrupts the program; while it closes, further
ones must not tear the save in flight. Only a person who presses Ctrl-C again means it.

    first SIGINT, SIGTERM or SIGHUP -> StopRequested in the main thread -> close -> exit code 128 + signal
    SIGINT, 2 s after one           -> exit code 130 at once, nothing is closed
    any other one                   -> nothing
    SIGHUP ignored, as by nohup     -> stays ignored
    launcher gone                   -> SIGTERM to this process
"""

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

LAUNCHER_PID = "TORCHTITAN_LAUNCHER_PID"
"""Environment variable with the process id of the launcher that starts the ranks."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# One press of Ctrl-C can arrive twice, from the terminal and from a launcher that passes it on.
_ECHO_SECONDS = 2.0


class StopRequested(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        """What shells report for a program ended by this signal."""
        return 128 + self.signal_number


class StopSignals:
    """Context manager in whose block the first signal raises ``StopRequested``, once.

    Main thread only, as Python delivers signals there. A rank that waits for another inside a
    collective sees the signal only when that call returns; ``received`` tells whether one came.
    """

    def __init__(self) -> None:
        self.received: StopRequested | None = None
        self._interrupted_at: float | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the run is to outlive its terminal
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def stop_of(self, request: StopRequested) -> BaseException:
        """What the first signal raises."""
        return request

    def end_at_once(self) -> NoReturn:
        """Leave without closing anything."""
        os._exit(128 + signal.SIGINT)

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if signal_number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is None:
                self._interrupted_at = now
                self._say_how_to_end_at_once()
            elif now - self._interrupted_at >= _ECHO_SECONDS:
                self.end_at_once()
        if self.received is None:
            self.received = StopRequested(signal_number)
            raise self.stop_of(self.received)

    def _say_how_to_end_at_once(self) -> None:
        if LAUNCHER_PID in os.environ and int(os.environ[LAUNCHER_PID]) != os.getpid():
            return  # The launcher is what a second Ctrl-C reaches, and it says so.
        line = "Stopping. Press Ctrl-C again to end at once; the save in flight is then lost.\n"
        # Not print: the signal may have interrupted one, whose buffer is then locked.
        with suppress(OSError):  # nobody may read it any more, and the stop is what counts
            os.write(2, line.encode())


def stop_with_launcher(poll_seconds: float = 0.25) -> None:
    """Send this process SIGTERM once the torchrun that started it is gone; without one do nothing.

    torchrun gives each rank a session of its own. A torchrun that is killed leaves them training,
    and writing checkpoints into the folder from which the next run has already resumed.
    """
    if (text := os.environ.get(LAUNCHER_PID)) is not None:
        launcher = int(text)  # It may be gone already: starting up takes seconds.
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = os.getppid()
    else:
        return  # Started by hand, maybe to outlive the shell.

    def watch() -> None:
        ever = threading.Event()
        while os.getppid() == launcher:
            ever.wait(poll_seconds)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
