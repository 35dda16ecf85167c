"""The files of a rank get their name when all ranks have written; whatever fails is told to all."""

import errno
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_checkpointing.checkpoint_base import CheckpointItem, CheckpointWriteInfo
from torch_checkpointing.checkpoint_layout import JsonSerialization, LayoutInfo, RawSerialization
from torch_checkpointing.checkpoint_writer import (
    CallbackArgs,
    CheckpointWriterArgs,
    CheckpointWriterConfig,
)
from torch_checkpointing.types import RankInfo
from torchtitan.components.checkpointer.integrity.manifest import head_of, RunDescription
from torchtitan.components.checkpointer.pinned.meeting import OtherRankFailedError
from torchtitan.components.checkpointer.pinned.serving import require_trainer, TrainerGoneError
from torchtitan.components.checkpointer.tc.commit import Commit, Files, StoreCommit
from torchtitan.components.checkpointer.tc.storage import DurableStorage, DurableStorageConfig
from torchtitan.components.checkpointer.tc.writer import Writer
from torchtitan.tools.disk import using

from tests.crash.faults import Fault, Faults, FaultyDisk, How, Place
from tests.crash.operations import Kind
from tests.unit_tests.components.checkpointer.recomputed import require_true
from tests.unit_tests.components.checkpointer.tc.stand_ins import FullDisk, Watched


def writer_args(
    rank: int = 0, world_size: int = 1, storage: DurableStorageConfig | None = None
) -> CheckpointWriterArgs:
    return CheckpointWriterArgs(
        config=CheckpointWriterConfig(),
        rank_info=RankInfo(rank, world_size, rank, world_size),
        storage_config=storage or DurableStorageConfig(),
    )


def content(rank: int = 0) -> CheckpointWriteInfo:
    item = CheckpointItem(value={"w": torch.full((2,), float(rank))})
    return CheckpointWriteInfo({"model": item}, serialized_distributed_metadata=b"metadata")


class Noted(Commit):
    """The commit of a rank that is alone with what the test lets the others say."""

    def __init__(self, folder: Path, failing: str = "") -> None:
        super().__init__(RankInfo(0, 2, 0, 2))
        self.folder, self.failing = folder, failing
        self.seen: list[tuple[str, list[str]]] = []

    def _note(self, what: str) -> None:
        self.seen.append((what, sorted(os.listdir(self.folder))))
        if what == self.failing:
            raise OtherRankFailedError("rank 1: OSError: full")

    def agree(self, files: Files) -> Files:
        self._note("agree")
        return files

    def publish(self) -> None:
        self._note("publish")

    def fail(self, error: BaseException) -> None:
        self._note(f"fail with {type(error).__name__}")

    def _meet(self, stop: Any, failure: str | None) -> str | None:
        raise AssertionError("its callers are replaced")

    def _of_all_ranks(self) -> list[Files]:
        raise AssertionError("its caller is replaced")


def test_the_name_is_given_after_all_have_written_and_told_before_it_counts(
    tmp_path: Path,
) -> None:
    commit = Noted(tmp_path)
    asked: list[list[str]] = []
    writer = Writer(writer_args(), lambda: commit, lambda: asked.append(os.listdir(tmp_path)))
    writer.write(str(tmp_path / "step-1"), content())
    assert commit.seen == [("agree", ["tmp_step-1"]), ("publish", ["step-1"])]
    assert asked == [["tmp_step-1"]]
    assert sorted(os.listdir(tmp_path / "step-1")) == ["metadata.pkl", "model_0.pt"]


def test_each_save_has_a_commit_of_its_own(tmp_path: Path) -> None:
    commits: list[Noted] = []

    def new() -> Noted:
        commits.append(Noted(tmp_path, failing="" if commits else "agree"))
        return commits[-1]

    writer = Writer(writer_args(), new)
    with pytest.raises(OtherRankFailedError):
        writer.write(str(tmp_path / "step-1"), content())
    writer.write(str(tmp_path / "step-2"), content())
    assert [[what for what, _ in commit.seen] for commit in commits] == [
        ["agree", "fail with OtherRankFailedError"],
        ["agree", "publish"],
    ]
    assert sorted(os.listdir(tmp_path)) == ["step-2", "tmp_step-1"]


def test_a_trainer_that_has_ended_prevents_the_name_at_the_last_moment(tmp_path: Path) -> None:
    commit = Noted(tmp_path)
    writer = Writer(writer_args(), lambda: commit, lambda: require_trainer(os.getpid()))
    with pytest.raises(TrainerGoneError):
        writer.write(str(tmp_path / "step-1"), content())
    assert [what for what, _ in commit.seen] == ["agree", "fail with TrainerGoneError"]
    assert os.listdir(tmp_path) == ["tmp_step-1"]


