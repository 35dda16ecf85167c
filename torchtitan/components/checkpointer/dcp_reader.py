"""Read a checkpoint of torch.distributed.checkpoint so that damage is found and nothing in it runs.

Every file goes through the verification of the load, every pickle through the lists of screening.py.
What is wrong with a file becomes an error that names the file; DCP brings the errors of all ranks to all
ranks before it changes any object.

    dcp_load -> reading_through -> dcp.load -> VerifyingReader, PlainLoadPlanner
             -> dcp_reading.restore -> read_error, the same on all ranks
"""

import io
import itertools
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, IO

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from torchtitan.components.checkpointer.contents import contents_of, StoredTensor, value_of
from torchtitan.components.checkpointer.dcp_index import MARKER, read_index
from torchtitan.components.checkpointer.errors import (
    cause_of,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointReadError,
)
from torchtitan.components.checkpointer.integrity.verification import Verification
from torchtitan.components.checkpointer.parts import Part, read_parts
from torchtitan.components.checkpointer.screening import (
    fault_of_good_bytes,
    is_of_the_machine,
    load_plain,
    NOT_THERE,
    reason_of,
)


def reading_through(verification: Verification) -> dict[str, Any]:
    """What to tell ``dcp.load`` so that it reads the checkpoint of ``verification`` as said above.

    Nothing if there is neither a manifest nor an index with anything in it, of which DCP then says so.
    """
    # Each rank looks by itself. A disk that fails is for the reader to find: DCP would read there
    # unchecked what the other ranks refuse.
    if verification.manifest is None and _is_nothing(f"{verification.path}/{MARKER}"):
        return {}
    reader = VerifyingReader(verification)
    return {"storage_reader": reader, "planner": PlainLoadPlanner(reader)}


def _is_nothing(path: str) -> bool:
    try:
        return os.path.getsize(path) == 0
    except OSError as error:
        return isinstance(error, (FileNotFoundError, NotADirectoryError))


def read_error(
    path: str, error: dcp.CheckpointException, verification: Verification | None = None
) -> CheckpointReadError:
    """What all ranks raise when reading ``path`` has failed on some.

    Damage if one of them found any, in the words of the first that did.

    Args:
        verification: what its files were read through; None if they are not of this format.
    """
    failures = sorted(error.failures.items())
    for rank, (cause, _) in failures:
        if isinstance(cause, CheckpointDamagedError):
            return CheckpointDamagedError(f"Rank {rank} could not read {path}: {cause}")
    # An index that no digest vouches for may lead nowhere: DCP then fails between two files, by
    # whatever its bytes happen to spell.
    if verification is not None and not verification.is_full:
        for rank, (cause, _) in failures:
            if not isinstance(cause, CheckpointError) and not is_of_the_machine(cause):
                return CheckpointDamagedError(
                    f"Rank {rank} could not read {path} by its index {MARKER}, which was not checked: "
                    f"{cause!r}. Move the checkpoint away and start again to resume from the one before it."
                )
    return CheckpointReadError(f"Could not read the checkpoint {path}: {cause_of(error)}.")


