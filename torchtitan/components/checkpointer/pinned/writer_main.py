"""The program of a writer process that saves through torch.distributed.checkpoint (see serving.py).

All ranks' writers are a process group of their own. What fails in one of them before DCP's protocol
begins is made to fail within it, because DCP then makes it the error of all, and they stay in step.
"""

import pickle
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, StorageMeta

from torchtitan.components.checkpointer.dcp_writer import DurableFileSystemWriter
from torchtitan.components.checkpointer.pinned import dcp_shards, serving
from torchtitan.components.checkpointer.pinned.arena import Arena
from torchtitan.components.checkpointer.pinned.meeting import connect, Meeting
from torchtitan.components.checkpointer.pinned.messages import Request
from torchtitan.components.checkpointer.pinned.snapshot import restore


class Refusal(DefaultSavePlanner):
    """Fails where DCP gathers the errors of all ranks, so that one rank's failure is everybody's."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        raise self._error


def join(meeting: Meeting) -> dist.Store:
    """Make the default process group of this process, together with the writers of all ranks.

    Raises:
        WriterMissingError: one of them will not come; says why.
    """
    store = connect(meeting)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=meeting.rank,
        world_size=meeting.world_size,
        timeout=meeting.timeout,
    )
    return store


def save(request: Request, arena: Arena, store: dist.Store, trainer_pid: int) -> None:
    """Carry out ``request``, whose job is a storage writer; a collective over the writer processes."""
    planner = DefaultSavePlanner()
    state: dict[str, Any] = {}
    writer = DurableFileSystemWriter(request.path)
    try:
        if request.failure is not None:
            raise request.failure
        arena.attach(request.mapped_bytes)
        payload = arena.read(request.payload_offset, request.payload_bytes)
        state = restore(payload, arena, dcp_shards.build)
        writer = pickle.loads(request.job)
        # The copies are in CPU memory already; writing needs no second look-ahead buffer.
        writer.per_thread_copy_ahead = 0
        writer.commit_only_if(lambda: serving.require_trainer(trainer_pid))
    except Exception as error:
        planner = Refusal(error)
    dcp.save(state, storage_writer=writer, checkpoint_id=request.path, planner=planner)


def is_agreed(error: BaseException) -> bool:
    """DCP's own error is what it has gathered from all ranks."""
    return isinstance(error, dcp.CheckpointException)


def main() -> None:
    """Entry point of the process."""
    serving.run(join, save, is_agreed)
