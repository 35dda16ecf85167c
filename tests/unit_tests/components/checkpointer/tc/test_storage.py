"""Files of torch_checkpointing: on the disk before they have their name, and deleted marker first."""

import errno
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch_checkpointing.checkpoint_base import CheckpointItem, CheckpointWriteInfo
from torch_checkpointing.checkpoint_writer import CheckpointWriterArgs, CheckpointWriterConfig
from torch_checkpointing.storage.base_storage import ReadArgs, Storage
from torch_checkpointing.storage.filesystem import (
    LocalFileSystemStorage,
    LocalFileSystemStorageConfig,
)
from torch_checkpointing.types import RankInfo
from torchtitan.components.checkpointer.formats import MARKERS
from torchtitan.components.checkpointer.history import renames
from torchtitan.components.checkpointer.storage import DELETED, MovingStorage
from torchtitan.components.checkpointer.tc.commit import CommitBarrierConfig, GroupCommit
from torchtitan.components.checkpointer.tc.storage import (
    BackendCheckpointStorage,
    DurableStorage,
    DurableStorageConfig,
)
from torchtitan.components.checkpointer.tc.writer import Writer
from torchtitan.tools import disk
from torchtitan.tools.disk import Disk

from tests.unit_tests.components.checkpointer.tc.memory_storage import InMemory, MemoryStorage
from tests.unit_tests.noting_disk import NotingDisk

ALONE = RankInfo(0, 1, 0, 1)