class CheckedFileSystem(FileSystem):
    """DCP's local file system, which checks what is read."""

    def __init__(self, verification: Verification) -> None:
        self._verification = verification
        self.entry: str | None = None
        """What of the open file is being read, for the errors; whoever reads says so."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any]:
        """The file ``path``, and the end of all errors that come up while it is open.

        Raises:
            CheckpointDamagedError: it is not there, not what was saved, or not what DCP writes.
            CheckpointReadError: the machine does not let it be read now, or this program does not take
                what was saved.
        """
        name = os.path.relpath(path, self._verification.path)
        self.entry = None
        with self._told_of(os.fspath(path)), super().create_stream(path, mode) as raw:
            yield self._verification.checked(name, raw)

    @contextmanager
    def _told_of(self, path: str) -> Generator[None]:
        try:
            yield
        except CheckpointDamagedError as error:
            what = f"the entry {self.entry}"
            if self.entry is None or what.lower() in str(error).lower():
                raise
            # A block may hold others as well, so this is where it was met.
            raise CheckpointDamagedError(f"{error} Found while {what} was read.") from error
        except CheckpointError:
            raise
        except NOT_THERE as error:
            raise CheckpointDamagedError(f"{path} is damaged: it is missing.") from error
        except Exception as error:
            what = path if self.entry is None else f"The entry {self.entry} of {path}"
            if is_of_the_machine(error):
                who = "disk" if isinstance(error, OSError) else "machine"
                raise CheckpointReadError(
                    f"The {who} does not let {path} be read: {error}. That says nothing about the "
                    f"checkpoint; see to the {who} and start again."
                ) from error
            if self._verification.is_full:
                # Nobody got a byte that had not passed.
                raise fault_of_good_bytes(error, what) from error
            # Damaged files raise whatever their bytes happen to spell, a place where no file begins too.
            raise CheckpointDamagedError(f"{what} cannot be read: {reason_of(error)}.") from error


class VerifyingReader(FileSystemReader):
    """DCP's file reader, on files that are checked."""

    def __init__(self, verification: Verification) -> None:
        super().__init__(verification.path)
        self._files = CheckedFileSystem(verification)
        self.fs = self._files
        self._verification = verification
        self._entries: dict[int, str] = {}
        self.checks_all = verification.is_full
        """Whether nothing is handed out that has not passed its digest."""
        self._failure: Exception | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index; an empty one stands for what is wrong with it."""
        try:
            index = read_index(os.fspath(self.path), self._verification)
        except Exception as error:
            # DCP would make of it an error without a class, so it hears of it one call later.
            self._failure = error
            return Metadata(state_dict_metadata={})
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the index over.

        Raises:
            CheckpointReadError, OSError: it could not be read.
        """
        if self._failure is not None:
            raise self._failure
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what ``plan`` says in the order of the files, so that a block is checked once."""
        places = {id(item): self.storage_data[item.storage_index] for item in plan.items}
        in_order = sorted(
            plan.items, key=lambda it: (places[id(it)].relative_path, places[id(it)].offset)
        )
        self._entries = {id(places[id(item)]): item.storage_index.fqn for item in plan.items}
        left: list[ReadItem] = []
        for path, items in itertools.groupby(in_order, lambda it: places[id(it)].relative_path):
            with self.fs.create_stream(self.fs.concat_path(self.path, path), "rb") as stream:
                left += [item for item in items if not self._read(item, stream, planner)]
        return super().read_data(replace(plan, items=left), planner)

    def _read(self, item: ReadItem, stream: Any, planner: LoadPlanner) -> bool:
        """Read ``item`` without what DCP does for it; False if only DCP can."""
        info = self.storage_data[item.storage_index]
        if info.transform_descriptors:
            return False
        self._files.entry = item.storage_index.fqn
        entry = _Entry(stream, info.offset, info.length)
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(entry.read()))
            return True
        source = contents_of(entry)
        if not isinstance(source, StoredTensor) or not _is_in(item, source):
            return False
        target = planner.resolve_tensor(item).detach()
        if target.size() != item.lengths:
            return False
        if target.numel():
            first = sum(a * b for a, b in zip(item.storage_offsets, source.stride, strict=True))
            begin = info.offset + source.begin_byte + first * source.dtype.itemsize
            read_parts(stream, [Part(begin, source, tuple(item.lengths), target)])
        planner.commit_tensor(item, target)
        return True

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        # DCP's own step from one entry to the next.
        self._files.entry = self._entries.get(id(sinfo))
        return super()._slice_file(file, sinfo)

    def file_of(self, item: ReadItem) -> str:
        """The path of the file that ``item`` is read from."""
        return f"{os.fspath(self.path)}/{self.storage_data[item.storage_index].relative_path}"


class _Entry:
    """One entry of an open file, as a file."""

    def __init__(self, stream: Any, begin_byte: int, size_bytes: int) -> None:
        self._stream, self._begin_byte, self._size_bytes = stream, begin_byte, size_bytes
        self._position = 0

    def seekable(self) -> bool:
        return self._stream.seekable()

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}
        self._position = max(origins[whence] + offset, 0)
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        left = max(self._size_bytes - self._position, 0)
        self._stream.seek(self._begin_byte + self._position)
        found = self._stream.read(left if size < 0 else min(size, left))
        self._position += len(found)
        return found


def _is_in(item: ReadItem, source: StoredTensor) -> bool:
    """Whether what is wanted lies in the tensor that is there."""
    return len(item.storage_offsets) == len(item.lengths) == len(source.size) and all(
        at >= 0 and length >= 0 and at + length <= size
        for at, length, size in zip(item.storage_offsets, item.lengths, source.size, strict=True)
    )


class PlainLoadPlanner(DefaultLoadPlanner):
    """Takes data out of the entries that are no tensors, where DCP would run what is in them."""

    def __init__(self, reader: VerifyingReader) -> None:
        super().__init__()
        self._reader = reader

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put the value of ``read_item`` into its place.

        Raises:
            CheckpointDamagedError: it asks for code, or is not what ``torch.save`` writes.
            CheckpointReadError: this program does not take what was saved.
        """
        key = read_item.dest_index.fqn
        loaded = value_of(value)
        if loaded is None:
            value.seek(0)
            what = f"The entry {key} of {self._reader.file_of(read_item)}"
            loaded = load_plain(value, what, "cpu", is_checked=self._reader.checks_all)
        set_element(self.original_state_dict, self.mappings[key], loaded)
