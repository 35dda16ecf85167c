"""Locks of runs that are not there: what they leave, and a clock that does not wait."""

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torchtitan.components.checkpointer import run_lock
from torchtitan.components.checkpointer.lock_holder import _start_time, Holder
from torchtitan.components.checkpointer.run_lock import RUN_LOCK


class Clock:
    """Stands for the module ``time``: who sleeps is told at once that the time is over."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.on_sleep: Any = None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        if self.on_sleep is not None:
            self.on_sleep()


@contextmanager
def stopped_clock() -> Generator[Clock]:
    clock = Clock()
    with patch.object(run_lock, "time", clock):
        yield clock


@contextmanager
def living() -> Generator[Holder]:
    """Another run of this machine, which is alive until the block ends."""
    program = [sys.executable, "-c", "input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as process:
        started = _start_time(process.pid) or ""
        yield replace(Holder.here(), pid=process.pid, started=started, step=50)
        process.communicate(b"\n")


def ended() -> Holder:
    """One that is no more."""
    with living() as holder:
        pass
    return holder


def elsewhere(**changes: Any) -> Holder:
    """One of another machine, whose process ids mean nothing here."""
    facts: dict[str, Any] = {"host": "far-away", "boot_id": "another", **changes}
    return replace(Holder.here(), **facts)


def leave(folder: Path, holder: Holder | bytes) -> Path:
    """Let the lock on ``folder`` be that of ``holder``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUN_LOCK
    beside = folder / "beside"
    beside.write_bytes(holder if isinstance(holder, bytes) else holder.render())
    beside.replace(path)
    return path
