"""The program of the writer process: torch_checkpointing writes what its trainer has staged.

trainer: Staged.deliver(Job) -> pinned/serving.py -> save -> Writer -> files
"""

import importlib
import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch_checkpointing.checkpoint_base import CheckpointItem, CheckpointWriteInfo
from torch_checkpointing.checkpoint_layout import LayoutInfo
from torch_checkpointing.checkpoint_writer import CheckpointWriterArgs
from torch_checkpointing.logging_utils import EventLogger, EventType
from torch_checkpointing.types import RankInfo

from torchtitan.components.checkpointer.integrity.manifest import Head
from torchtitan.components.checkpointer.pinned import serving
from torchtitan.components.checkpointer.pinned.arena import Arena
from torchtitan.components.checkpointer.pinned.meeting import connect, Meeting
from torchtitan.components.checkpointer.pinned.messages import Request
from torchtitan.components.checkpointer.pinned.neighbour import Neighbour
from torchtitan.components.checkpointer.pinned.snapshot import restore
from torchtitan.components.checkpointer.tc.commit import StoreCommit
from torchtitan.components.checkpointer.tc.events import adopt, BACKEND_LOGGER_NAME
from torchtitan.components.checkpointer.tc.writer import Writer
from torchtitan.tools.logging import init_logger

_logger = logging.getLogger(BACKEND_LOGGER_NAME)

PROGRAM = __name__
"""How the process that runs this is told to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a save needs besides the staged state."""

    args: CheckpointWriterArgs
    layouts: Mapping[str, LayoutInfo | None]
    """By item that is written."""
    metadata: bytes | None
    """The contents of metadata.pkl."""
    head: Head | None
    """What manifest.json begins with; None for none."""
    log_context: dict[str, Any]
    """What the library stamps on its events."""
    init: tuple[Callable[..., None], tuple[Any, ...]] | None
    """Called with its arguments before the first save of the process."""


def describe_shard(tensor: DTensor) -> Any:
    """What makes ``build_shard`` give the same tensor again."""
    return tensor._spec


def build_shard(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """The sharded tensor of which ``local`` is this rank's part."""
    return DTensor(local, spec, requires_grad=False)


_initialised = False


class Joined(NamedTuple):
    """The writer processes of all ranks have met."""

    store: dist.Store
    rank: RankInfo
    neighbour: Neighbour | None = None
    """None when there is one rank."""


def join(meeting: Meeting) -> Joined:
    """Meet the writer processes of the other ranks."""
    rank = RankInfo(
        global_rank=meeting.rank,
        global_world_size=meeting.world_size,
        role_rank=meeting.rank,
        role_world_size=meeting.world_size,
    )
    store = connect(meeting)
    return Joined(store, rank, Neighbour(meeting, store) if meeting.world_size > 1 else None)


def save(request: Request, arena: Arena, joined: Joined, trainer_pid: int) -> None:
    """Carry out ``request``, together with the writer processes of the other ranks."""
    commit = StoreCommit(joined.rank, joined.store, request.attempt)
    try:
        if joined.neighbour is not None:
            joined.neighbour.begin(request.attempt)
        if request.failure is not None:
            raise request.failure
        job: Job = pickle.loads(request.job)
        _initialise(job)
        arena.attach(request.mapped_bytes)
        payload = arena.read(request.payload_offset, request.payload_bytes)
        items = {
            key: CheckpointItem(value=value, layout=job.layouts.get(key))
            for key, value in restore(payload, arena, build_shard).items()
            if key in job.layouts  # others were staged, and are written by another rank
        }
        writer = Writer(
            job.args,
            lambda: commit,
            lambda: serving.require_trainer(trainer_pid),
            lambda: job.head,
        )
        info = CheckpointWriteInfo(items, serialized_distributed_metadata=job.metadata)
        tell = EventLogger()
        _logger.info("Writing", extra=tell(EventType.CHECKPOINT_WRITE_START))
        writer.write(request.path, info)
        _logger.info("Written", extra=tell(EventType.CHECKPOINT_WRITE_END, end_to_end=True))
    except BaseException as error:
        commit.fail(error)  # what came before the writer
        raise


def _initialise(job: Job) -> None:
    global _initialised
    adopt(job.log_context)
    if not _initialised and job.init is not None:
        function, arguments = job.init
        function(*arguments)
    _initialised = True


def is_agreed(error: BaseException) -> bool:
    """Every failure is: each save has a commit of its own, so no writer is out of step after one."""
    return isinstance(error, Exception)


def main() -> None:
    """Entry point of the process."""
    init_logger()  # what is said here looks as it does in the trainer
    # Meshes come without process groups here, which torch would warn of, past our console.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    # The first sharded tensor would import it, which takes a second, while its save waits. By name, since
    # nothing here uses it.
    importlib.import_module("torch._dynamo")
    serving.run(join=join, save=save, is_agreed=is_agreed)
