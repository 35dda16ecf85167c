"""Kill processes of a run: at a moment of its work on the disk, or after a time.

Whoever comes to the moment does it at once, to itself too, so that the place of the kill is exact.

    go_on (killed_runs.py) -> KillingDisk -> moments.py -> SIGKILL
"""

import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.crash.moments import ActingDisk, Moment
from tests.ranks.processes import children


@dataclass(frozen=True)
class Kill:
    """Who is killed, and when."""

    victims: tuple[str, ...]
    """Such as ``rank 0`` and ``writer 1``."""

    at: Moment | float
    """Or so many seconds after the first save: a moment that nobody has chosen, as in the world."""

    def __str__(self) -> str:
        at = self.at if isinstance(self.at, Moment) else f"{self.at:.2f} s after the first save"
        return f"{' and '.join(self.victims)} {at}"


class KillingDisk(ActingDisk):
    """Does what it is asked for, until one of its kills is due."""

    def __init__(
        self, marks: Path, rank: int, pids: tuple[int, ...], kills: tuple[Kill, ...]
    ) -> None:
        """See ``ActingDisk``; what has happened is marked by its place in ``kills``."""
        moments = {
            place: kill.at for place, kill in enumerate(kills) if isinstance(kill.at, Moment)
        }
        super().__init__(marks, rank, pids, moments)
        self._kills = kills

    def start_clocks(self) -> None:
        """Let what comes after a time be on its way."""
        for place, kill in enumerate(self._kills):
            if not isinstance(kill.at, Moment):
                clock = threading.Timer(kill.at, self.act_once, [place])
                clock.daemon = True
                clock.start()

    def act(self, number: int) -> None:
        pids = [pid for victim in self._kills[number].victims for pid in self._found(victim)]
        # Itself last; and the rank that it writes for, which takes it along.
        own = (os.getpid(), self._pids[self._rank])
        for pid in sorted(pids, key=lambda pid: pid in own):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _found(self, victim: str) -> list[int]:
        what, _, rank = victim.partition(" ")
        pid = self._pids[int(rank)]
        if what == "rank":
            return [pid]
        with suppress(FileNotFoundError):  # the rank is gone, and its writer with it
            return children(pid)
        return []
