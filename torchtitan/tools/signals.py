"""Turn Ctrl-C and SIGTERM into one orderly end.

A launcher passes the signal on although the terminal has already delivered it to every process,
and schedulers repeat theirs. Only the first one interrupts the program; while it closes, further
ones must not tear the save in flight.

    first SIGINT or SIGTERM -> StopRequested in the main thread -> close -> exit code 128 + signal
    any later one           -> noted, nothing else
"""

import signal
from types import FrameType
from typing import Any

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