def test_a_name_that_is_taken_is_a_failure_of_all_and_nothing_is_overwritten(
    tmp_path: Path,
) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1/kept").touch()
    commit = Noted(tmp_path)
    with pytest.raises(FileExistsError):
        Writer(writer_args(), lambda: commit).write(str(tmp_path / "step-1"), content())
    assert [what for what, _ in commit.seen] == ["agree", "fail with FileExistsError"]
    assert os.listdir(tmp_path / "step-1") == ["kept"]


def test_without_a_barrier_nobody_is_asked_and_it_is_written_in_place(tmp_path: Path) -> None:
    args = writer_args()
    alone = replace(args.config, barrier_config=None, write_to_temp_dir=False)
    writer = Writer(replace(args, config=alone), lambda: pytest.fail("nobody to agree with"))
    writer.write(str(tmp_path / "step-1"), content())
    assert sorted(os.listdir(tmp_path / "step-1")) == ["metadata.pkl", "model_0.pt"]


def test_a_file_is_no_larger_than_what_its_tensors_show(tmp_path: Path) -> None:
    item = CheckpointItem(value={"row": torch.zeros(1000, 100)[3]})
    writer = Writer(writer_args(), lambda: Noted(tmp_path))
    writer.write(str(tmp_path / "step-1"), CheckpointWriteInfo({"model": item}))
    assert (tmp_path / "step-1/model_0.pt").stat().st_size < 10_000


