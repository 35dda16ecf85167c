"""An object store in memory: an object is put whole or not at all, and nothing is ever renamed.

Folders are not there: a path is one as long as an object lies below it. What the library calls a rename
is a copy of every object and then the deletion of every one, in the order of their names, so it can
be cut short anywhere. Each put and each delete is an operation, durable when it has ended.

    TorchCheckpointingManager(storage_config=Bucket()) -> ObjectStore -> Bucket.put, Bucket.delete -> log

Of the two managers only that of torch_checkpointing takes a storage; DCP saves to local paths alone.
"""

import errno
import io
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig
from typing_extensions import Buffer

from tests.crash.faults import Faults
from tests.crash.operations import Kind, note, Operation
from tests.crash.tree import Directory, File, from_values, Tree

ROOT = Path("/bucket")


@dataclass
class Bucket(StorageConfig):
    """The objects by key, and what was done to them; all storages of one bucket see the same."""

    objects: dict[str, bytes] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    log: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        # With it no copy can be made for another process, so saves are made in this one.
        self._lock = threading.Lock()

    def create_storage(self) -> "ObjectStore":
        """A storage on this bucket."""
        return ObjectStore(self)

    def put(self, key: str, content: bytes) -> None:
        """Make ``content`` all of the object ``key``."""

        def act() -> None:
            self.objects[key] = content
            self.log.append(Operation(0, Kind.PUT, key, content=content))

        with self._lock:
            self.faults.carry_out(Kind.PUT, key, act)

    def delete(self, key: str) -> None:
        """Take the object ``key`` away; one that is not there is no error, as of most stores."""

        def act() -> None:
            self.objects.pop(key, None)
            self.log.append(Operation(0, Kind.DELETE, key))

        with self._lock:
            self.faults.carry_out(Kind.DELETE, key, act)

    def note(self, what: str, step: int | str = "", content: bytes = b"") -> None:
        """Say something at this place of the history."""
        with self._lock:
            self.log.append(note(0, what, step, content))

    def below(self, prefix: str) -> list[str]:
        """The keys below the path ``prefix``, sorted; ``""`` is all of them."""
        start = f"{prefix}/" if prefix else ""
        return sorted(key for key in tuple(self.objects) if key.startswith(start))


class ObjectStore(Storage):
    """What the library asks for, on a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        return _Read(self._get(path))

    def stream_write(self, path: Path) -> io.IOBase:
        return _Upload(self._bucket, _key(path))

    def write(self, path: Path, data: Buffer) -> None:
        self._bucket.put(_key(path), bytes(data))

    def delete(self, path: Path) -> None:
        self._bucket.delete(_key(path))

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Nothing to do."""

    def rmdir(self, path: Path) -> None:
        for key in self._bucket.below(_key(path)):
            self._bucket.delete(key)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        src, dst = _key(src_path), _key(dst_path)
        if self.isdir(dst_path) or (self.isdir(src_path) and self.exists(dst_path)):
            raise FileExistsError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(dst_path))
        keys = self._bucket.below(src) if self.isdir(src_path) else [src]
        # First all copies, then all deletions, as the library says of a storage like this one.
        for key in keys:
            self._bucket.put(dst + key.removeprefix(src), self._get(_path(key)))
        for key in keys:
            self._bucket.delete(key)

    def ls(self, path: Path) -> list[str]:
        inside = _key(path)
        start = f"{inside}/" if inside else ""
        names = {key.removeprefix(start).split("/")[0] for key in self._bucket.below(inside)}
        # Not sorted: nobody promises an order.
        return sorted(names, key=lambda name: name[::-1])

    def exists(self, path: Path) -> bool:
        return _key(path) in self._bucket.objects or self.isdir(path)

    def getsize(self, path: Path) -> int:
        return len(self._get(path))

    def isdir(self, path: Path) -> bool:
        return bool(self._bucket.below(_key(path)))

    def remap_path(self, path: Path) -> str:
        return f"memory:/{path}"

    def _get(self, path: Path) -> bytes:
        try:
            return self._bucket.objects[_key(path)]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None


def tree_of(objects: dict[str, bytes]) -> Tree:
    """The folders that a listing shows, with the objects as files."""
    values: dict[str, Any] = {}
    for key, content in objects.items():
        *folders, name = key.split("/")
        inside = values
        for folder in folders:
            inside = inside.setdefault(folder, {})
        inside[name] = content
    return from_values(values)


def objects_of(tree: Tree) -> dict[str, bytes]:
    """The other way; folders without anything in them are nothing."""
    return dict(_files(tree, ""))


def _files(directory: Directory, above: str) -> Iterator[tuple[str, bytes]]:
    for name, node in directory.entries.items():
        if isinstance(node, File):
            yield f"{above}{name}", node.content
        elif isinstance(node, Directory):
            yield from _files(node, f"{above}{name}/")


def _key(path: Path) -> str:
    relative = Path(path).relative_to(ROOT).as_posix()
    return "" if relative == "." else relative


def _path(key: str) -> Path:
    return ROOT / key


class _Upload(io.BytesIO):
    """Becomes an object when it is closed in order, and nothing when its ``with`` ends with an error."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        super().__init__()
        self._bucket, self._key = bucket, key

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        if exc_type is None:
            self.close()
        else:
            super().close()

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            self._bucket.put(self._key, content)


class _Read(io.RawIOBase):
    def __init__(self, content: bytes) -> None:
        self._content = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        return self._content.readinto(buffer)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._content.seek(offset, whence)

    def tell(self) -> int:
        return self._content.tell()
