"""A file that stands before one of a disk, for tests that see or change what is done with it.

disk.create -> a class of OpenFile -> the file of the system
"""

from types import TracebackType
from typing import BinaryIO, Self


class OpenFile:
    """As much of a file as ``Disk.create`` promises, each call passed on to ``inner``."""

    def __init__(self, inner: BinaryIO) -> None:
        self.inner = inner

    @property
    def closed(self) -> bool:
        return self.inner.closed

    def write(self, content: bytes) -> int:
        return self.inner.write(content)

    def flush(self) -> None:
        self.inner.flush()

    def tell(self) -> int:
        return self.inner.tell()

    def fileno(self) -> int:
        return self.inner.fileno()

    def close(self) -> None:
        self.inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.close()
