"""How fast this machine can copy, write and read the bytes of a rank, with nothing in the way.

All ranks work at the same time, each on its own share, as they do in a save. No checkpoint can be copied
faster than by ``copy_`` into memory that is there already, nor be durable sooner than the faster of
the two plain writes, nor be loaded faster than by a plain read into memory that is there.

    copy    every tensor into a buffer that was used before
    cached  write in chunks through the page cache, start the disk early, then fsync
    direct  write in chunks past the page cache (O_DIRECT), then fsync
    read    the file that was written, from the page cache or from the disk, into one buffer
"""

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

CHUNK_BYTES = 8 << 20
_BLOCK_BYTES = 4096
"""O_DIRECT takes whole blocks at addresses that are multiples of one."""

_SYNC_FILE_RANGE_WRITE = 2
NAMES = ("copy", "cached", "direct", "read")


class Limits:
    """Measures the limits over the bytes of ``tensors``, with files in ``folder``."""

    def __init__(self, tensors: Sequence[torch.Tensor], folder: Path, rank: int) -> None:
        self._tensors = list(tensors)
        self.size_bytes = sum(tensor.nbytes for tensor in tensors)
        self._path = folder / f"limit-{rank}"

    def sample(self, barrier: Callable[[], object], *, cold: bool = False) -> dict[str, float]:
        """Seconds of this rank by name; a file system without O_DIRECT has no ``direct``.

        The memory for it is taken for the length of the call only. With ``cold`` the read comes from the
        disk.
        """
        seconds = {}
        try:
            seconds["copy"] = self._copy(barrier)
            with _used_buffer(self.size_bytes) as buffer:
                seconds["cached"] = _timed(barrier, lambda: self._write_cached(buffer))
                seconds["read"] = self._read(barrier, buffer, cold=cold)
                self._path.unlink()
                try:
                    seconds["direct"] = _timed(barrier, lambda: self._write_direct(buffer))
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
        finally:
            self._path.unlink(missing_ok=True)
        return seconds

    @torch.no_grad()
    def _copy(self, barrier: Callable[[], object]) -> float:
        targets = [torch.empty_like(tensor) for tensor in self._tensors]

        def copy() -> None:
            for target, source in zip(targets, self._tensors, strict=True):
                target.copy_(source)

        copy()  # from now on there is memory behind the addresses
        return _timed(barrier, copy)

    def _write_cached(self, buffer: mmap.mmap) -> None:
        with self._path.open("wb", buffering=0) as file, memoryview(buffer) as view:
            for start in range(0, self.size_bytes, CHUNK_BYTES):
                end = min(start + CHUNK_BYTES, self.size_bytes)
                _write_all(file.fileno(), view[start:end])
                _start_writing(file.fileno(), start, end - start)
            os.fsync(file.fileno())

    def _write_direct(self, buffer: mmap.mmap) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        try:
            with memoryview(buffer) as view:
                for start in range(0, len(buffer), CHUNK_BYTES):
                    _write_all(file, view[start : start + CHUNK_BYTES])
            os.fsync(file)
        finally:
            os.close(file)

    def _read(self, barrier: Callable[[], object], buffer: mmap.mmap, *, cold: bool) -> float:
        if cold:
            drop_from_cache(self._path)

        def read() -> None:
            with self._path.open("rb", buffering=0) as file, memoryview(buffer) as view:
                for start in range(0, self.size_bytes, CHUNK_BYTES):
                    file.readinto(view[start : min(start + CHUNK_BYTES, self.size_bytes)])

        return _timed(barrier, read)


def drop_from_cache(path: Path) -> None:
    """Let the next read of a file, whose bytes are on the disk, come from there."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def _used_buffer(size_bytes: int) -> mmap.mmap:
    """Memory at the address of a page, in whole blocks, each page of it used once."""
    blocks = max(1, -(-size_bytes // _BLOCK_BYTES))
    buffer = mmap.mmap(-1, blocks * _BLOCK_BYTES)
    # Not one byte over and over: a disk or file system may be quick with that.
    pattern = os.urandom(1 << 20)
    for start in range(0, len(buffer), len(pattern)):
        buffer[start : start + len(pattern)] = pattern[: len(buffer) - start]
    return buffer


def _write_all(file: int, view: memoryview) -> None:
    while view:
        view = view[os.write(file, view) :]


def _start_writing(file: int, start: int, size: int) -> None:
    """Ask the kernel to begin with these bytes, so that the disk works while the next are copied."""
    offset, length = ctypes.c_int64(start), ctypes.c_int64(size)
    ctypes.CDLL(None).sync_file_range(file, offset, length, ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def _timed(barrier: Callable[[], object], action: Callable[[], None]) -> float:
    barrier()
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
