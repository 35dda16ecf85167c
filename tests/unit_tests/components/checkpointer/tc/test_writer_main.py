"""What the writer process does with a request; here done in the process of the test."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Shard
from torch_checkpointing.checkpoint_layout import LayoutInfo, TorchSerialization
from torch_checkpointing.checkpoint_writer import CheckpointWriterArgs, CheckpointWriterConfig
from torch_checkpointing.types import RankInfo
from torchtitan.components.checkpointer.pinned.arena import aligned, Arena
from torchtitan.components.checkpointer.pinned.meeting import Meeting, OtherRankFailedError
from torchtitan.components.checkpointer.pinned.messages import Request
from torchtitan.components.checkpointer.pinned.serving import TrainerGoneError
from torchtitan.components.checkpointer.pinned.snapshot import take
from torchtitan.components.checkpointer.tc import writer_main
from torchtitan.components.checkpointer.tc.commit import StoreCommit
from torchtitan.components.checkpointer.tc.storage import DurableStorageConfig
from torchtitan.components.checkpointer.tc.writer_main import Job
from torchtitan.observability import structured_logger as sl

ALONE = RankInfo(0, 1, 0, 1)
prepared: list[int] = []


def prepare(number: int) -> None:
    prepared.append(number)


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> Iterator[None]:
    step = sl.get_step()
    with patch.object(writer_main, "_initialised", False):
        yield
    prepared.clear()
    if step is not None:
        sl.set_step(step)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


def job(**changes: Any) -> Job:
    args = CheckpointWriterArgs(
        config=CheckpointWriterConfig(),
        rank_info=ALONE,
        storage_config=DurableStorageConfig(),
    )
    made = Job(
        args=args,
        layouts={"model": None},
        metadata=b"metadata",
        head=None,
        log_context={"step": 9},
        init=(prepare, (1,)),
    )
    return replace(made, **changes)


def requested(arena: Arena, state: dict[str, Any], path: Path, job: Job, attempt: int = 1) -> Any:
    """What a trainer sends after it has copied ``state``."""
    snapshot = take(state, lambda key, tensor: False, writer_main.describe_shard)
    offset = aligned(snapshot.size_bytes)
    arena.reserve(offset + len(snapshot.payload))
    for source, place in snapshot.at_once:
        arena.tensor(place.offset, place.shape, place.dtype).copy_(source)
    arena.write(offset, snapshot.payload)
    return Request(
        path=str(path),
        mapped_bytes=arena.size_bytes,
        payload_offset=offset,
        payload_bytes=len(snapshot.payload),
        job=pickle.dumps(job),
        attempt=attempt,
    )


def joined(rank: int = 0, world_size: int = 1) -> writer_main.Joined:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=30))
    return writer_main.Joined(store, RankInfo(rank, world_size, rank, world_size))


def test_what_was_staged_is_written_with_the_metadata_of_this_save(
    arena: Arena, tmp_path: Path
) -> None:
    state = {"model": {"w": torch.arange(3.0), "n": 1}, "train_state": {"step": 9}}
    layouts = {"model": None, "train_state": LayoutInfo("inside/s.pt", TorchSerialization())}
    request = requested(arena, state, tmp_path / "step-9", job(layouts=layouts))
    writer_main.save(request, arena, joined(), os.getppid())
    folder = tmp_path / "step-9"
    assert sorted(os.listdir(folder)) == ["inside", "metadata.pkl", "model_0.pt"]
    assert (folder / "metadata.pkl").read_bytes() == b"metadata"
    model = torch.load(folder / "model_0.pt", weights_only=False)
    assert model["w"].tolist() == [0.0, 1.0, 2.0] and model["n"] == 1
    assert torch.load(folder / "inside/s.pt", weights_only=False) == {"step": 9}
    assert sl.get_step() == 9


def test_the_process_is_prepared_once_and_the_step_is_that_of_each_save(
    arena: Arena, tmp_path: Path
) -> None:
    meeting = joined()
    for attempt in (1, 2):
        given = job(log_context={"step": attempt})
        request = requested(arena, {"model": {}}, tmp_path / f"step-{attempt}", given, attempt)
        writer_main.save(request, arena, meeting, os.getppid())
        assert sl.get_step() == attempt
    assert prepared == [1]


def test_a_shard_is_written_as_the_sharded_tensor_that_it_is_part_of(
    arena: Arena, tmp_path: Path, one_rank: None
) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    request = requested(arena, {"model": {"w": sharded}}, tmp_path / "step-1", job())
    writer_main.save(request, arena, joined(), os.getppid())
    found = torch.load(tmp_path / "step-1/model_0.pt", weights_only=False)["w"]
    assert isinstance(found, DTensor) and found.placements == (Shard(0),)
    assert found.to_local().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert found.device_mesh.mesh_dim_names == ("dp",)


_FIRST_SHARD = """
import io
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torchtitan.components.checkpointer.tc import writer_main


