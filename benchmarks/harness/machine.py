"""What was measured on, whether it has enough memory and disk, and where a measurement may write.

Whatever is written goes into one folder that is removed in every ending. Of a measurement that was killed
outright the next one removes it: a live owner holds a lock on the folder.
"""

import fcntl
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

from torchtitan.components.checkpointer.pinned.memory import available_bytes

from benchmarks.harness.errors import RefusedError

GIB = 2**30
_PREFIX = "torchtitan-benchmark-"
_LOCK = "owner.lock"
# Left for everything else: the page cache of what is being written, and other programs.
_SPARE_MEMORY_BYTES = 1 * GIB
_SPARE_DISK_BYTES = 2 * GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What numbers of this run should be read with."""

    cpu: str
    num_cores: int
    memory_gib: float
    kernel: str
    file_system: str
    python: str
    torch: str
    torch_checkpointing: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def in_words(self) -> str:
        return (
            f"{self.cpu}, {self.num_cores} cores, {self.memory_gib:.0f} GiB of memory, "
            f"{self.file_system}, Linux {self.kernel}, Python {self.python}, torch {self.torch}, "
            f"torch_checkpointing {self.torch_checkpointing}"
        )


def describe(folder: Path) -> Machine:
    """This machine, and the file system of ``folder``."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return Machine(
        cpu=models[0] if models else platform.machine(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        kernel=platform.release(),
        file_system=file_system_of(folder),
        python=platform.python_version(),
        torch=_version("torch"),
        torch_checkpointing=_version("torch_checkpointing"),
    )


def file_system_of(folder: Path) -> str:
    """The type of the file system that ``folder`` is on."""
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        mount = mount.encode().decode("unicode_escape")
        if folder.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = mount, kind
    return best[1]


def require_enough(asked: str, *, memory_bytes: int, disk_bytes: int, folder: Path) -> None:
    """Check that this machine has room, before anything is started; ``folder`` may have to be made yet.

    Raises:
        RefusedError: names all that is short.
    """
    free_memory = available_bytes()
    existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    free_disk = shutil.disk_usage(existing).free
    short = []
    if free_memory is not None and memory_bytes + _SPARE_MEMORY_BYTES > free_memory:
        wanted = (memory_bytes + _SPARE_MEMORY_BYTES) / GIB
        short.append(f"{wanted:.1f} GiB of memory, of which {free_memory / GIB:.1f} are free")
    if disk_bytes + _SPARE_DISK_BYTES > free_disk:
        wanted = (disk_bytes + _SPARE_DISK_BYTES) / GIB
        short.append(
            f"{wanted:.1f} GiB of disk, of which {free_disk / GIB:.1f} are free in {folder}"
        )
    if short:
        raise RefusedError(
            f"{asked} needs {' and '.join(short)}. Choose a smaller --model or fewer --ranks, end other "
            "programs, or name another disk with --work-folder."
        )


@contextmanager
def work_folder(parent: Path) -> Generator[Path]:
    """An empty folder below ``parent`` that is gone after the block, however that ends."""
    parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        with (folder / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        try:
            parent.rmdir()
        except OSError:
            pass  # it holds something else, as a folder of the user's may


@contextmanager
def signals_end_in_order() -> Generator[None]:
    """Let SIGTERM and SIGHUP raise in this thread, as Ctrl-C does, so that everything is cleaned up."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            continue  # another one has just made it, or is just removing it
        except BlockingIOError:
            continue  # its owner lives


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
