"""Turn Ctrl-C, SIGTERM and the death of the launcher into one orderly end.

A launcher passes the signal on although the terminal has already delivered it to every process,
and schedulers repeat theirs. Only the first one interrupts the program; while it closes, further
ones must not tear the save in flight.

    first SIGINT or SIGTERM -> StopRequested in the main thread -> close -> exit code 128 + signal
    any later one           -> noted, nothing else
    launcher gone           -> SIGTERM to this process
"""

import os
import signal
import threading
from types import FrameType
from typing import Any

LAUNCHER_PID = "TORCHTITAN_LAUNCHER_PID"
"""Environment variable with the process id of the launcher that starts the ranks."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = StopRequested(signal_number)
            raise self.received


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
