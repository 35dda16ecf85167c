"""The manifest that a save through DCP leaves: what it says, and that it comes last."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torchtitan.components.checkpointer import dcp_writer
from torchtitan.components.checkpointer.dcp_writer import DurableFileSystemWriter
from torchtitan.components.checkpointer.errors import cause_of, CheckpointSaveError
from torchtitan.components.checkpointer.integrity.digests import BLOCK_BYTES
from torchtitan.components.checkpointer.integrity.manifest import head_of, MANIFEST, RunDescription
from torchtitan.tools import disk
from torchtitan.tools.disk import Disk

from tests.unit_tests.components.checkpointer.recomputed import manifest_in, require_true
from tests.unit_tests.components.checkpointer.runs import build_run
from tests.unit_tests.components.checkpointer.ways import ASYNC, DISABLED, over, Way
from tests.unit_tests.noting_disk import NotingDisk

HEAD = head_of(7, "full", "dcp", 1, None)


def save(path: Path, state: dict[str, Any], writer: DurableFileSystemWriter | None = None) -> None:
    writer = writer or DurableFileSystemWriter(str(path), head=HEAD)
    torch_dcp.save(state, storage_writer=writer, checkpoint_id=str(path), no_dist=True)


@over(DISABLED, ASYNC)
@pytest.mark.usefixtures("one_rank")
def test_it_lists_every_file_but_itself_and_says_what_the_checkpoint_is(
    tmp_path: Path, way: Way
) -> None:
    run = build_run(tmp_path, **way.settings)
    run.manager.describe_run(RunDescription({"lr": 0.01}, {"dp_shard": 1}))
    run.train(3, last_step=3)
    run.manager.close()
    for step in (1, 2, 3):
        head = require_true(tmp_path / f"checkpoint/step-{step}").head
        kind = "model_only" if step == 3 else "full"
        assert (head.step, head.kind, head.backend, head.world_size) == (step, kind, "dcp", 1)
        assert (head.config, head.parallel) == ({"lr": 0.01}, {"dp_shard": 1})
        assert head.versions["torch"] == torch.__version__


@pytest.mark.usefixtures("one_rank")
def test_a_last_save_of_everything_is_a_full_one(tmp_path: Path) -> None:
    run = build_run(tmp_path, last_save_model_only=False)
    run.train(1, last_step=1)
    run.manager.close()
    assert manifest_in(tmp_path / "checkpoint/step-1").head.kind == "full"


def test_files_of_many_blocks_have_a_digest_for_each(tmp_path: Path) -> None:
    # Larger than a block, of no block's size, and small ones around it.
    state = {"large": torch.rand(5 * BLOCK_BYTES // 8 + 3), "small": torch.ones(2), "n": {"a": 1}}
    save(tmp_path / "step-7", state)
    files = require_true(tmp_path / "step-7").files
    assert files["__0_0.distcp"].num_blocks == 3


def test_files_of_several_threads_are_all_listed(tmp_path: Path) -> None:
    writer = DurableFileSystemWriter(str(tmp_path / "step-7"), head=HEAD)
    writer.thread_count = 3
    save(tmp_path / "step-7", {str(i): torch.full((9,), i) for i in range(10)}, writer)
    assert len(require_true(tmp_path / "step-7").files) == 4


@pytest.mark.usefixtures("one_rank")
def test_what_is_no_step_gets_none(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    path = tmp_path / "elsewhere"
    run.manager.dcp_save({"w": torch.ones(2)}, str(path), run.manager.async_mode)
    run.manager.close()
    assert sorted(os.listdir(path)) == [".metadata", "__0_0.distcp"]


def events_of_a_save(path: Path) -> list[str]:
    """What one save into the directory ``path`` does to the disk, in order."""
    noting = NotingDisk(path.parent)
    with disk.using(noting):
        save(path, {"w": torch.ones(3)})
    return noting.noted


COMMIT = [
    "create step-7/__0_0.distcp",
    "sync step-7/__0_0.distcp",
    "sync_directory step-7",
    "create step-7/.metadata.tmp",
    "sync step-7/.metadata.tmp",
    "rename step-7/.metadata.tmp step-7/.metadata",
    "sync_directory step-7",
    "sync_directory .",
    "create step-7/manifest.json.tmp",
    "sync step-7/manifest.json.tmp",
    "rename step-7/manifest.json.tmp step-7/manifest.json",
    "sync_directory step-7",
]


@pytest.mark.usefixtures("is_durable")
def test_it_is_written_when_all_it_speaks_of_is_durable(tmp_path: Path) -> None:
    assert events_of_a_save(tmp_path / "step-7") == ["mkdir step-7", "sync_directory .", *COMMIT]


def test_it_goes_first_when_another_checkpoint_is_written_over(tmp_path: Path) -> None:
    save(tmp_path / "step-7", {"w": torch.zeros(3)})
    gone = [
        "unlink step-7/manifest.json",
        "sync_directory step-7",
        "unlink step-7/.metadata",
        "sync_directory step-7",
        "unlink step-7/__0_0.distcp",
        "sync_directory step-7",
    ]
    assert events_of_a_save(tmp_path / "step-7") == gone + COMMIT
    require_true(tmp_path / "step-7")


def test_nothing_is_written_over_once_the_folder_is_another_runs(tmp_path: Path) -> None:
    save(tmp_path / "step-7", {"w": torch.zeros(3)})
    before = sorted(os.listdir(tmp_path / "step-7"))
    late = DurableFileSystemWriter(str(tmp_path / "step-7"))

    def refuse() -> None:
        raise RuntimeError("it is another run's")

    late.commit_only_if(refuse)
    with pytest.raises(torch_dcp.CheckpointException, match="another run's"):
        save(tmp_path / "step-7", {"w": torch.ones(3)}, late)
    assert sorted(os.listdir(tmp_path / "step-7")) == before
    require_true(tmp_path / "step-7")


def test_what_is_written_over_is_no_checkpoint_while_that_lasts(tmp_path: Path) -> None:
    class Failing(DurableFileSystemWriter):
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
            raise OSError(28, "No space left on device")

    save(tmp_path / "step-7", {"w": torch.zeros(3)})
    with pytest.raises(torch_dcp.CheckpointException):
        save(tmp_path / "step-7", {"w": torch.ones(3)}, Failing(str(tmp_path / "step-7")))
    assert os.listdir(tmp_path / "step-7") == []


class Naming(Disk):
    """Calls ``act`` instead of giving a manifest its name."""

    def __init__(self, act: Callable[[str, str], None]) -> None:
        self._act = act

    def rename(self, src: str, dst: str) -> None:
        act = self._act if dst.endswith(MANIFEST) else super().rename
        act(src, dst)


@pytest.mark.usefixtures("one_rank")
def test_a_run_that_dies_just_before_it_leaves_a_checkpoint_that_loads_unverified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = build_run(tmp_path / "a")
    run.train(1)

    def die(source: str, target: str) -> None:
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        os.rename(source, target)

    with disk.using(Naming(die)):
        run.train(2)
    saved = run.snapshot()
    run.manager.close()
    left = [".metadata", "__0_0.distcp", "manifest.json.tmp"]
    assert sorted(os.listdir(tmp_path / "b/checkpoint/step-2")) == left
    other = build_run(tmp_path / "b", seed=5)
    assert other.manager.load() and other.snapshot() == saved
    assert "step-2 has no manifest.json" in caplog.text and "unverified" in caplog.text
    other.manager.close()


@pytest.mark.usefixtures("one_rank")
def test_a_save_that_fails_to_write_it_does_not_count(tmp_path: Path) -> None:
    run = build_run(tmp_path)

    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    with disk.using(Naming(full)):
        with pytest.raises(CheckpointSaveError, match="No space left"):
            run.train(1)
    assert ".metadata" not in os.listdir(tmp_path / "checkpoint/step-1")
    assert build_run(tmp_path).manager.load() is False
    run.train(2)
    require_true(tmp_path / "checkpoint/step-2")
    run.manager.close()


@pytest.mark.parametrize("error", [ValueError("no JSON"), MemoryError(), KeyboardInterrupt()])
def test_whatever_prevents_it_the_save_does_not_count(tmp_path: Path, error: Any) -> None:
    with patch.object(dcp_writer, "render", side_effect=error):
        with pytest.raises((torch_dcp.CheckpointException, type(error))):
            save(tmp_path / "step-7", {"w": torch.ones(3)})
    assert os.listdir(tmp_path / "step-7") == ["__0_0.distcp"]


def renamed_in_spite_of(error: BaseException) -> Any:
    """On a disk where the directory of a manifest that has its name cannot be synced."""

    def rename(source: str, target: str) -> None:
        os.rename(source, target)
        raise error

    return disk.using(Naming(rename))


def test_it_does_not_stay_behind_when_its_name_cannot_be_made_durable(tmp_path: Path) -> None:
    with renamed_in_spite_of(OSError(5, "Input/output error")):
        with pytest.raises(torch_dcp.CheckpointException, match="Input/output"):
            save(tmp_path / "step-7", {"w": torch.ones(3)})
    assert os.listdir(tmp_path / "step-7") == ["__0_0.distcp"]


def test_a_disk_that_syncs_no_name_any_more_is_left_without_a_checkpoint(tmp_path: Path) -> None:
    real, real_rename, renamed = os.fsync, os.rename, list[str]()

    def move(source: Any, target: Any) -> None:
        real_rename(source, target)
        renamed.append(os.path.basename(target))

    def fsync(descriptor: int) -> None:
        if renamed and os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(5, "Input/output error")
        real(descriptor)

    with patch.object(os, "fsync", fsync), patch.object(os, "rename", move):
        with pytest.raises(torch_dcp.CheckpointException, match="Input/output"):
            save(tmp_path / "step-7", {"w": torch.ones(3)})
    assert renamed == [".metadata"] and os.listdir(tmp_path / "step-7") == ["__0_0.distcp"]


def test_an_orphan_takes_nothing_away_that_may_be_of_another_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer, asked = DurableFileSystemWriter(str(tmp_path / "step-7"), head=HEAD), []

    def require_trainer() -> None:
        asked.append(sorted(os.listdir(tmp_path / "step-7")))
        if len(asked) > 2:
            raise RuntimeError("the trainer has ended")

    writer.commit_only_if(require_trainer)
    with renamed_in_spite_of(OSError(5, "Input/output error")):
        with pytest.raises(torch_dcp.CheckpointException, match="Input/output"):
            save(tmp_path / "step-7", {"w": torch.ones(3)}, writer)
    assert len(asked) == 3  # before anything is written over, before the name, and now
    require_true(tmp_path / "step-7")
    assert "the trainer has ended" in caplog.text and "step-7" in caplog.text


class Callback:
    """An object that a load would have to run something for."""

    def __reduce__(self) -> Any:
        return os.getcwd, ()


@pytest.mark.parametrize("value", [Callback(), [1, {"deep": Callback()}]], ids=["bare", "nested"])
def test_an_object_that_no_load_would_take_is_refused_by_its_key(
    tmp_path: Path, value: Any
) -> None:
    state = {"w": torch.ones(3), "reader": {"row": 1, "call": (value,), "more": value}}
    with pytest.raises(torch_dcp.CheckpointException) as failed:
        save(tmp_path / "step-7", state)
    text = cause_of(failed.value)
    assert "reader.call" in text and "reader.more" in text and "getcwd" in text
    assert os.listdir(tmp_path / "step-7") == []


def test_a_tensor_of_a_class_that_no_load_would_take_is_refused_too(tmp_path: Path) -> None:
    class Odd(torch.Tensor):
        pass

    with pytest.raises(torch_dcp.CheckpointException) as failed:
        save(tmp_path / "step-7", {"w": torch.ones(3).as_subclass(Odd)})
    assert "w cannot be saved" in cause_of(failed.value)
