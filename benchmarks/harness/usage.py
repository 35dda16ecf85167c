"""How much memory, how many descriptors and how much CPU a process and all below it use. Reads /proc.

Memory is the proportional share (PSS): a page that a trainer shares with its writer process counts once.

    tree -> read -> Usage           PeakWatch: the largest Usage of a while
"""

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType

_PAUSE_SECONDS = 0.005
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What a rank and the processes below it use."""

    own_bytes: int = 0
    """Memory of the rank that nobody shares."""

    shared_bytes: int = 0
    """Shared memory, each page once."""

    writer_bytes: int = 0
    """Memory of the processes below the rank that nobody shares."""

    descriptors: int = 0

    @property
    def total_bytes(self) -> int:
        """All memory, but that of mapped files, which can be read again."""
        return self.own_bytes + self.shared_bytes + self.writer_bytes

    def minus(self, other: "Usage") -> "Usage":
        return Usage(
            **{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)}
        )

    def largest(self, other: "Usage") -> "Usage":
        """The larger of the two, field by field."""
        return Usage(
            **{f.name: max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        )


def tree(pid: int) -> Iterator[int]:
    """``pid`` and all processes below it."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from tree(int(child))


def read(pid: int | None = None) -> Usage:
    """What process ``pid`` (None is this one) and those below it use now."""
    pid = os.getpid() if pid is None else pid
    own, shared, writers, descriptors = 0, 0, 0, 0
    for process in tree(pid):
        try:
            anonymous, shmem = _memory(process)
            descriptors += len(os.listdir(f"/proc/{process}/fd"))
        except OSError:
            continue  # it ended meanwhile
        shared += shmem
        if process == pid:
            own = anonymous
        else:
            writers += anonymous
    return Usage(own_bytes=own, shared_bytes=shared, writer_bytes=writers, descriptors=descriptors)


def give_back_freed_memory() -> None:
    """Let the C library return to the system what this process has freed."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def cpu_seconds() -> float:
    """CPU time that this process, those below it, and those that have ended below it, have used."""
    ticks = 0
    for process in tree(os.getpid()):
        try:
            # Behind the name, which is in brackets and may hold anything.
            values = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, values[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_seconds_below() -> float:
    """The same without that of this process."""
    return cpu_seconds() - time.process_time()


def machine_cpu_seconds() -> float:
    """CPU time that everything on this machine has used, and what a hypervisor took away."""
    user, nice, system, _, _, interrupt, soft, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")


def cpu_clocks() -> tuple[float, float, float]:
    """Time, CPU time of this rank and what is below it, CPU time of the whole machine."""
    return time.perf_counter(), cpu_seconds(), machine_cpu_seconds()


def since(then: tuple[float, float, float]) -> list[float]:
    """How far these clocks went."""
    return [now - before for now, before in zip(cpu_clocks(), then, strict=True)]


class PeakWatch:
    """Notes in a thread the largest usage inside of the block."""

    def __init__(self) -> None:
        self.peak = Usage()
        """Each field by itself: their peaks need not fall together."""

        self.peak_total_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakWatch":
        self._note()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(_PAUSE_SECONDS):
            self._note()

    def _note(self) -> None:
        usage = read()
        self.peak = self.peak.largest(usage)
        self.peak_total_bytes = max(self.peak_total_bytes, usage.total_bytes)


def _memory(pid: int) -> tuple[int, int]:
    """(bytes of anonymous memory, bytes of shared memory), each its proportional share."""
    found = {"Pss_Anon:": 0, "Pss_Shmem:": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if name in found:
            found[name] = int(rest.split()[0]) * 1024
    return found["Pss_Anon:"], found["Pss_Shmem:"]
