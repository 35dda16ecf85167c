"""A file that grows by whole pieces, also on a disk that is full for a while.

Python's own buffers keep what a full disk did not take, and later write it behind a torn half of
itself. Here a piece is in the file as a whole when the call returns, or no byte of it: what is
written once there is room again follows what was written before.

    one piece (a line, a step of events) -> append -> the kernel
"""

import errno
import os
from contextlib import suppress
from io import FileIO

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class GrowingFile:
    """One process appends to it; the file and its folder are made by the first piece."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._file: FileIO | None = None

    def append(self, piece: bytes) -> None:
        """Hand all of ``piece`` to the kernel, or nothing of it and raise the ``OSError``."""
        if self._file is None:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (until close)
        left = memoryview(piece)
        try:
            # The last write that fits takes a part, and the one after it fails.
            while left:
                left = left[self._file.write(left) :]
        except BaseException:
            with suppress(OSError):
                size = os.fstat(self._file.fileno()).st_size
                self._file.truncate(size - (len(piece) - len(left)))
            raise

    def close(self) -> None:
        """Let go of the file; a later piece opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def is_full(error: BaseException) -> bool:
    """Whether ``error`` says that a disk has no room, which may be over in a minute."""
    return isinstance(error, OSError) and error.errno in _FULL