class Syncs:
    """What was made durable, in order; each entry with the names that were there at the time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.synced: list[tuple[str, list[str]]] = []

    def note(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        names = sorted(os.listdir(path)) if path.is_dir() else []
        size = [] if path.is_dir() else [str(path.stat().st_size)]
        self.synced.append((str(path.relative_to(self.root)), names or size))


@pytest.fixture
def synced(tmp_path: Path, is_durable: None) -> Iterator[Syncs]:
    found, fsync = Syncs(tmp_path), os.fsync

    def sync(descriptor: int) -> None:
        found.note(descriptor)
        fsync(descriptor)

    with patch.object(os, "fsync", sync):
        yield found


@pytest.fixture
def storage() -> DurableStorage:
    return DurableStorageConfig().create_storage()


def test_a_file_is_on_the_disk_whole_when_it_is_closed(
    synced: Syncs, storage: DurableStorage, tmp_path: Path
) -> None:
    storage.write(tmp_path / "whole", b"abc")
    with storage.stream_write(tmp_path / "streamed") as stream:
        stream.write(memoryview(b"abcd"))
        assert synced.synced == [("whole", ["3"])]
    assert synced.synced == [("whole", ["3"]), ("streamed", ["4"])]
    assert (tmp_path / "streamed").read_bytes() == b"abcd"


def test_a_file_that_failed_is_closed_and_not_synced(
    synced: Syncs, storage: DurableStorage, tmp_path: Path
) -> None:
    stream: Any = storage.stream_write(tmp_path / "half")
    file = stream.__enter__()._file
    stream.write(b"ab")
    stream.__exit__(KeyError, KeyError(), None)
    assert file.closed and synced.synced == []


def test_a_file_whose_sync_fails_is_closed_and_the_error_told(
    storage: DurableStorage, tmp_path: Path
) -> None:
    stream: Any = storage.stream_write(tmp_path / "file")
    with patch.object(os, "fsync", side_effect=OSError(5, "input/output error")):
        file = stream.__enter__()._file
        with pytest.raises(OSError, match="input/output error"):
            stream.__exit__(None, None, None)
    assert file.closed


def test_new_directories_are_durable_with_all_their_missing_parents(
    synced: Syncs, storage: DurableStorage, tmp_path: Path
) -> None:
    storage.mkdir(tmp_path / "a/b")
    assert synced.synced == [(".", ["a"]), ("a", ["b"])]
    storage.mkdir(tmp_path / "a/b")
    with pytest.raises(FileExistsError):
        storage.mkdir(tmp_path / "a/b", recursive=False)
    storage.mkdir(tmp_path / "a/c", recursive=False)
    assert sorted(os.listdir(tmp_path / "a")) == ["b", "c"] and len(synced.synced) == 2


def test_what_is_in_a_directory_is_durable_before_it_has_its_name(
    synced: Syncs, storage: DurableStorage, tmp_path: Path
) -> None:
    (tmp_path / "from/tmp_step-1").mkdir(parents=True)
    (tmp_path / "from/tmp_step-1/model_0.pt").touch()
    (tmp_path / "to").mkdir()
    storage.rename(tmp_path / "from/tmp_step-1", tmp_path / "to/step-1", is_directory=True)
    assert synced.synced == [
        ("from/tmp_step-1", ["model_0.pt"]),
        ("to", ["step-1"]),
        ("from", []),
    ]


def test_a_rename_within_a_folder_syncs_it_once_and_a_file_has_no_contents_to_sync(
    synced: Syncs, storage: DurableStorage, tmp_path: Path
) -> None:
    (tmp_path / "old").touch()
    storage.rename(tmp_path / "old", tmp_path / "new")
    assert synced.synced == [(".", ["new"])]


def test_a_name_that_is_taken_is_refused_and_nothing_is_lost(
    synced: Syncs, storage: DurableStorage, tmp_path: Path
) -> None:
    for name in ("tmp_step-1", "step-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_0.pt").write_text(name)
    with pytest.raises(FileExistsError, match="step-1"):
        storage.rename(tmp_path / "tmp_step-1", tmp_path / "step-1", is_directory=True)
    for name in ("tmp_step-1", "step-1"):
        assert (tmp_path / name / "model_0.pt").read_text() == name
    assert [path for path, _ in synced.synced] == ["tmp_step-1"]


def test_a_deletion_is_durable_and_of_nothing_is_none(
    synced: Syncs, storage: DurableStorage, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    storage.delete(tmp_path / "file")
    storage.delete(tmp_path / "file")
    assert synced.synced == [(".", [])]


def test_a_whole_save_is_durable_before_and_after_it_has_its_name(
    synced: Syncs, tmp_path: Path
) -> None:
    args = CheckpointWriterArgs(
        config=CheckpointWriterConfig(barrier_config=CommitBarrierConfig()),
        rank_info=ALONE,
        storage_config=DurableStorageConfig(),
    )
    items = {key: CheckpointItem(value={"w": torch.ones(3)}) for key in ("model", "optimizer")}
    info = CheckpointWriteInfo(items, serialized_distributed_metadata=b"metadata")
    Writer(args, lambda: GroupCommit(ALONE, None)).write(str(tmp_path / "step-1"), info)
    written = ["metadata.pkl", "model_0.pt", "optimizer_0.pt"]
    assert [path for path, _ in synced.synced] == [
        ".",
        *(f"tmp_step-1/{name}" for name in ("model_0.pt", "optimizer_0.pt", "metadata.pkl")),
        "tmp_step-1",
        ".",
    ]
    assert synced.synced[-2:] == [("tmp_step-1", written), (".", ["step-1"])]


def test_it_reads_and_writes_without_direct_io_unless_it_is_told(tmp_path: Path) -> None:
    assert DurableStorageConfig().use_direct_io is False
    (tmp_path / "file").write_bytes(b"abc")
    storage = DurableStorageConfig().create_storage()
    asked = ReadArgs(pre_read_full_file=False, direct_io=True)
    with storage.stream_read(tmp_path / "file", asked) as stream:
        assert stream.seek(1) == 1 and stream.read() == b"bc"
        assert not hasattr(stream, "_direct_io")
    opened = DurableStorageConfig(use_direct_io=True).create_storage()
    with opened.stream_read(tmp_path / "file", asked) as stream:
        assert hasattr(stream, "_direct_io")
    travelled = pickle.loads(pickle.dumps(DurableStorageConfig()))
    assert type(travelled.create_storage()) is DurableStorage


def test_what_cannot_be_looked_at_is_an_error_and_not_absent(
    storage: DurableStorage, tmp_path: Path
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    ours = BackendCheckpointStorage(storage)
    for ask in (storage.exists, storage.isdir):
        with pytest.raises(OSError, match="loop"):
            ask(tmp_path / "loop")
        assert not ask(tmp_path / "gone") and not ask(tmp_path / "file/below")
    for question in (ours.isdir, ours.isfile):
        with pytest.raises(OSError, match="loop"):
            question(f"{tmp_path}/loop/metadata.pkl")


def test_questions_about_paths_go_to_the_storage_of_the_library() -> None:
    library = MagicMock(spec=Storage)
    storage = BackendCheckpointStorage(library)
    as_moving: MovingStorage = storage
    library.isdir.side_effect = lambda path: path == Path("/run/step-1")
    library.exists.side_effect = lambda path: path != Path("/run/gone")
    library.ls.return_value = ["b", "a"]
    assert as_moving.isdir("/run/step-1") and not as_moving.isdir("/run/file")
    assert storage.isfile("/run/file")
    assert not storage.isfile("/run/step-1") and not storage.isfile("/run/gone")
    assert storage.listdir("/run") == ["b", "a"]
    library.ls.assert_called_once_with(Path("/run"))
    library.exists.side_effect = lambda path: path.name == MARKERS[0]
    library.reset_mock()
    storage.remove("/run/step-1")
    asked = ("exists", "isdir")
    changes = [call[:2] for call in library.method_calls if call[0] not in asked]
    assert changes == [
        ("rename", (Path("/run/step-1", MARKERS[0]), Path("/run/step-1", DELETED))),
        ("rmdir", (Path("/run/step-1"),)),
    ]


def test_a_local_storage_renames_and_of_another_nobody_knows(storage: DurableStorage) -> None:
    class Own(LocalFileSystemStorage):
        pass

    for local in (storage, Own(LocalFileSystemStorageConfig())):
        assert renames(BackendCheckpointStorage(local), "/run")
    assert not renames(BackendCheckpointStorage(MemoryStorage(InMemory())), "/run")


class Together(MemoryStorage):
    """Answers when three are asking."""

    asking = threading.Barrier(3)

    def getsize(self, path: Path) -> int:
        self.asking.wait(60)
        return super().getsize(path)


def test_a_storage_far_away_is_asked_for_many_sizes_at_a_time() -> None:
    memory = Together(InMemory())
    for name in ("a", "b"):
        memory.write(Path("/run/step-1", name), b"123")
    sizes = BackendCheckpointStorage(memory).file_sizes("/run/step-1", iter(["a", "gone", "b"]))
    assert list(sizes.items()) == [("a", 3), ("b", 3)]


class KilledAt(Disk):
    """Whoever deletes the file ``name`` is killed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        if os.path.basename(path) == self._name:
            raise KeyboardInterrupt
        super().unlink(path, dir_fd=dir_fd)


