"""What the writer process does with a request, carried out in this process."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torchtitan.components.checkpointer.dcp_writer import DurableFileSystemWriter
from torchtitan.components.checkpointer.errors import cause_of
from torchtitan.components.checkpointer.integrity.manifest import head_of
from torchtitan.components.checkpointer.pinned.arena import aligned, Arena
from torchtitan.components.checkpointer.pinned.dcp_shards import describe
from torchtitan.components.checkpointer.pinned.messages import Request
from torchtitan.components.checkpointer.pinned.snapshot import take
from torchtitan.components.checkpointer.pinned.writer_main import save

from tests.unit_tests.components.checkpointer.recomputed import require_true

pytestmark = pytest.mark.usefixtures("one_rank")


def request_for(path: Path, state: dict[str, Any], arena: Arena, **changes: Any) -> Request:
    snapshot = take(state, lambda key, tensor: True, describe)
    offset = aligned(snapshot.size_bytes)
    arena.reserve(offset + len(snapshot.payload))
    for source, place in snapshot.later:
        arena.tensor(place.offset, place.shape, place.dtype).copy_(source)
    arena.write(offset, snapshot.payload)
    fields: dict[str, Any] = {
        "path": str(path),
        "mapped_bytes": arena.size_bytes,
        "payload_offset": offset,
        "payload_bytes": len(snapshot.payload),
        "job": pickle.dumps(DurableFileSystemWriter(str(path))),
    }
    return Request(**{**fields, **changes})


def failure_of(request: Request, arena: Arena, trainer_pid: int) -> str:
    with pytest.raises(torch_dcp.CheckpointException) as failed:
        save(request, arena, dist.HashStore(), trainer_pid)
    return cause_of(failed.value)


def test_a_request_becomes_a_checkpoint(tmp_path: Path) -> None:
    arena = Arena()
    head = head_of(1, "full", "dcp", 1, None)
    job = pickle.dumps(DurableFileSystemWriter(str(tmp_path / "step-1"), head=head))
    state = {"w": torch.arange(3.0), "n": {"a": 4}}
    request = request_for(tmp_path / "step-1", state, arena, job=job)
    save(request, arena, dist.HashStore(), os.getppid())
    found = {"w": torch.zeros(3), "n": {"a": 0}}
    torch_dcp.load(found, checkpoint_id=str(tmp_path / "step-1"))
    assert found["w"].tolist() == [0, 1, 2] and found["n"] == {"a": 4}
    assert require_true(tmp_path / "step-1").head == head
    arena.close()


def test_nothing_is_committed_once_the_trainer_is_gone(tmp_path: Path) -> None:
    arena = Arena()
    request = request_for(tmp_path / "step-1", {"w": torch.ones(3)}, arena)
    failure = failure_of(request, arena, trainer_pid=os.getpid())
    assert f"the trainer, process {os.getpid()}, has ended" in failure
    names = sorted(path.name for path in (tmp_path / "step-1").iterdir())
    assert names == [], "it is asked before anything is written"
    arena.close()


class Custom:
    """Of this program, so a load would have to import it."""


def test_an_object_that_no_load_would_take_is_refused_by_its_key(tmp_path: Path) -> None:
    arena = Arena()
    request = request_for(tmp_path / "step-1", {"w": torch.ones(3), "n": {"a": Custom()}}, arena)
    assert "n.a cannot be saved" in failure_of(request, arena, os.getppid())
    assert list((tmp_path / "step-1").iterdir()) == []
    arena.close()


@pytest.mark.parametrize(
    "changes,text",
    [
        ({"failure": RuntimeError("the copy failed")}, "the copy failed"),
        ({"job": b"no pickle"}, "UnpicklingError"),
        ({"payload_bytes": 3}, "rank 0"),
    ],
)
def test_what_fails_on_one_rank_fails_where_the_ranks_meet(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    arena = Arena()
    request = request_for(tmp_path / "step-1", {"w": torch.ones(3)}, arena, **changes)
    assert text in failure_of(request, arena, os.getppid())
    assert not (tmp_path / "step-1/.metadata").exists()
    arena.close()
