"""A program for a writer process that does what its job says, and answers by how it fails."""

import pickle
from typing import Any

import torch.distributed as dist
from torchtitan.components.checkpointer.pinned import serving
from torchtitan.components.checkpointer.pinned.arena import Arena
from torchtitan.components.checkpointer.pinned.meeting import connect
from torchtitan.components.checkpointer.pinned.messages import Request
from torchtitan.tools import disk
from torchtitan.tools.disk import Disk


class OtherDisk(Disk):
    """Known by its name."""


def _burst() -> None:
    raise RuntimeError("cannot be made here")


class StrangeDisk(Disk):
    """Cannot be had in another process."""

    def __reduce__(self) -> Any:
        return _burst, ()


class Agreed(RuntimeError):
    """Stands for an error that all ranks have failed with."""


def save(request: Request, arena: Arena, store: dist.Store, trainer_pid: int) -> None:
    serving.require_trainer(trainer_pid)
    arena.attach(request.mapped_bytes)
    job = pickle.loads(request.job)
    number = store.add("saves", 1)
    if job == "disk":
        raise Agreed(f"writes through {type(disk.current()).__name__}")
    if job == "agree":
        raise Agreed(f"save {number} of {request.path}")
    if job == "fail":
        raise ValueError(f"save {number} reads {arena.read(request.payload_offset, 4)!r}")


def main() -> None:
    serving.run(connect, save, lambda error: isinstance(error, Agreed))
