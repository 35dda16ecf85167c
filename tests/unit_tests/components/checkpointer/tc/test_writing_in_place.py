"""Where a rename is a copy of every file a save is written in place, and counts when all is there."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_checkpointing.checkpoint_base import CheckpointItem, CheckpointWriteInfo
from torch_checkpointing.checkpoint_writer import (
    CallbackArgs,
    CheckpointWriterArgs,
    CheckpointWriterConfig,
)
from torch_checkpointing.types import RankInfo
from torchtitan.components.checkpointer.integrity.manifest import head_of, RunDescription
from torchtitan.components.checkpointer.pinned.meeting import OtherRankFailedError
from torchtitan.components.checkpointer.tc.commit import StoreCommit
from torchtitan.components.checkpointer.tc.storage import DurableStorageConfig
from torchtitan.components.checkpointer.tc.writer import Writer
from torchtitan.tools.disk import Disk, using

from tests.unit_tests.components.checkpointer.recomputed import require_true
from tests.unit_tests.components.checkpointer.tc.memory_storage import InMemory, MemoryStorage, ROOT

HEAD = head_of(1, "full", "torch_checkpointing", 2, RunDescription())
STEP = ROOT / "step-1"


def args_of(rank: int, num_ranks: int, storage: Any) -> CheckpointWriterArgs:
    rank_info = RankInfo(rank, num_ranks, rank, num_ranks)
    return CheckpointWriterArgs(CheckpointWriterConfig(), rank_info, storage)


def content(rank: int) -> CheckpointWriteInfo:
    item = CheckpointItem(value={"w": torch.full((2,), float(rank))})
    return CheckpointWriteInfo({"model": item}, serialized_distributed_metadata=b"metadata")


def refuse() -> None:
    raise OSError(5, "Input/output error")


class Refusing(MemoryStorage):
    """Does not take files of one name."""

    def __init__(self, config: InMemory, name: str) -> None:
        super().__init__(config)
        self._name = name

    def write(self, path: Path, data: Any) -> None:
        if path.name == self._name:
            refuse()
        super().write(path, data)

    def stream_write(self, path: Path) -> Any:
        if path.name == self._name:
            refuse()
        return super().stream_write(path)


def save(memory: InMemory, refused: str = "") -> list[str]:
    """Save on two ranks; how it went on each of them."""
    store, ends = dist.HashStore(), ["", ""]

    def write(rank: int) -> None:
        args = args_of(rank, 2, memory)
        writer = Writer(args, lambda: StoreCommit(args.rank_info, store, 1), find_head=lambda: HEAD)
        writer._checked._storage = Refusing(memory, refused)
        try:
            writer.write(str(STEP), content(rank))
        except (OSError, OtherRankFailedError) as error:
            ends[rank] = str(error)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ends


def names(memory: InMemory) -> list[str]:
    assert all(path.parent == STEP for path in memory.files)
    return [path.name for path in memory.files]


def test_what_makes_it_complete_comes_last_and_after_the_files_of_all_ranks() -> None:
    memory = InMemory()
    assert save(memory) == ["", ""]
    assert sorted(names(memory)[:2]) == ["model_0.pt", "model_1.pt"]
    assert names(memory)[2:] == ["metadata.pkl", "manifest.json"]
    assert b"model_1.pt" in memory.files[STEP / "manifest.json"]
    assert b"metadata.pkl" in memory.files[STEP / "manifest.json"]


@pytest.mark.parametrize("refused", ["model_0.pt", "model_1.pt", "metadata.pkl", "manifest.json"])
def test_what_one_rank_cannot_write_leaves_nothing_that_counts(refused: str) -> None:
    memory = InMemory()
    for end in save(memory, refused):
        assert "Input/output error" in end
    assert not {"metadata.pkl", "manifest.json"} & set(names(memory))


class Unsynced(Disk):
    """Gives names, and then fails to make them durable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sync_directory(self, path: str) -> None:
        if path == str(self._folder) and (self._folder / "step-1").exists():
            refuse()
        super().sync_directory(path)


def write_without_syncing_names(folder: Path, **checks: Any) -> list[str]:
    args = replace(args_of(0, 1, DurableStorageConfig()))
    commit = StoreCommit(args.rank_info, dist.HashStore(), 1)
    writer = Writer(args, lambda: commit, find_head=lambda: HEAD, **checks)
    with using(Unsynced(folder)), pytest.raises(OSError, match="Input/output error"):
        writer.write(str(folder / "step-1"), content(0))
    return sorted(path.name for path in (folder / "step-1").iterdir())


