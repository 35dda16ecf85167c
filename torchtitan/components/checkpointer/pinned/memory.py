"""Whether the memory of this machine is enough for what all its ranks stage.

The system does not refuse memory that it has not got: it kills a process later on. So it is asked
before, for the machine and for every control group (container, job of a scheduler) that this process
is in. Each of those may have a limit of its own.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

WRITER_BYTES = 300 << 20
"""What a writer process takes for itself, most of it for torch."""

_GROUPS_OF_SELF = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
# Limit, use, and the part of the use that gives way: cached files that nobody reads.
_NAMES = ("memory.max", "memory.current", "inactive_file")
_NAMES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def shortage(needed_bytes: int) -> str | None:
    """Why ``needed_bytes`` more on every rank of this machine are too much, or None."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    available = available_bytes()
    if available is None or needed_bytes * num_ranks <= available:
        return None
    return (
        f"staging needs {_gib(needed_bytes)} on each of the {num_ranks} ranks of this machine, and only "
        f"{_gib(available)} of memory are free"
    )


def available_bytes() -> int | None:
    """Memory that can still be used here; None where the system does not say."""
    found = [_read_number(Path("/proc/meminfo"), "MemAvailable:", 1024)]
    for group, (limit_name, used_name, cached_name) in _memory_groups():
        limit = _read_number(group / limit_name)  # "max" is no number: no limit
        used = _read_number(group / used_name)
        if limit is not None and used is not None:
            found.append(limit - used + (_read_number(group / "memory.stat", cached_name) or 0))
    return min((number for number in found if number is not None), default=None)


def _memory_groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The control groups that this process is in, and all above them.

    In a container some have no folder: it sees its own group as the topmost.
    """
    try:
        lines = _GROUPS_OF_SELF.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _CGROUPS, _NAMES
        elif "memory" in controllers.split(","):
            root, names = _CGROUPS / "memory", _NAMES_V1
        else:
            continue
        below = PurePosixPath(path.lstrip("/"))
        for folder in (below, *below.parents):
            yield root / folder, names


def _read_number(path: Path, field: str = "", unit: int = 1) -> int | None:
    """The number behind ``field`` in a file of the kernel, or the file's only one."""
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith(field):
                return int(line.removeprefix(field).split()[0]) * unit
    except (OSError, ValueError, IndexError):
        pass
    return None


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
