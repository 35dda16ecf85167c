"""A storage of the library that is not on any disk, as somebody's object store would be."""

import io
from dataclasses import dataclass, field
from pathlib import Path

from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig
from typing_extensions import Buffer

ROOT = Path("/nowhere")


@dataclass
class InMemory(StorageConfig):
    """All storages of one config see the same files."""

    is_seekable: bool = True
    """Whether its streams for reading can go back."""
    files: dict[Path, bytes] = field(default_factory=dict)
    folders: set[Path] = field(default_factory=lambda: {ROOT})

    def create_storage(self) -> "MemoryStorage":
        return MemoryStorage(self)


class MemoryStorage(Storage):
    def __init__(self, config: InMemory) -> None:
        self.config = config
        self.files, self.folders = config.files, config.folders

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        if path not in self.files:
            raise FileNotFoundError(path)
        return _Stream(self.files[path], self.config.is_seekable)

    def stream_write(self, path: Path) -> io.IOBase:
        return _Taken(self.files, path)

    def write(self, path: Path, data: Buffer) -> None:
        self.files[path] = bytes(data)

    def delete(self, path: Path) -> None:
        del self.files[path]

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        self.folders.update((path, *path.parents))

    def rmdir(self, path: Path) -> None:
        for taken in [each for each in self.files if each.is_relative_to(path)]:
            del self.files[taken]
        self.folders.difference_update([each for each in self.folders if each.is_relative_to(path)])

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        if dst_path in self.folders:
            raise FileExistsError(dst_path)
        for old in [each for each in self.files if each.is_relative_to(src_path)]:
            self.files[dst_path / old.relative_to(src_path)] = self.files.pop(old)
        for old in [each for each in self.folders if each.is_relative_to(src_path)]:
            self.folders.remove(old)
            self.folders.add(dst_path / old.relative_to(src_path))

    def ls(self, path: Path) -> list[str]:
        return [each.name for each in (*self.files, *self.folders) if each.parent == path]

    def exists(self, path: Path) -> bool:
        return path in self.files or path in self.folders

    def getsize(self, path: Path) -> int:
        if path not in self.files:
            raise FileNotFoundError(path)
        return len(self.files[path])

    def isdir(self, path: Path) -> bool:
        return path in self.folders

    def remap_path(self, path: Path) -> str:
        return f"memory:{path}"


class _Taken(io.BytesIO):
    """Becomes a file when it is closed."""

    def __init__(self, files: dict[Path, bytes], path: Path) -> None:
        super().__init__()
        self._files, self._path = files, path

    def close(self) -> None:
        if not self.closed:
            self._files[self._path] = self.getvalue()
        super().close()


class _Stream(io.RawIOBase):
    def __init__(self, content: bytes, is_seekable: bool) -> None:
        self._content, self._is_seekable = io.BytesIO(content), is_seekable

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._is_seekable

    def readinto(self, buffer: Buffer, /) -> int:
        return self._content.readinto(buffer)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if not self._is_seekable:
            raise io.UnsupportedOperation("seek")
        return self._content.seek(offset, whence)

    def tell(self) -> int:
        return self._content.tell()
