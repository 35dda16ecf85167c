"""Deleting a checkpoint: what makes it complete goes first, so that half of one never counts."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.checkpointer import dcp_index
from torchtitan.components.checkpointer.dcp_index import is_complete, kind_of, MARKER
from torchtitan.components.checkpointer.discovery import Kind
from torchtitan.components.checkpointer.formats import CheckpointFiles, DCP, finder, MARKERS
from torchtitan.components.checkpointer.integrity.manifest import MANIFEST
from torchtitan.components.checkpointer.storage import DELETED, FilesystemStorage
from torchtitan.tools import disk, filesystem
from torchtitan.tools.disk import Disk


def checkpoint(folder: Path, marker: str) -> Path:
    path = folder / "step-10"
    path.mkdir()
    for name in ("__0_0.distcp", marker, "~last"):
        (path / name).write_bytes(b"bytes")
    return path


@pytest.mark.parametrize("marker", [marker for marker in MARKERS if marker != MANIFEST])
def test_a_deletion_that_is_cut_short_leaves_nothing_that_looks_complete(
    tmp_path: Path, marker: str
) -> None:
    path = checkpoint(tmp_path, marker)
    (path / MANIFEST).write_bytes(b"bytes")

    class Killed(Disk):
        def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
            if os.path.basename(path) == DELETED:
                raise KeyboardInterrupt
            super().unlink(path, dir_fd=dir_fd)

    storage = CheckpointFiles()
    is_anyones = finder(DCP, storage, frozenset()).is_complete_for_any
    assert is_anyones(str(path))
    with disk.using(Killed()), pytest.raises(KeyboardInterrupt):
        storage.remove(str(path))
    assert not is_anyones(str(path)) and not (path / MANIFEST).exists()
    assert os.listdir(path) == [DELETED], "it is known for what it is"
    storage.remove(str(path))
    assert not path.exists()


@pytest.mark.parametrize("committed", [True, False])
def test_what_says_that_it_is_deleted_needs_no_space_and_goes_last(
    tmp_path: Path, committed: bool
) -> None:
    path = checkpoint(tmp_path, MARKER)
    first = path / (MANIFEST if committed else MARKER)
    first.write_bytes(b"what was the first")
    (path / "inside").mkdir()
    (path / "inside/file").touch()

    class Stubborn(Disk):
        def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
            if path.endswith("~last"):
                raise PermissionError
            super().unlink(path, dir_fd=dir_fd)

    # One file cannot be deleted: all others go, and what is left is still known.
    with disk.using(Stubborn()), pytest.raises(OSError, match="could not be deleted completely"):
        CheckpointFiles().remove(str(path))
    assert sorted(os.listdir(path)) == [DELETED, "~last"]
    assert (path / DELETED).read_bytes() == b"what was the first"
    CheckpointFiles().remove(str(path))
    assert not path.exists()


def test_the_loss_of_the_marker_is_durable_before_anything_else_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path, MARKER)
    order: list[str] = []
    sync, delete = filesystem.fsync_dir, filesystem.rmtree
    monkeypatch.setattr(
        filesystem,
        "fsync_dir",
        lambda folder: (order.append(f"sync {(path / MARKER).exists()}"), sync(folder)),
    )
    monkeypatch.setattr(
        filesystem, "rmtree", lambda p, **how: (order.append("delete"), delete(p, **how))
    )
    CheckpointFiles().remove(str(path))
    assert order == ["sync False", "delete"]


def test_what_cannot_be_deleted_completely_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path, MARKER)
    monkeypatch.setattr(filesystem, "rmtree", lambda path, **how: None)
    with pytest.raises(OSError, match="could not be deleted completely"):
        FilesystemStorage().remove(str(path))


def test_deleting_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    target = checkpoint(tmp_path / "other", MARKER)
    link = tmp_path / "step-9"
    link.symlink_to(target)
    CheckpointFiles().remove(str(link))
    assert not link.is_symlink() and is_complete(CheckpointFiles(), str(target))


def test_a_relative_link_that_is_moved_leads_to_the_same_place(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, MARKER)
    link = tmp_path / "step-9"
    link.symlink_to("step-10")
    moved = tmp_path / "superseded" / "step-9"
    CheckpointFiles().move(str(link), str(moved))
    assert not link.is_symlink()
    assert moved.resolve() == target.resolve() and is_complete(CheckpointFiles(), str(moved))


def test_what_cannot_be_looked_at_is_an_error_and_never_a_save_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path, MARKER)
    real = os.stat

    def stale(name: Any, *args: Any, **kwargs: Any) -> Any:
        if str(name).endswith(MARKER):
            raise OSError(errno.ESTALE, "Stale file handle", str(name))
        return real(name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stale)
        with pytest.raises(OSError, match="Stale file handle"):
            is_complete(CheckpointFiles(), str(path))
    assert is_complete(CheckpointFiles(), str(path))


def test_an_index_the_disk_does_not_give_now_is_no_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path, MARKER)
    assert kind_of(CheckpointFiles(), str(path), {"optimizer"}) is Kind.UNREADABLE

    def denied(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(dcp_index, "open", denied, raising=False)
    with pytest.raises(PermissionError):
        kind_of(CheckpointFiles(), str(path), {"optimizer"})
