"""The staged copy is of now and of its own; the bytes are durable before the marker names them."""

import errno
import gc
import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard
from torchtitan.components.checkpointer.dcp_writer import (
    CommittingFileSystem,
    CopyingStager,
    DurableFileSystemWriter,
)
from torchtitan.components.checkpointer.errors import cause_of
from torchtitan.components.checkpointer.integrity.manifest import Head, head_of
from torchtitan.tools import disk

from tests.unit_tests.noting_disk import NotingDisk


def test_nothing_is_written_over_a_file_that_another_run_has_made_meanwhile(
    tmp_path: Path,
) -> None:
    done = tmp_path / "__1_0.distcp"
    done.write_bytes(b"acknowledged")
    late = DurableFileSystemWriter(str(tmp_path))
    with (
        pytest.raises(FileExistsError, match="by another run.*__1_0"),
        late.fs.create_stream(done, "wb"),
    ):
        raise AssertionError("it was opened")
    assert done.read_bytes() == b"acknowledged"


def storages(state: dict[str, Any]) -> dict[str, int]:
    return {name: value.untyped_storage().data_ptr() for name, value in state.items()}


def test_memory_is_kept_from_one_save_to_the_next_and_holds_the_values_of_now() -> None:
    stager, live = CopyingStager(), {"x": torch.zeros(1000), "n": torch.tensor(3)}
    first = stager.stage(live)
    kept = storages(first)
    live["x"].fill_(2.0)
    assert first["x"].sum() == 0
    del first
    second = stager.stage(live)
    assert storages(second) == kept and second["x"].sum() == 2000
    live["x"].fill_(9.0)
    assert second["x"].sum() == 2000
    stager.close()


def test_a_tensor_that_was_replaced_is_never_staged_from_the_old_copy() -> None:
    stager, live = CopyingStager(), {"x": torch.zeros(100)}
    stager.stage(live)
    for value in range(1, 50):
        # The allocator hands out the memory of the one before again.
        live["x"] = torch.full((100,), float(value))
        assert stager.stage(live)["x"].unique().tolist() == [value]
    stager.close()


def test_copies_of_tensors_that_are_gone_are_given_back() -> None:
    stager = CopyingStager()
    for size in range(1, 40):
        stager.stage({"x": torch.zeros(size)})
    gc.collect()
    assert len(stager._stager._state_dict_stager._cached_storage_mapping) <= 1
    stager.close()


def test_entries_come_go_and_change_their_shape_and_dtype() -> None:
    stager, x = CopyingStager(), torch.arange(6.0)
    for live in (
        {"x": x},
        {"x": x.view(2, 3), "y": torch.ones(2)},
        {"y": torch.ones(4, dtype=torch.int64)},
        {"x": x[::2], "y": x[3:]},
    ):
        staged = stager.stage(live)
        assert staged.keys() == live.keys()
        assert all(torch.equal(staged[name], live[name]) for name in live)
        assert not set(storages(staged).values()) & set(storages(live).values())
    stager.close()


def test_tied_weights_stay_tied_and_are_copied_once() -> None:
    stager, weight = CopyingStager(), torch.ones(8)
    staged = stager.stage({"a": weight, "b": weight, "view": weight[2:]})
    assert len(set(storages(staged).values())) == 1
    other = torch.zeros(8)
    staged = stager.stage({"a": weight, "b": other})
    assert staged["a"].sum() == 8 and staged["b"].sum() == 0
    stager.close()


def test_plain_values_are_copied_to_the_last_list() -> None:
    stager, deep, last = CopyingStager(), {"deep": 3}, [2]
    inner = {"rows": [1, [2, deep]], "pair": (1, last)}
    staged = stager.stage({"data": inner})
    deep["deep"] = 99
    last.append(99)
    assert staged["data"] == {"rows": [1, [2, {"deep": 3}]], "pair": (1, [2])}
    stager.close()


