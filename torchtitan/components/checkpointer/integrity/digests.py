"""Digests of a file, taken while its bytes pass by on their way to the disk.

A file has one digest as a whole, which ``xxhsum -H3`` prints too, and one for each of its blocks, so
that whoever reads a part checks a part. Both are taken of one block after the other, while it is in
the cache of the processor; nothing but little pieces is copied, and nothing read a second time from the disk.

    whoever writes -> HashingStream -> Hasher -> FileDigest -> manifest.py
"""

import io
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from typing_extensions import Buffer
from xxhash import xxh3_64

BLOCK_BYTES = 2**20
"""The length of the blocks in what is large or of unknown length, as files of DCP are: what is read and
checked at once. A terabyte has a million of them, whose digests every rank is told."""

_FINEST_BLOCK_BYTES = 2**18
# Shorter blocks are for what has fewer than that: they make at most twice as many, 32 KiB in a manifest.
_FEW_BLOCKS = 2**10

# An archive of torch has forty little writes for each tensor: hashed one by one they would take as
# long as half of its saving, gathered first they hardly show.
_FEW_BYTES = 64 * 2**10

_DIGITS = 16


def block_bytes_for(size_bytes: int) -> int:
    """How long the blocks should be of files that are to have about this size, all together.

    Ranks that load in another layout read and check whole blocks to get parts of tensors. A small state has
    small tensors, and a long block of it many that are another rank's.
    """
    block_bytes = BLOCK_BYTES
    while block_bytes > _FINEST_BLOCK_BYTES and size_bytes < _FEW_BLOCKS * block_bytes:
        block_bytes //= 2
    return block_bytes


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What a file held when it was written."""

    size_bytes: int

    xxh3_64: str
    """Of the whole file: 16 hexadecimal digits."""

    blocks: str
    """Of each block, 16 digits each, without a gap; "" for a file of at most one block, of which
    ``xxh3_64`` says it."""

    block_bytes: int = field(default_factory=lambda: BLOCK_BYTES)
    """How long a block is; the last one may be shorter."""

    def __post_init__(self) -> None:
        if self.block_bytes < 1:
            raise ValueError(f"no blocks of {self.block_bytes} bytes")
        expected = _DIGITS * self.num_blocks if self.num_blocks > 1 else 0
        if self.size_bytes < 0 or len(self.xxh3_64) != _DIGITS or len(self.blocks) != expected:
            raise ValueError(
                f"not a digest of {self.size_bytes} bytes: {self.xxh3_64} {self.blocks}"
            )

    @property
    def num_blocks(self) -> int:
        """How many blocks the file has."""
        return -(-self.size_bytes // self.block_bytes)

    def block_at(self, position: int) -> int:
        """The index of the block that holds the byte at ``position``."""
        return position // self.block_bytes

    def block_range(self, index: int) -> tuple[int, int]:
        """Where block ``index`` begins and ends."""
        start = index * self.block_bytes
        return start, min(start + self.block_bytes, self.size_bytes)

    def block_digest(self, index: int) -> str:
        """The digest of block ``index``."""
        if not self.blocks:
            return self.xxh3_64
        return self.blocks[index * _DIGITS : (index + 1) * _DIGITS]


class Hasher:
    """Takes the bytes of a file in order and tells its digest."""

    def __init__(self, block_bytes: int | None = None) -> None:
        """``block_bytes`` None is that of a file of unknown length."""
        self.size_bytes = 0
        self._block_bytes = BLOCK_BYTES if block_bytes is None else block_bytes
        self._pending = bytearray()
        self._num_hashed = 0
        self._whole = xxh3_64()
        self._blocks: list[str] = []
        # None during the first block, whose digest is the one of the whole file so far.
        self._block: xxh3_64 | None = None

    def update(self, buffer: Buffer) -> None:
        """Go on with ``buffer``, which may be anything contiguous."""
        view = memoryview(buffer)
        self.size_bytes += view.nbytes
        if view.nbytes >= _FEW_BYTES:
            self._hash_pending()
            self._hash(flat(view))
            return
        self._pending += view
        if len(self._pending) >= _FEW_BYTES:
            self._hash_pending()

    def digest(self) -> FileDigest:
        """Of all bytes so far; more may follow."""
        self._hash_pending()
        blocks = ""
        if self._block is not None:
            blocks = "".join(self._blocks) + self._block.hexdigest()
        return FileDigest(self.size_bytes, self._whole.hexdigest(), blocks, self._block_bytes)

    def _hash_pending(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._hash(memoryview(pending))

    def _hash(self, view: memoryview) -> None:
        start = 0
        while start < len(view):
            room = self._block_bytes - self._num_hashed % self._block_bytes
            part = view[start : start + room]
            if self._num_hashed and room == self._block_bytes:
                self._begin_block()
            self._whole.update(part)
            if self._block is not None:
                self._block.update(part)
            start += len(part)
            self._num_hashed += len(part)

    def _begin_block(self) -> None:
        # Only when more bytes come: a file that ends with its block has no empty one after it.
        self._blocks.append((self._block or self._whole).hexdigest())
        if self._block is None:
            self._block = xxh3_64()
        else:
            self._block.reset()


def flat(buffer: Buffer) -> memoryview:
    """The bytes of ``buffer`` in order, without a copy."""
    view = memoryview(buffer)
    # One with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def digest_of(content: Buffer, block_bytes: int | None = None) -> FileDigest:
    """The digest of a file that holds ``content``; ``block_bytes`` None is as for ``Hasher``."""
    hasher = Hasher(block_bytes)
    hasher.update(content)
    return hasher.digest()


class HashingStream(io.IOBase):
    """Passes on what is written to ``stream``, and knows its digest.

    ``with HashingStream(stream)`` enters and leaves ``stream``, which may sync or commit there.
    """

    def __init__(self, stream: Any, block_bytes: int | None = None) -> None:
        """``block_bytes`` None is that of a file of unknown length."""
        self._stream = self._context = stream
        self._hasher = Hasher(block_bytes)

    def digest(self) -> FileDigest:
        """Of all that was written so far; may be asked after closing, too."""
        return self._hasher.digest()

    def write(self, buffer: Buffer, /) -> int:
        """Write all of ``buffer``, whatever the stream takes at once."""
        # As it came, and all at once: in smaller pieces this thread would ask more often for the lock
        # of the interpreter, for which the training thread may let it wait.
        taken = self._stream.write(buffer)
        size = memoryview(buffer).nbytes
        # Not every stream says how much it took; those that do not, took it all.
        if taken is None or taken == size:
            self._hasher.update(buffer)
        else:
            self._write_on(flat(buffer), taken)
        return size

    def _write_on(self, view: memoryview, taken: int) -> None:
        while True:
            if not 0 < taken <= len(view):
                raise OSError(f"a write of {len(view)} bytes took {taken}")
            self._hasher.update(view[:taken])
            view = view[taken:]
            if not view:
                return
            taken = self._stream.write(view)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._hasher.size_bytes

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Refused unless it stays where it is: what is written over was hashed already."""
        here = self.tell()
        if (offset if whence == io.SEEK_SET else here + offset) != here:
            raise io.UnsupportedOperation("a file is hashed while it is written from start to end")
        return here

    def truncate(self, size: int | None = None, /) -> int:
        raise io.UnsupportedOperation("a file is hashed while it is written from start to end")

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return False

    @property
    def closed(self) -> bool:
        return bool(getattr(self._stream, "closed", False))

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> "HashingStream":
        # Some streams open their file here, and some hand out another object.
        self._stream = self._context.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self._context.__exit__(exc_type, exc_val, exc_tb)

    def __del__(self) -> None:
        # IOBase would close the stream, which belongs to whoever opened it.
        pass