@pytest.mark.parametrize("marker", MARKERS)
def test_a_deletion_cut_short_leaves_no_complete_checkpoint(
    marker: str, synced: Syncs, storage: DurableStorage, tmp_path: Path
) -> None:
    path = tmp_path / "step-1"
    path.mkdir()
    for name in (marker, "model_0.pt"):
        (path / name).touch()
    with disk.using(KilledAt("model_0.pt")), pytest.raises(KeyboardInterrupt):
        BackendCheckpointStorage(storage).remove(str(path))
    # What makes it complete has become what says that it is not, and that is on the disk.
    ((folder, left),) = synced.synced
    assert folder == "step-1" and sorted(left) == sorted(os.listdir(path)) == [
        DELETED,
        "model_0.pt",
    ]
    with disk.using(KilledAt(DELETED)), pytest.raises(KeyboardInterrupt):
        BackendCheckpointStorage(storage).remove(str(path))
    assert os.listdir(path) == [DELETED], "it goes last"
    BackendCheckpointStorage(storage).remove(str(path))
    assert not path.exists()


def test_a_deletion_that_does_not_get_through_is_an_error(
    storage: DurableStorage, tmp_path: Path
) -> None:
    (tmp_path / "step-1/inside").mkdir(parents=True)
    with patch.object(os, "rmdir", side_effect=PermissionError("protected")):
        with pytest.raises(PermissionError, match="protected"):
            BackendCheckpointStorage(storage).remove(str(tmp_path / "step-1"))