def run(**_):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    meta = TensorMeta(torch.Size([4]), (1,), torch.float32)
    torch.save(torch.ones(4), io.BytesIO())  # two small modules, whatever is written
    before = set(sys.modules)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
    torch.save(writer_main.build_shard(torch.ones(4), spec), io.BytesIO())
    print("imported", sorted(set(sys.modules) - before))


assert "torch._dynamo" not in sys.modules
writer_main.serving.run = run
writer_main.main()
"""


def test_to_build_and_write_the_first_shard_nothing_is_imported() -> None:
    command = [sys.executable, "-c", _FIRST_SHARD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "imported []" in done.stdout.splitlines(), done.stdout + done.stderr


def test_what_the_trainer_failed_with_is_the_failure_of_all_writers(
    arena: Arena, tmp_path: Path
) -> None:
    meeting = joined(world_size=2)
    request = requested(arena, {"model": {}}, tmp_path / "step-1", job())
    failed = replace(request, failure=OSError("no memory"))
    with pytest.raises(OSError, match="no memory"):
        writer_main.save(failed, arena, meeting, os.getppid())
    with pytest.raises(OtherRankFailedError, match="rank 0: OSError: no memory"):
        StoreCommit(RankInfo(1, 2, 1, 2), meeting.store, 1).agree({})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "damaged", [{"job": b"no pickle"}, {"payload_bytes": 3}, {"mapped_bytes": 1 << 40}]
)
def test_what_fails_before_the_first_file_is_told_to_the_others_too(
    arena: Arena, tmp_path: Path, damaged: dict[str, Any]
) -> None:
    meeting = joined(world_size=2)
    request = replace(requested(arena, {"model": {}}, tmp_path / "step-1", job()), **damaged)
    with pytest.raises(Exception) as caught:
        writer_main.save(request, arena, meeting, os.getppid())
    assert writer_main.is_agreed(caught.value)
    with pytest.raises(OtherRankFailedError, match=f"rank 0: {type(caught.value).__name__}"):
        StoreCommit(RankInfo(1, 2, 1, 2), meeting.store, 1).agree({})


def test_nothing_gets_its_name_when_the_trainer_is_gone(arena: Arena, tmp_path: Path) -> None:
    request = requested(arena, {"model": {"w": torch.ones(2)}}, tmp_path / "step-1", job())
    with pytest.raises(TrainerGoneError):
        writer_main.save(request, arena, joined(), trainer_pid=1 << 30)
    assert os.listdir(tmp_path) == ["tmp_step-1"]


def test_writers_of_several_ranks_know_theirs_from_where_they_met() -> None:
    meeting = Meeting(
        rank=0, world_size=1, host="", port=0, generation=1, timeout=timedelta(seconds=1)
    )
    found = writer_main.join(meeting)
    assert found.rank == ALONE and isinstance(found.store, dist.HashStore)


def test_an_interruption_is_no_failure_that_all_know_of() -> None:
    assert writer_main.is_agreed(OSError()) and not writer_main.is_agreed(KeyboardInterrupt())
    assert writer_main.PROGRAM == writer_main.__name__
