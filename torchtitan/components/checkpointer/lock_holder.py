"""Who holds a folder of checkpoints, and whether that run is dead.

A process is known by its machine, its id and the time it started at: ids are used again, and two
containers of one machine have the same. Only a process of the same machine can be looked for. Of
another one nothing but its silence tells, and clocks of two machines are never compared.

    run_lock.py -> Holder.here -> render -> the file -> parse -> fate -> run_lock.py
"""

import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass, fields
from enum import Enum
from functools import cache
from pathlib import Path

RECORD_BYTES = 1024
"""All records are that long, so that one is written over the other in place, whatever it counts."""

_START_TIME, _STATE = 19, 0
"""Places in /proc/<pid>/stat behind the name, which may hold anything; see proc(5)."""


class Fate(str, Enum):
    """What has become of the process that holds a folder."""

    ALIVE = "alive"
    DEAD = "dead"
    ELSEWHERE = "elsewhere"
    """It runs on another machine or in another container, and cannot be looked for from here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A run that holds a folder, as it tells about itself."""

    run_id: str
    host: str
    boot_id: str
    """Of the machine, another one after each start of it; empty where the system has none."""

    pid_namespace: str
    """Within it an id means one process; empty where the system has none."""

    pid: int
    started: str
    """When the process began, in the count of its system; empty where that cannot be told."""

    since: str
    """When it took the folder, by its own clock; for people."""

    step: int = 0
    """The step that it went on from; for people."""

    heartbeat: int = 0
    """How often it has given a sign of life."""

    @classmethod
    def here(cls) -> "Holder":
        """This process, as a run of its own."""
        pid = os.getpid()
        return cls(
            run_id=uuid.uuid4().hex,
            host=socket.gethostname(),
            boot_id=_boot_id(),
            pid_namespace=_pid_namespace(),
            pid=pid,
            started=_start_time(pid) or "",
            since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        )

    def render(self) -> bytes:
        """The text that ``parse`` reads."""
        return json.dumps(asdict(self)).ljust(RECORD_BYTES - 1).encode() + b"\n"

    @classmethod
    def parse(cls, content: bytes) -> "Holder | None":
        """Who wrote ``content``; None when it is no such text, or not all of it."""
        try:
            found = json.loads(content)
            values = {field.name: found[field.name] for field in fields(cls)}
        except (ValueError, TypeError, KeyError):
            return None
        is_typed = all(type(value) is _TYPES[name] for name, value in values.items())
        return cls(**values) if is_typed else None

    def is_this_process(self) -> bool:
        """Whether it is the process that asks."""
        return self._is_of_this_machine() and self.pid == os.getpid() and self.fate() is Fate.ALIVE

    def fate(self) -> Fate:
        """What can be told of it from here."""
        if not self._is_of_this_machine():
            return Fate.ELSEWHERE
        return Fate.ALIVE if _is_running(self.pid, self.started) else Fate.DEAD

    def _is_of_this_machine(self) -> bool:
        mine = _boot_id(), _pid_namespace()
        if not all(mine):
            # Not Linux: the host name is all there is.
            return (self.host, self.boot_id, self.pid_namespace) == (socket.gethostname(), *mine)
        # Not the host name: two machines may have one, and one may change its own.
        return (self.boot_id, self.pid_namespace) == mine

    def __str__(self) -> str:
        step = f", from step {self.step} on" if self.step else ""
        return f"process {self.pid} on host {self.host} (since {self.since}{step})"


_TYPES = {field.name: field.type for field in fields(Holder)}


def _is_running(pid: int, started: str) -> bool:
    found = _start_time(pid)
    if found is not None:
        return found == started if started else True
    try:
        # The system has no /proc, or does not show processes of others there.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it is there, and somebody else's
    # One that has ended and that nobody has waited for yet is there as well, and does nothing.
    return not _is_ended(pid)


def _start_time(pid: int) -> str | None:
    """When ``pid`` began; None when it has ended, or the system does not tell."""
    found = _stat(pid)
    return None if found is None or found[_STATE] in "ZX" else found[_START_TIME]


def _is_ended(pid: int) -> bool:
    found = _stat(pid)
    return found is not None and found[_STATE] in "ZX"


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
