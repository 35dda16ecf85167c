"""Deleting a checkpoint: what makes it complete goes first, so that half of one never counts."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.checkpointer.dcp_index import DcpStorage, HF_MARKER, is_complete, MARKER
from torchtitan.components.checkpointer.storage import FilesystemStorage
from torchtitan.tools import filesystem


def checkpoint(folder: Path, marker: str) -> Path:
    path = folder / "step-10"
    path.mkdir()
    for name in ("__0_0.distcp", marker, "~last"):
        (path / name).write_bytes(b"bytes")
    return path


@pytest.mark.parametrize("marker", [MARKER, HF_MARKER])
def test_a_deletion_that_is_cut_short_leaves_nothing_that_looks_complete(
    tmp_path: Path, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path, marker)

    def killed(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    storage = DcpStorage()
    assert is_complete(storage, str(path))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            storage.remove(str(path))
    assert path.is_dir() and not is_complete(storage, str(path))
    storage.remove(str(path))
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
    monkeypatch.setattr(filesystem, "rmtree", lambda p: (order.append("delete"), delete(p)))
    DcpStorage().remove(str(path))
    assert order == ["sync False", "delete"]


def test_what_cannot_be_deleted_completely_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path, MARKER)
    monkeypatch.setattr(filesystem, "rmtree", lambda path: None)
    with pytest.raises(OSError, match="could not be deleted completely"):
        FilesystemStorage().remove(str(path))
