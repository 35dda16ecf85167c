"""A file of a checkpoint, each byte of which is checked before anybody gets it.

Whole blocks are read straight into the buffer of whoever reads and hashed there, before the call
returns. Of a block that is asked for in part, all is read and checked, and kept for a while: the
next read goes on in it. So reading a file in order checks each block once. Who knows all that he
wants of a file gets it straight into his buffers (``fill``).

    Verification.checked -> CheckedFile -> DCP, torch_checkpointing, torch.load
"""

import io
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from typing_extensions import Buffer
from xxhash import xxh3_64

from torchtitan.components.checkpointer.errors import CheckpointDamagedError
from torchtitan.components.checkpointer.integrity.digests import BLOCK_BYTES, FileDigest, flat

# An archive is read at its end and at its start by turns, often with another one before and behind.
_KEPT_BLOCKS = 4
# What is hashed at once, while it is in the nearest cache of the processor; where a read is a request
# to another machine, it is a block.
_PIECE_BYTES = 256 * 2**10


class CheckedFile(io.RawIOBase):
    """Reads ``raw``, a binary file that can seek, and closes it.

    It has no file descriptor, so that nobody reads past the check.
    """

    def __init__(
        self,
        raw: Any,
        name: str,
        digest: FileDigest,
        on_checked: Callable[[int], None] | None = None,
    ) -> None:
        """``name`` is for messages; ``on_checked`` hears how many bytes were found good.

        Raises:
            CheckpointDamagedError: the file has another size; ``raw`` is closed then.
        """
        super().__init__()
        self.name = name
        self._raw = raw
        self._digest = digest
        self._on_checked = on_checked
        self._position = 0
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        is_local = isinstance(raw, (io.FileIO, io.BufferedReader))
        # Takes what nobody asked for; it is as long as what is read at once.
        self._scratch = memoryview(bytearray(_PIECE_BYTES if is_local else BLOCK_BYTES))
        raw.seek(0, io.SEEK_END)
        size = raw.tell()
        if size != digest.size_bytes:
            self.close()
            raise CheckpointDamagedError(
                f"{name} is damaged: expected {digest.size_bytes} bytes, found {size}."
            )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._require_open()
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._require_open()
        origins = {
            io.SEEK_SET: 0,
            io.SEEK_CUR: self._position,
            io.SEEK_END: self._digest.size_bytes,
        }
        if whence not in origins or origins[whence] + offset < 0:
            raise ValueError(f"cannot seek to {offset} (whence {whence}) in {self.name}")
        self._position = origins[whence] + offset
        return self._position

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill ``buffer``, as far as the file goes.

        Raises:
            CheckpointDamagedError: a block of it is not what was saved.
        """
        self._require_open()
        view = flat(buffer)[: max(self._digest.size_bytes - self._position, 0)]
        done = 0
        while done < len(view):
            index = self._digest.block_at(self._position)
            start, end = self._digest.block_range(index)
            count = min(end - self._position, len(view) - done)
            target = view[done : done + count]
            if count == end - start and index not in self._kept:
                self._read_block(index, target)
            else:
                offset = self._position - start
                target[:] = self._block(index)[offset : offset + count]
            done += count
            self._position += count
        return done

    def fill(self, parts: Iterable[tuple[int, memoryview]]) -> None:
        """Fill each buffer with what begins at its place; quickest in the order of the places.

        Nothing is copied, so a buffer has bytes in it before they are checked. All are when this returns.

        Raises:
            CheckpointDamagedError: a block is not what was saved; what is in the buffers then, is not.
            ValueError: a part goes beyond the file.
        """
        self._require_open()
        passing: _PassingBlock | None = None
        for place, buffer in parts:
            if place < 0 or place + len(buffer) > self._digest.size_bytes:
                raise ValueError(f"{self.name} has no bytes {place}..{place + len(buffer) - 1}")
            done = 0
            while done < len(buffer):
                index = self._digest.block_at(place + done)
                start, end = self._digest.block_range(index)
                target = buffer[done : done + end - (place + done)]
                if passing is not None and (passing.index != index or passing.at > place + done):
                    passing.finish()
                    passing = None
                if index in self._kept:
                    offset = place + done - start
                    target[:] = self._block(index)[offset : offset + len(target)]
                else:
                    passing = passing or self._begin_block(index)
                    passing.skip(place + done)
                    passing.take(target)
                done += len(target)
        if passing is not None:
            passing.finish()

    def read(self, size: int | None = -1, /) -> bytes:
        self._require_open()
        left = max(self._digest.size_bytes - self._position, 0)
        content = bytearray(left if size is None or size < 0 else min(size, left))
        self.readinto(content)
        return bytes(content)

    def readall(self) -> bytes:
        return self.read()

    def close(self) -> None:
        if not self.closed:
            self._kept.clear()
            self._raw.close()
        super().close()

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self.name} is closed")

    def _block(self, index: int) -> memoryview:
        """All of a block, checked."""
        if index in self._kept:
            self._kept.move_to_end(index)
            return self._kept[index]
        start, end = self._digest.block_range(index)
        memory = memoryview(b"")
        if len(self._kept) >= _KEPT_BLOCKS:
            # Its pages are there already, and need not be cleared once more.
            _, memory = self._kept.popitem(last=False)
        if len(memory) < end - start:
            memory = memoryview(bytearray(end - start))
        self._read_block(index, memory[: end - start])
        self._kept[index] = memory
        return memory

    def _read_block(self, index: int, target: memoryview) -> None:
        """Read a block into ``target``, which is as long, and compare its digest."""
        block = self._begin_block(index)
        block.take(target)
        block.finish()

    def _begin_block(self, index: int) -> "_PassingBlock":
        return _PassingBlock(
            self._raw, self.name, self._digest, index, self._scratch, self._on_checked
        )


class _PassingBlock:
    """A block that is read once, from its start to its end, and checked there."""

    def __init__(
        self,
        raw: Any,
        name: str,
        digest: FileDigest,
        index: int,
        scratch: memoryview,
        on_checked: Callable[[int], None] | None,
    ) -> None:
        self.index = index
        self.start, self.end = digest.block_range(index)
        self.at = self.start
        """The next byte of the file."""
        self._raw, self._name, self._digest = raw, name, digest
        self._scratch, self._on_checked = scratch, on_checked
        self._hash = xxh3_64()
        raw.seek(self.start)

    def take(self, target: memoryview) -> None:
        """Fill ``target`` with what comes next."""
        done = 0
        while done < len(target):
            count = self._raw.readinto(target[done : done + len(self._scratch)])
            if not count:
                raise CheckpointDamagedError(
                    f"{self._name} is damaged: expected {self._digest.size_bytes} bytes, it ends "
                    f"after {self.at}."
                )
            self._hash.update(target[done : done + count])
            done += count
            self.at += count

    def skip(self, place: int) -> None:
        """Read on up to ``place``."""
        while place > self.at:
            self.take(self._scratch[: place - self.at])

    def finish(self) -> None:
        """Read the rest and compare the digest."""
        self.skip(self.end)
        expected, found = self._digest.block_digest(self.index), self._hash.hexdigest()
        if found != expected:
            raise CheckpointDamagedError(
                f"{self._name} is damaged: bytes {self.start}..{self.end - 1}: expected xxh3 {expected}, "
                f"found {found}."
            )
        if self._on_checked is not None:
            self._on_checked(self.end - self.start)