@pytest.mark.usefixtures("one_rank")
def test_sharded_tensors_get_memory_of_their_own_and_keep_their_mesh() -> None:
    mesh = init_device_mesh("cpu", (1,))
    live = {"w": distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])}
    stager = CopyingStager()
    for value in (1.0, 2.0):
        live["w"].to_local().fill_(value)
        staged = stager.stage(live)
        live["w"].to_local().fill_(-1.0)
        assert staged["w"].to_local().unique().tolist() == [value]
        assert staged["w"].placements == live["w"].placements
        assert staged["w"].device_mesh == mesh
    stager.close()


def test_parameters_that_need_gradients_are_staged_without_them() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    staged = CopyingStager().stage({"p": parameter})
    assert torch.equal(staged["p"], torch.ones(2))


def events_of_a_save(path: Path) -> list[str]:
    """What one save does to the disk, in order, with paths below ``path``."""
    writer = DurableFileSystemWriter(str(path / "new/checkpoint/step-1"))
    noting = NotingDisk(path)
    with disk.using(noting):
        torch_dcp.save(
            {"w": torch.ones(3)}, storage_writer=writer, checkpoint_id=writer.path, no_dist=True
        )
    return noting.noted


@pytest.mark.usefixtures("is_durable")
def test_every_name_is_durable_before_the_one_that_relies_on_it(tmp_path: Path) -> None:
    step = "new/checkpoint/step-1"
    events = events_of_a_save(tmp_path)
    order = [
        "mkdir new",
        "sync_directory .",  # names new
        "mkdir new/checkpoint",
        "sync_directory new",  # names checkpoint
        f"mkdir {step}",
        "sync_directory new/checkpoint",  # names step-1
        f"create {step}/__0_0.distcp",
        f"sync {step}/__0_0.distcp",
        f"sync_directory {step}",  # names the data file
        f"create {step}/.metadata.tmp",
        f"sync {step}/.metadata.tmp",
        f"rename {step}/.metadata.tmp {step}/.metadata",
        f"sync_directory {step}",  # names .metadata
        "sync_directory new/checkpoint",
    ]
    assert events == order


@pytest.mark.parametrize("head", [None, head_of(1, "full", "dcp", 1, None)])
def test_all_of_each_file_is_written_when_it_is_synced(
    tmp_path: Path, head: Head | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = dict[str, int](), os.fsync

    def noted(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isfile(path):
            synced[os.path.basename(path).removesuffix(".tmp")] = os.fstat(descriptor).st_size
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    writer = DurableFileSystemWriter(str(tmp_path), head=head)
    state = {"w": torch.ones(3), "steps": list(range(100))}
    torch_dcp.save(state, storage_writer=writer, checkpoint_id=writer.path, no_dist=True)
    assert synced == {path.name: path.stat().st_size for path in tmp_path.iterdir()}


def test_a_writer_without_a_kept_stager_stages_as_dcp_does(tmp_path: Path) -> None:
    live = {"w": torch.ones(3)}
    staged = DurableFileSystemWriter(str(tmp_path)).stage(live)
    live["w"].fill_(0)
    assert staged["w"].tolist() == [1, 1, 1]


def test_the_error_of_the_disk_is_raised_and_not_what_torch_makes_of_it(tmp_path: Path) -> None:
    class FullDisk(DurableFileSystemWriter):
        def __init__(self, path: str) -> None:
            super().__init__(path)
            # The seam below torch's own writer, where a full disk shows itself.
            self.fs = _FullFileSystem()

    with pytest.raises(torch_dcp.CheckpointException) as failed:
        torch_dcp.save({"x": torch.zeros(10_000)}, storage_writer=FullDisk(str(tmp_path / "a")))
    assert "No space left" in cause_of(failed.value)


class _FullFileSystem(CommittingFileSystem):
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any]:
        with super().create_stream(path, mode) as stream:
            yield _FullStream(stream)


class _FullStream(io.RawIOBase):
    """Takes a first kilobyte, as a disk that becomes full does; torch then fails while closing."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._left = 1024

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self._stream.write(data))

    def tell(self) -> int:
        return int(self._stream.tell())

    def fileno(self) -> int:
        return int(self._stream.fileno())