@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_writers_of_three_ranks_name_a_checkpoint_that_is_whole_or_none(
    failing: int | None, tmp_path: Path
) -> None:
    store, ends = dist.HashStore(), dict[int, Any]()

    def write(rank: int) -> None:
        storage = FullDisk() if rank == failing else DurableStorageConfig()
        args = writer_args(rank, 3, storage)
        writer = Writer(args, lambda: StoreCommit(args.rank_info, store, 1))
        try:
            writer.write(str(tmp_path / "step-1"), content(rank))
            ends[rank] = sorted(os.listdir(tmp_path / "step-1"))
        except Exception as error:
            ends[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    whole = ["metadata.pkl", *(f"model_{rank}.pt" for rank in range(3))]
    full = "OSError: [Errno 28] No space left on device"
    told = f"OtherRankFailedError: rank {failing}: {full}"
    expected = {rank: full if rank == failing else told for rank in range(3)}
    assert ends == (dict.fromkeys(range(3), whole) if failing is None else expected)
    assert os.listdir(tmp_path) == (["step-1"] if failing is None else ["tmp_step-1"])


def test_a_disk_that_is_full_is_called_so_wherever_in_a_file_it_is(tmp_path: Path) -> None:
    def write(folder: Path, number: int) -> Faults:
        folder.mkdir()
        at = Place(Kind.WRITE, "tmp_step-1/model_0.pt", number)
        faults = Faults(Fault(at, How.REFUSED, errno.ENOSPC))
        with using(FaultyDisk(str(folder), faults)):
            Writer(writer_args(), lambda: Noted(folder)).write(str(folder / "step-1"), content())
        return faults

    for number in range(1, 12):
        with pytest.raises(OSError, match="No space left on device"):
            write(tmp_path / str(number), number)
    assert not write(tmp_path / "later", 1000).has_come


def test_a_storage_that_travels_is_made_anew_where_it_is_needed() -> None:
    writer = Writer(writer_args(), lambda: pytest.fail())
    assert isinstance(writer._checked._storage, DurableStorage)


HEAD = head_of(1, "full", "torch_checkpointing", 1, RunDescription({"steps": 9}, {"dp": 1}))


def nested(rank: int = 0) -> CheckpointWriteInfo:
    """Items in files of several kinds and places."""
    layouts = {
        "model": None,
        "text": LayoutInfo("inside/text.json", JsonSerialization()),
        "raw": LayoutInfo("raw.bin", RawSerialization()),
    }
    values = {"model": {"w": torch.arange(2_000_000)}, "text": {"a": rank}, "raw": b"raw"}
    items = {key: CheckpointItem(value=values[key], layout=layouts[key]) for key in values}
    return CheckpointWriteInfo(items, serialized_distributed_metadata=b"metadata")


def test_the_manifest_is_the_last_file_before_the_name_and_tells_of_every_other_one(
    tmp_path: Path,
) -> None:
    storage = Watched()
    asked: list[list[str]] = []
    writer = Writer(
        writer_args(storage=storage),
        lambda: Noted(tmp_path),
        lambda: asked.append(sorted(os.listdir(tmp_path / "tmp_step-1"))),
        lambda: HEAD,
    )
    writer.write(str(tmp_path / "step-1"), nested())
    found = require_true(tmp_path / "step-1")
    assert found.head == HEAD
    assert found.files.keys() == {"inside/text.json", "metadata.pkl", "model_0.pt", "raw.bin"}
    made = [call for call in storage.calls if call[0] in ("stream_write", "write", "rename")]
    assert made[-3:] == [
        ("write", tmp_path / "tmp_step-1/metadata.pkl"),
        ("write", tmp_path / "tmp_step-1/manifest.json"),
        ("rename", tmp_path / "tmp_step-1"),
    ]
    # Whether it may be published is looked at when nothing but that is left to do.
    assert asked == [["inside", "manifest.json", "metadata.pkl", "model_0.pt", "raw.bin"]]


@pytest.mark.parametrize(("num_ranks", "block_bytes"), [(1, 2**18), (1000, 2**20)])
def test_a_tensor_of_many_blocks_has_shorter_ones_unless_there_are_as_many_ranks(
    tmp_path: Path, num_ranks: int, block_bytes: int
) -> None:
    args = writer_args(world_size=num_ranks)
    writer = Writer(args, lambda: Noted(tmp_path), find_head=lambda: HEAD)
    writer.write(str(tmp_path / "step-1"), nested())
    digest = require_true(tmp_path / "step-1").files["model_0.pt"]
    assert digest.block_bytes == block_bytes and digest.num_blocks > 10


def test_the_manifest_is_written_when_all_have_written_and_before_they_know_of_it(
    tmp_path: Path,
) -> None:
    commit = Noted(tmp_path / "tmp_step-1", failing="agree")
    writer = Writer(writer_args(), lambda: commit, find_head=lambda: HEAD)
    with pytest.raises(OtherRankFailedError):
        writer.write(str(tmp_path / "step-1"), content())
    assert commit.seen[0] == ("agree", ["metadata.pkl", "model_0.pt"])
    assert "manifest.json" not in os.listdir(tmp_path / "tmp_step-1")


def test_a_manifest_that_cannot_be_written_fails_all_and_no_name_is_given(tmp_path: Path) -> None:
    class NoRoom(DurableStorage):
        def write(self, path: Path, data: Any) -> None:
            if path.name == "manifest.json":
                raise OSError(28, "No space left on device")
            super().write(path, data)

    commit = Noted(tmp_path)
    writer = Writer(writer_args(), lambda: commit, find_head=lambda: HEAD)
    writer._checked._storage = NoRoom(DurableStorageConfig())
    with pytest.raises(OSError, match="No space left"):
        writer.write(str(tmp_path / "step-1"), content())
    assert [what for what, _ in commit.seen] == ["agree", "fail with OSError"]
    assert os.listdir(tmp_path) == ["tmp_step-1"]


def test_a_manifest_knows_nothing_of_a_save_that_failed_before(tmp_path: Path) -> None:
    commits = iter([Noted(tmp_path, failing="agree"), Noted(tmp_path)])
    writer = Writer(writer_args(), lambda: next(commits), find_head=lambda: HEAD)
    with pytest.raises(OtherRankFailedError):
        writer.write(str(tmp_path / "step-1"), nested())
    shutil.rmtree(tmp_path / "tmp_step-1")  # as the next attempt begins
    writer.write(str(tmp_path / "step-1"), content())
    assert require_true(tmp_path / "step-1").files.keys() == {"metadata.pkl", "model_0.pt"}


def test_written_in_place_the_manifest_still_comes_last(tmp_path: Path) -> None:
    storage = Watched()
    args = writer_args(storage=storage)
    alone = replace(args.config, barrier_config=None, write_to_temp_dir=False)
    writer = Writer(
        replace(args, config=alone), lambda: pytest.fail("nobody"), find_head=lambda: HEAD
    )
    writer.write(str(tmp_path / "step-1"), nested())
    require_true(tmp_path / "step-1")
    made = [path.name for name, path in storage.calls if "write" in name]
    assert made[-2:] == ["metadata.pkl", "manifest.json"]


def test_what_a_callback_writes_is_in_the_manifest(tmp_path: Path) -> None:
    def consolidate(given: CallbackArgs) -> None:
        folder = Path(given.path)
        given.storage.write(folder / "part", b"one")
        given.storage.rename(folder / "part", folder / "whole.bin")
        given.storage.delete(folder / "model_0.pt")

    args = replace(writer_args(), pre_finalize_callback=consolidate)
    writer = Writer(args, lambda: Noted(tmp_path), find_head=lambda: HEAD)
    writer.write(str(tmp_path / "step-1"), content())
    assert require_true(tmp_path / "step-1").files.keys() == {"metadata.pkl", "whole.bin"}


def test_three_ranks_leave_one_manifest_of_all_their_files(tmp_path: Path) -> None:
    store = dist.HashStore()

    def write(rank: int) -> None:
        args = writer_args(rank, 3)
        commit = StoreCommit(args.rank_info, store, 1)
        Writer(args, lambda: commit, find_head=lambda: HEAD).write(
            str(tmp_path / "step-1"), content(rank)
        )

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    files = require_true(tmp_path / "step-1").files
    assert files.keys() == {"metadata.pkl", *(f"model_{rank}.pt" for rank in range(3))}