def test_of_a_link_only_the_link_goes(storage: DurableStorage, tmp_path: Path) -> None:
    target, link = tmp_path / "elsewhere/step-1", tmp_path / "step-1"
    target.mkdir(parents=True)
    (target / MARKERS[1]).write_text("kept")
    link.symlink_to("elsewhere/step-1")
    ours = BackendCheckpointStorage(storage)
    assert ours.isdir(str(link)) and ours.isfile(f"{link}/{MARKERS[1]}")
    ours.move(str(link), f"{tmp_path}/aside/again/step-1")
    moved = tmp_path / "aside/again/step-1"
    # It would lead nowhere if it were still relative.
    assert not link.exists() and (moved / MARKERS[1]).read_text() == "kept"
    ours.remove(str(moved))
    assert not moved.is_symlink() and (target / MARKERS[1]).read_text() == "kept"


def test_a_directory_is_moved_below_a_new_folder_and_measured_whole(
    storage: DurableStorage, tmp_path: Path
) -> None:
    (tmp_path / "step-1/inside").mkdir(parents=True)
    (tmp_path / "step-1/a").write_bytes(b"123")
    (tmp_path / "step-1/inside/b").write_bytes(b"4567")
    ours = BackendCheckpointStorage(storage)
    ours.move(f"{tmp_path}/step-1", f"{tmp_path}/aside/step-1")
    assert not ours.isdir(f"{tmp_path}/step-1")
    assert ours.size_bytes(f"{tmp_path}/aside/step-1") == 7
    assert ours.size_bytes(f"{tmp_path}/aside/step-1/inside/b") == 4
    with pytest.raises(FileNotFoundError):
        ours.size_bytes(f"{tmp_path}/gone")
    assert sorted(ours.listdir(f"{tmp_path}/aside/step-1")) == ["a", "inside"]


def test_a_name_on_another_disk_and_a_file_on_the_way_are_told_as_what_they_are(
    storage: DurableStorage, tmp_path: Path
) -> None:
    class Apart(Disk):
        def rename(self, src: str, dst: str) -> None:
            raise OSError(errno.EXDEV, "Invalid cross-device link")

    (tmp_path / "step-1").mkdir()
    (tmp_path / "file").touch()
    with disk.using(Apart()), pytest.raises(OSError, match="on another disk.*Let all folders"):
        storage.rename(tmp_path / "step-1", tmp_path / "superseded")
    with pytest.raises(NotADirectoryError, match="Not a directory"):
        storage.rename(tmp_path / "file/step-1", tmp_path / "step-1")


def test_names_in_folders_inside_are_durable_before_a_directory_has_its_name(
    storage: DurableStorage, tmp_path: Path
) -> None:
    (tmp_path / "tmp_step-1/a/b").mkdir(parents=True)
    noting = NotingDisk(tmp_path)
    with disk.using(noting):
        storage.rename(tmp_path / "tmp_step-1", tmp_path / "step-1")
    assert noting.noted == [
        "sync_directory tmp_step-1/a/b",
        "sync_directory tmp_step-1/a",
        "sync_directory tmp_step-1",
        "rename tmp_step-1 step-1",
        "sync_directory .",
    ]
