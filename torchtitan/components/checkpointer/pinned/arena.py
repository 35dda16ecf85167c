"""One piece of memory that a trainer fills and its writer process reads.

It is an anonymous file (memfd), mapped by both sides. So it takes one descriptor whatever the number
of tensors, the small /dev/shm of a container is no limit, it has no name that could be left behind,
and the kernel frees it with the last process that holds it, however that one ended.
"""

import errno
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

ALIGNMENT = 64
"""Bytes between the starts of tensors; a multiple of every element size, and a cache line."""

# Grown in steps of this size, so that a few more values do not mean a new mapping every time.
_GRANULE_BYTES = 1 << 20
_MFD_NOEXEC_SEAL = 8  # from linux/memfd.h; Python has no name for it
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


def aligned(size_bytes: int) -> int:
    """The first offset at or behind ``size_bytes`` where a tensor may begin."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def anonymous_file() -> int:
    """The descriptor of a new file in memory, without a name. Raises OSError if there is none."""
    flags = os.MFD_CLOEXEC
    try:
        # Where only files that can never be executed are allowed (vm.memfd_noexec=2).
        return os.memfd_create("checkpoint-staging", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("checkpoint-staging", flags)  # a kernel before 6.3


class Arena:
    """Shared memory that only grows; ``fd`` is how the other process gets at it."""

    def __init__(self, fd: int | None = None) -> None:
        """Make a new, empty one, or attach to the one behind ``fd``, which is then owned."""
        self.fd = anonymous_file() if fd is None else fd
        self.size_bytes = 0
        self._memory: mmap.mmap | None = None
        self._pinned_at: int | None = None

    def reserve(self, size_bytes: int, *, pin_for: torch.device | None = None) -> bool:
        """Have at least ``size_bytes``; says whether it is pinned, which ``pin_for`` asks for.

        Must not be called while anybody copies. Raises OSError when the system has no more memory:
        the pages are taken here, so that touching them later cannot kill the process.
        """
        if size_bytes <= self.size_bytes:
            return self._pinned_at is not None
        wanted = -(-size_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
        try:
            os.ftruncate(self.fd, wanted)
            os.posix_fallocate(self.fd, self.size_bytes, wanted - self.size_bytes)
        except OSError:
            os.ftruncate(self.fd, self.size_bytes)
            raise
        self._unpin()
        self.attach(wanted)
        return pin_for is not None and self._pin(pin_for)

    def attach(self, size_bytes: int) -> None:
        """Map the first ``size_bytes``, as the other side has reserved them."""
        if size_bytes == self.size_bytes:
            return
        # The earlier mapping goes when the last tensor in it does: closing it would leave tensors
        # that point nowhere.
        self._memory = mmap.mmap(self.fd, size_bytes, flags=mmap.MAP_SHARED | _POPULATE)
        self.size_bytes = size_bytes

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The memory from ``offset`` on as a tensor.

        Its storage is exactly as large as it is: torch would save all of a larger one.
        """
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        assert self._memory is not None
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
        return flat.view(tuple(shape))

    def write(self, offset: int, content: bytes) -> None:
        """Put ``content`` at ``offset``."""
        assert self._memory is not None
        self._memory[offset : offset + len(content)] = content

    def read(self, offset: int, size_bytes: int) -> bytes:
        """The ``size_bytes`` from ``offset`` on."""
        assert self._memory is not None
        return self._memory[offset : offset + size_bytes]

    def close(self) -> None:
        """Give the memory back."""
        self._unpin()
        self._memory = None
        self.size_bytes = 0
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def _pin(self, device: torch.device) -> bool:
        address = self.tensor(0, (1,), torch.uint8).data_ptr()

        def register() -> int:
            # A new thread stands on device 0, where every rank would then open a context.
            with torch.accelerator.device_index(device.index):
                # Portable: every context of this process may copy into it.
                return int(_cuda().cudaHostRegister(address, self.size_bytes, 1))

        # In a thread of its own: CUDA remembers a failure for the thread that met it, and the next
        # kernel which that thread starts, in the middle of a training step, would be blamed for it.
        with ThreadPoolExecutor(1) as once:
            if once.submit(register).result() != 0:
                return False
        self._pinned_at = address
        return True

    def _unpin(self) -> None:
        if self._pinned_at is not None:
            _cuda().cudaHostUnregister(self._pinned_at)
            self._pinned_at = None


def _cuda() -> Any:
    return torch.cuda.cudart()