def test_a_checkpoint_whose_name_could_not_be_synced_does_not_count(tmp_path: Path) -> None:
    assert write_without_syncing_names(tmp_path) == ["model_0.pt"]


def test_nothing_is_taken_back_once_another_run_may_have_the_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def ask() -> None:
        asked.append(1)
        if len(asked) > 1:
            raise PermissionError("another run has the folder")

    left = write_without_syncing_names(tmp_path, may_publish=ask)
    assert left == ["manifest.json", "metadata.pkl", "model_0.pt"]
    assert "what names it as complete stays there" in caplog.text


def test_what_lies_under_a_name_that_was_taken_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1/metadata.pkl").write_bytes(b"of somebody else")
    args = args_of(0, 1, DurableStorageConfig())
    commit = StoreCommit(args.rank_info, dist.HashStore(), 1)
    with pytest.raises(FileExistsError):
        Writer(args, lambda: commit).write(str(tmp_path / "step-1"), content(0))
    assert (tmp_path / "step-1/metadata.pkl").read_bytes() == b"of somebody else"


class Interrupted(Disk):
    """Ctrl-C comes when the checkpoint has just been given its name."""

    def rename(self, src: str, dst: str) -> None:
        super().rename(src, dst)
        if dst.endswith("step-1"):
            raise KeyboardInterrupt


def test_what_is_interrupted_once_it_is_complete_stays(tmp_path: Path) -> None:
    args = args_of(0, 1, DurableStorageConfig())
    commit = StoreCommit(args.rank_info, dist.HashStore(), 1)
    writer = Writer(args, lambda: commit, find_head=lambda: HEAD)
    with using(Interrupted()), pytest.raises(KeyboardInterrupt):
        writer.write(str(tmp_path / "step-1"), content(0))
    require_true(tmp_path / "step-1")


def write_and_fail_on_the_other_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[str]]:
    """A save of two ranks, one of which fails when both have written; what they say and what is there."""
    store, ends, has_failed = dist.HashStore(), ["", ""], threading.Event()
    publish = StoreCommit.publish

    def late(commit: StoreCommit) -> None:
        if commit._rank == 0:
            assert has_failed.wait(60)
        publish(commit)

    def write(rank: int) -> None:
        args = args_of(rank, 2, DurableStorageConfig())
        args = replace(args, finalize_callback=fail if rank == 1 else None)
        writer = Writer(args, lambda: StoreCommit(args.rank_info, store, 1), find_head=lambda: HEAD)
        try:
            writer.write(str(folder / "step-1"), content(rank))
        except (OSError, OtherRankFailedError) as error:
            ends[rank] = str(error)
        has_failed.set()

    monkeypatch.setattr(StoreCommit, "publish", late)
    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ends, sorted(path.name for path in (folder / "step-1").iterdir())


def fail(given: CallbackArgs) -> None:
    refuse()


def test_what_another_rank_fails_with_after_it_was_named_takes_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, left = write_and_fail_on_the_other_rank(tmp_path, monkeypatch)
    assert all("Input/output error" in end for end in ends)
    assert left == ["model_0.pt", "model_1.pt"]


@pytest.mark.parametrize("in_place", [True, False])
def test_alone_a_manifest_that_cannot_be_written_leaves_nothing_that_counts(in_place: bool) -> None:
    memory = InMemory()
    config = CheckpointWriterConfig(barrier_config=None, write_to_temp_dir=not in_place)
    args = replace(args_of(0, 1, memory), config=config)
    writer = Writer(args, lambda: pytest.fail("nobody"), find_head=lambda: HEAD)
    writer._checked._storage = Refusing(memory, "manifest.json")
    with pytest.raises(OSError, match="Input/output error"):
        writer.write(str(STEP), content(0))
    assert "metadata.pkl" not in names(memory)


def test_alone_it_is_published_with_its_manifest(tmp_path: Path) -> None:
    config = CheckpointWriterConfig(barrier_config=None)
    args = replace(args_of(0, 1, DurableStorageConfig()), config=config)
    writer = Writer(args, lambda: pytest.fail("nobody"), find_head=lambda: HEAD)
    writer.write(str(tmp_path / "step-1"), content(0))
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    require_true(tmp_path / "step-1")
