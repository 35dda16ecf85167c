"""Keep arrays that were computed from a corpus in memory-mapped files, made once.

A cache is a folder named by what its arrays depend on. It is built beside its place, flushed to
disk and renamed, so a folder under its final name is complete, and a builder that was killed
leaves only a folder that the next one sweeps. The one fact to know: a complete cache is opened
without any lock and never written again, so it may lie on a read-only disk.

    open_or_build -> complete? -> ArrayFolder
                  -> lock -> complete by now? -> build in <key>.building-... -> rename -> ArrayFolder
"""

import errno
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout

from torchtitan.tools.filesystem import fsync_dir
from torchtitan.tools.logging import logger

_HEADER = "header.json"
# A wait longer than this is worth a line in the log.
_PATIENCE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class ArrayFolder:
    """The arrays of one cache by name, mapped, and the facts that were noted beside them."""

    path: Path
    arrays: dict[str, np.ndarray]
    notes: dict[str, Any]


class ArrayWriter:
    """Appends to the arrays of a cache that is being built."""

    def __init__(self, folder: Path, dtypes: Mapping[str, np.dtype], files: ExitStack) -> None:
        self._dtypes = dtypes
        self._lengths = dict.fromkeys(dtypes, 0)
        self._files: dict[str, BinaryIO] = {
            name: files.enter_context(_array_file(folder, name).open("wb")) for name in dtypes
        }

    def append(self, name: str, values: np.ndarray) -> None:
        """Add ``values``, which the type of the array has to be able to hold."""
        self._files[name].write(values.astype(self._dtypes[name]).tobytes())
        self._lengths[name] += len(values)

    def finish(self) -> dict[str, dict[str, Any]]:
        """Make all arrays durable; their types and lengths for the header."""
        for file in self._files.values():
            _flush(file)
        return {
            name: {"dtype": dtype.name, "length": self._lengths[name]}
            for name, dtype in self._dtypes.items()
        }


class DamagedCacheError(Exception):
    """A folder under the name of a cache is not a complete one."""


def cache_root(cache_dir: str = "") -> Path:
    """The folder of all caches: ``cache_dir``, else what the environment says, else ~/.cache."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    if own := os.environ.get("TORCHTITAN_CACHE_DIR"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "torchtitan"
    try:
        return Path.home() / ".cache" / "torchtitan"
    except RuntimeError:
        # A user id without a home, as containers have it.
        return Path(tempfile.gettempdir()) / f"torchtitan-{os.getuid()}"


def write_problem(root: Path) -> str | None:
    """Why nothing can be cached under ``root``, found without writing; None if it can."""
    nearest = root
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return None
    if any(root.glob(f"tokens/*/{_HEADER}")):
        # Read-only, but made before: what it holds may be all that is needed.
        return None
    return _cannot_write(root, "is no folder" if nearest.is_file() else "cannot be written")


def _cannot_write(root: Path, reason: str) -> str:
    return (
        f"token cache in {root}: {reason}. Set --dataloader.cache_dir or TORCHTITAN_CACHE_DIR to a "
        "folder that can be written."
    )


def open_or_build(
    root: Path,
    kind: str,
    key: str,
    dtypes: Mapping[str, np.dtype],
    fill: Callable[[ArrayWriter], dict[str, Any]],
    fits: Callable[[ArrayFolder], bool],
) -> ArrayFolder:
    """The cached arrays of ``kind`` named ``key``; calls ``fill`` to make them when there are none.

    ``fill`` appends to the arrays that ``dtypes`` names and returns what is to be noted, as JSON
    types; ``fits`` says whether arrays that were found belong together. Any number of processes
    may ask at once: one builds, the others wait.
    """
    folder = root / kind / key
    try:
        return open_folder(folder, fits)
    except FileNotFoundError:
        pass
    except DamagedCacheError as damage:
        logger.warning(f"{damage}; it is made anew")
    _make_folder(root, folder.parent)
    with _locked(folder.with_suffix(".lock")):
        try:
            return open_folder(folder, fits)
        except FileNotFoundError:
            pass
        except DamagedCacheError:
            # Those who have it open keep their pages; the name is free for the new one.
            shutil.rmtree(folder)
        _sweep(folder)
        try:
            _build(folder, dtypes, fill)
        except OSError as error:
            # Only writing meets these, so they are none of the text that is read meanwhile.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise ValueError(_cannot_write(root, error.strerror or str(error))) from error
        return open_folder(folder, fits)


def open_folder(folder: Path, fits: Callable[[ArrayFolder], bool]) -> ArrayFolder:
    """Map the cache in ``folder``.

    Raises FileNotFoundError where there is none, DamagedCacheError for one that is not whole.
    """
    if not folder.exists():
        raise FileNotFoundError(folder)
    try:
        header = json.loads((folder / _HEADER).read_text(encoding="utf-8"))
        if header["format"] != _format_of(folder):
            raise ValueError(f"its format is {header['format']!r}")
        arrays = {
            name: _map(_array_file(folder, name), np.dtype(item["dtype"]), item["length"])
            for name, item in header["arrays"].items()
        }
        found = ArrayFolder(folder, arrays, dict(header["notes"]))
        if not fits(found):
            raise ValueError("its arrays do not fit each other")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamagedCacheError(f"the token cache {folder} is damaged ({error})") from error
    return found


def _format_of(folder: Path) -> str:
    return f"torchtitan-{folder.parent.name}-2"


def _array_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.bin"


def _map(file: Path, dtype: np.dtype, length: int) -> np.ndarray:
    expected, found = dtype.itemsize * length, file.stat().st_size
    if found != expected:
        raise ValueError(f"{file.name} has {found} bytes instead of {expected}")
    if length == 0:
        return np.empty(0, dtype)  # An empty file cannot be mapped.
    # A plain view: every slice of a memmap object would carry the object along.
    return np.memmap(file, dtype=dtype, mode="r", shape=(length,)).view(np.ndarray)


def _make_folder(root: Path, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{socket.gethostname()}-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(_cannot_write(root, error.strerror or str(error))) from error


@contextmanager
def _locked(path: Path) -> Generator[None, None, None]:
    # The kernel drops the lock of a process that dies.
    lock = FileLock(path)
    try:
        lock.acquire(timeout=_PATIENCE_SECONDS)
    except Timeout:
        logger.info("another process is tokenizing the data; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _building_prefix(folder: Path) -> str:
    # With the host: on a shared disk without locks another machine may be building.
    return f"{folder.name}.building-{socket.gethostname()}-"


def _sweep(folder: Path) -> None:
    """Remove what killed builders of this machine left; the lock says that none is at work."""
    for leftover in folder.parent.glob(f"{_building_prefix(folder)}*"):
        shutil.rmtree(leftover)


def _build(
    folder: Path, dtypes: Mapping[str, np.dtype], fill: Callable[[ArrayWriter], dict[str, Any]]
) -> None:
    building = folder.with_name(f"{_building_prefix(folder)}{os.getpid()}")
    building.mkdir()
    try:
        with ExitStack() as files:
            writer = ArrayWriter(building, dtypes, files)
            notes = fill(writer)
            header = {"format": _format_of(folder), "arrays": writer.finish(), "notes": notes}
        with (building / _HEADER).open("w", encoding="utf-8") as file:
            json.dump(header, file)
            _flush(file)
        fsync_dir(str(building))
        try:
            building.rename(folder)
        except OSError:
            # On a shared disk without locks another machine was faster; its cache is as good.
            if not folder.is_dir():
                raise
        fsync_dir(str(folder.parent))
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
