"""How old is the newest checkpoint that a restart could go on from? What a kill would cost right now.

It counts from the step that was loaded, or from the beginning of a run that loaded nothing: before
that this run has nothing to lose. A save counts from when it is durable, which a thread of its own
may be the first to know.

    base.load -> began     SaveReport -> saved     -> at -> the metrics, the warning of an old one
"""

import time
from dataclasses import dataclass
from datetime import timedelta

_MAX_INTERVALS = 3
"""A run that saves has one that is at most two intervals old: a save waits for the one before it."""


@dataclass(frozen=True, slots=True)
class Age:
    """How much of the work of a run no checkpoint holds."""

    steps: int
    seconds: float


class CheckpointAge:
    """The newest checkpoint of a run that a resume could use, and since when it is there."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self.newest_good: tuple[int, float] | None = None
        """Its step, and the time on ``time.monotonic`` at which it was durable or had been loaded."""

        self._begin = (0, time.monotonic())
        self._was_told = False

    def began(self, step: int) -> None:
        """The run goes on after ``step``, 0 for the beginning, for which no checkpoint is needed."""
        self._begin = (step, time.monotonic())
        self.newest_good = self._begin if step > 0 else None
        self._was_told = False

    def saved(self, step: int, at_seconds: float) -> None:
        """The full checkpoint of ``step`` is durable since ``at_seconds``; any thread may say so."""
        self.newest_good = (step, at_seconds)

    def at(self, step: int) -> Age:
        """The age after ``step``."""
        since_step, since_seconds = self.newest_good or self._begin
        return Age(max(step - since_step, 0), max(time.monotonic() - since_seconds, 0.0))

    def warning(self, step: int, folder: str) -> str | None:
        """What to say after ``step`` when the newest one is old, or None; said once until there is a newer one."""
        age, newest = self.at(step), self.newest_good
        if age.steps <= _MAX_INTERVALS * self._interval:
            self._was_told = False
            return None
        if self._was_told:
            return None
        self._was_told = True
        past = f"{age.steps} steps ({timedelta(seconds=round(age.seconds))})"
        if newest is None:
            found = (
                f"{past} after its beginning this run has no checkpoint that a restart could use"
            )
        else:
            found = f"The newest checkpoint that a restart could use, of step {newest[0]}, is {past} old"
        return (
            f"{found}: more than {_MAX_INTERVALS} times --checkpoint.interval ({self._interval}). A run that "
            "is killed now does all of that again. Either saves fail, then a line above says why, or the one "
            f"in flight is not done: see whether the disk of {folder} is full, slow or away."
        )
