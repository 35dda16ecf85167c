"""Keep the tokens of a corpus in memory-mapped files, made once.

A cache is a folder named by what its tokens depend on. It is built beside its place, flushed to
disk and renamed, so a folder under its final name is complete, and a builder that was killed
leaves only a folder that the next one sweeps. The one fact to know: a complete cache is opened
without any lock and never written again, so it may lie on a read-only disk.

    open_or_build -> complete? -> TokenStore
                  -> lock -> complete by now? -> build in <key>.building-... -> rename -> TokenStore
"""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from torchtitan.tools.filesystem import fsync_dir
from torchtitan.tools.logging import logger

_FORMAT = "torchtitan-tokens-1"
_HEADER = "header.json"
_TOKENS = "tokens.bin"
_STARTS = "starts.bin"
# A wait longer than this is worth a line in the log.
_PATIENCE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The tokens of all documents, end to end.

    ``starts`` (int64, one more than documents) counts the inputs before each document. An input is
    a token that has a next one, so document ``d`` begins at ``tokens[starts[d] + d]``.
    """

    tokens: np.ndarray
    starts: np.ndarray

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1

    @property
    def num_inputs(self) -> int:
        return int(self.starts[-1])


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
    root: Path, key: str, dtype: np.dtype, documents: Callable[[], Iterator[np.ndarray]]
) -> TokenStore:
    """The cached tokens named ``key``; calls ``documents`` for all of them when there are none.

    Each array holds the tokens of one document, at least two. Any number of processes may ask at
    once: one builds, the others wait.
    """
    folder = root / "tokens" / key
    try:
        return open_store(folder)
    except FileNotFoundError:
        pass
    except DamagedCacheError as damage:
        logger.warning(f"{damage}; it is made anew")
    _make_folder(root, folder.parent)
    with _locked(folder.with_suffix(".lock")):
        try:
            return open_store(folder)
        except FileNotFoundError:
            pass
        except DamagedCacheError:
            # Those who have it open keep their pages; the name is free for the new one.
            shutil.rmtree(folder)
        _sweep(folder)
        _build(folder, dtype, documents())
        return open_store(folder)


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


def open_store(folder: Path) -> TokenStore:
    """Map the cache in ``folder``.

    Raises FileNotFoundError where there is none, DamagedCacheError for one that is not whole.
    """
    if not folder.exists():
        raise FileNotFoundError(folder)
    try:
        header = json.loads((folder / _HEADER).read_text(encoding="utf-8"))
        if header["format"] != _FORMAT:
            raise ValueError(f"its format is {header['format']!r}")
        tokens = _map(folder / _TOKENS, np.dtype(header["dtype"]), header["num_tokens"])
        starts = _map(folder / _STARTS, np.dtype(np.int64), header["num_documents"] + 1)
        if starts[0] != 0 or starts[-1] + len(starts) - 1 != len(tokens):
            raise ValueError(f"{_STARTS} does not fit {_TOKENS}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCacheError(f"the token cache {folder} is damaged ({error})") from error
    return TokenStore(tokens, starts)


def _map(file: Path, dtype: np.dtype, length: int) -> np.ndarray:
    expected, found = dtype.itemsize * length, file.stat().st_size
    if found != expected:
        raise ValueError(f"{file.name} has {found} bytes instead of {expected}")
    # A plain view: every slice of a memmap object would carry the object along.
    return np.memmap(file, dtype=dtype, mode="r", shape=(length,)).view(np.ndarray)


def _building_prefix(folder: Path) -> str:
    # With the host: on a shared disk without locks another machine may be building.
    return f"{folder.name}.building-{socket.gethostname()}-"


def _sweep(folder: Path) -> None:
    """Remove what killed builders of this machine left; the lock says that none is at work."""
    for leftover in folder.parent.glob(f"{_building_prefix(folder)}*"):
        shutil.rmtree(leftover)


def _build(folder: Path, dtype: np.dtype, documents: Iterator[np.ndarray]) -> None:
    building = folder.with_name(f"{_building_prefix(folder)}{os.getpid()}")
    building.mkdir()
    try:
        header = _write_documents(building, dtype, documents)
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


def _write_documents(
    building: Path, dtype: np.dtype, documents: Iterator[np.ndarray]
) -> dict[str, Any]:
    num_documents = num_tokens = 0
    with (building / _TOKENS).open("wb") as tokens, (building / _STARTS).open("wb") as starts:
        starts.write(np.int64(0).tobytes())
        for document in documents:
            tokens.write(document.astype(dtype).tobytes())
            num_documents += 1
            num_tokens += len(document)
            starts.write(np.int64(num_tokens - num_documents).tobytes())
        _flush(tokens)
        _flush(starts)
    return {
        "format": _FORMAT,
        "dtype": dtype.name,
        "num_documents": num_documents,
        "num_tokens": num_tokens,
    }


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
