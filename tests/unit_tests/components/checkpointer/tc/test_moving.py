"""Where nothing is renamed a checkpoint is moved so that no half of it passes for one."""

import io
from pathlib import Path

import pytest
from torch_checkpointing.storage.base_storage import ReadArgs
from torchtitan.components.checkpointer.formats import MARKERS
from torchtitan.components.checkpointer.tc.moving import copy_in_order
from torchtitan.components.checkpointer.tc.storage import (
    BackendCheckpointStorage,
    DurableStorage,
    DurableStorageConfig,
    renames_at_once,
)
from typing_extensions import Buffer

from tests.unit_tests.components.checkpointer.tc.memory_storage import InMemory, MemoryStorage, ROOT

FILES = {
    "manifest.json": b"record",
    "metadata.pkl": b"index",
    "a.pt": b"a",
    "z.pt": b"z",
    "inside/deep.pt": b"deep",
}
SOURCE, TARGET = ROOT / "step-1", ROOT / "superseded/step-1"


def filled() -> InMemory:
    memory = InMemory()
    memory.files.update({SOURCE / name: content for name, content in FILES.items()})
    memory.folders |= {SOURCE, SOURCE / "inside"}
    return memory


def below(memory: InMemory, folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): content
        for path, content in memory.files.items()
        if path.is_relative_to(folder)
    }


def test_what_makes_a_checkpoint_complete_is_copied_last() -> None:
    memory = filled()
    copy_in_order(memory.create_storage(), SOURCE, TARGET, MARKERS)
    assert below(memory, TARGET) == below(memory, SOURCE) == FILES
    # A dict knows in which order its keys came.
    assert list(below(memory, TARGET))[-2:] == ["metadata.pkl", "manifest.json"]


class Refusing(MemoryStorage):
    """Takes no more after some files."""

    num_left = 3

    def stream_write(self, path: Path) -> io.IOBase:
        self.num_left -= 1
        if self.num_left < 0:
            raise OSError(28, "No space left on device")
        return super().stream_write(path)


def test_a_copy_that_fails_leaves_the_checkpoint_and_nothing_else() -> None:
    memory = filled()
    with pytest.raises(OSError, match="No space left"):
        copy_in_order(Refusing(memory), SOURCE, TARGET, MARKERS)
    assert below(memory, SOURCE) == FILES and not below(memory, TARGET)


class Watched(MemoryStorage):
    """Notes which files there are before each change."""

    def __init__(self, config: InMemory) -> None:
        super().__init__(config)
        self.seen: list[tuple[set[str], set[str]]] = []

    def _note(self) -> None:
        self.seen.append((set(below(self.config, SOURCE)), set(below(self.config, TARGET))))

    def write(self, path: Path, data: Buffer) -> None:
        self._note()
        super().write(path, data)

    def delete(self, path: Path) -> None:
        self._note()
        super().delete(path)

    def rmdir(self, path: Path) -> None:
        self._note()
        super().rmdir(path)


def test_after_a_move_there_is_one_and_at_no_moment_there_was_none() -> None:
    memory = filled()
    storage = Watched(memory)
    BackendCheckpointStorage(storage).move(str(SOURCE), str(TARGET))
    assert below(memory, TARGET) == FILES and not below(memory, SOURCE)
    assert storage.seen
    for source, target in storage.seen:
        assert "manifest.json" not in source or source >= FILES.keys()
        assert target >= FILES.keys()


def test_local_files_are_renamed_at_once_and_others_are_not_known_to_be() -> None:
    assert renames_at_once(DurableStorage(DurableStorageConfig()))
    assert not renames_at_once(InMemory().create_storage())


def test_a_storage_can_say_that_it_renames_at_once() -> None:
    memory = filled()
    storage = memory.create_storage()
    setattr(storage, "renames_at_once", True)  # noqa: B010 (no class of the library has it)
    moving = BackendCheckpointStorage(storage)
    assert moving.renames and not moving.has_files
    moving.move(str(SOURCE), str(TARGET))
    assert below(memory, TARGET) == FILES and not below(memory, SOURCE)


class InPieces(MemoryStorage):
    """Notes which folders are made, and refuses to read a file as a whole, or to delete a folder."""

    def __init__(self, config: InMemory) -> None:
        super().__init__(config)
        self.made: list[Path] = []

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        self.made.append(path)
        super().mkdir(path, recursive)

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        assert read_args is not None and not read_args.pre_read_full_file
        return super().stream_read(path, read_args)

    def rmdir(self, path: Path) -> None:
        raise OSError(5, "Input/output error")


def test_files_are_copied_in_pieces_and_each_folder_is_made_once() -> None:
    memory = filled()
    storage = InPieces(memory)
    copy_in_order(storage, SOURCE, TARGET, MARKERS)
    assert sorted(storage.made) == [TARGET, TARGET / "inside"]


def test_what_cannot_be_taken_back_as_a_whole_does_not_count() -> None:
    class Failing(InPieces):
        def stream_write(self, path: Path) -> io.IOBase:
            if path.name == MARKERS[0]:
                raise OSError(28, "No space left on device")
            return super().stream_write(path)

    memory = filled()
    with pytest.raises(OSError, match="No space left"):
        copy_in_order(Failing(memory), SOURCE, TARGET, MARKERS)
    left = below(memory, TARGET)
    assert left and not left.keys() & set(MARKERS)
