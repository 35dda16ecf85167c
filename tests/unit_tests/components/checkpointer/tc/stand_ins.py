"""Parts of a save on torch_checkpointing that a test can watch, stop and fail."""

import io
import os
import pickle
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch_checkpointing.dtensor_metadata import (
    DTensorShardingMetadata,
    get_device_mesh_spec,
    ReplicateSpec,
)
from torchtitan.components.checkpointer.pinned.arena import Arena
from torchtitan.components.checkpointer.pinned.meeting import Meeting
from torchtitan.components.checkpointer.pinned.messages import Request
from torchtitan.components.checkpointer.tc import writer_main
from torchtitan.components.checkpointer.tc.storage import DurableStorage, DurableStorageConfig
from torchtitan.tools.errors import portable


@dataclass
class FullDisk(DurableStorageConfig):
    """A storage that takes no file."""

    def create_storage(self) -> DurableStorage:
        return _FullStorage(self)


class _FullStorage(DurableStorage):
    def stream_write(self, path: Path) -> io.IOBase:
        raise OSError(28, "No space left on device")


@dataclass
class Watched(DurableStorageConfig):
    """A storage that notes what it is asked: (method, path), in order."""

    calls: list[tuple[str, Path]] = field(default_factory=list)

    def create_storage(self) -> DurableStorage:
        return _WatchedStorage(self)


class _WatchedStorage(DurableStorage):
    def __init__(self, config: Watched) -> None:
        super().__init__(config)
        self._calls = config.calls

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found):
            return found

        def noted(path: Path, *others: Any, **more: Any) -> Any:
            self._calls.append((name, path))
            return found(path, *others, **more)

        return noted


def plain_tensor(rank: int, *shape: int, dtype: str = "torch.float32") -> DTensorShardingMetadata:
    """How a checkpoint describes a tensor that is whole, on ``rank``."""
    return DTensorShardingMetadata(
        global_shape=shape,
        dtype=dtype,
        stride=(1,) * len(shape),
        mesh_spec=get_device_mesh_spec(device_type="cpu", mesh_shape=(1,), mesh_data=(rank,)),
        placements=(ReplicateSpec(),),
    )


class Writers:
    """Stands for all writer processes of this process: what they would do is done in its threads.

    ``patch.object(stager, "WriterProcess", Writers().start)``
    """

    def __init__(self) -> None:
        self.started: list["_Writer"] = []
        self.error: BaseException | None = None
        """What the next saves fail with."""
        self.reached, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()

    def start(self, arena: Arena, meeting: Meeting, *, program: str) -> "_Writer":
        assert program == writer_main.PROGRAM
        self.started.append(_Writer(self, arena, meeting))
        return self.started[-1]

    def hold(self) -> None:
        """Let saves stop before they write, until ``let_go``."""
        self.reached.clear()
        self.may_go_on.clear()

    def let_go(self) -> None:
        self.may_go_on.set()


class _Writer:
    def __init__(self, writers: Writers, arena: Arena, meeting: Meeting) -> None:
        self.meeting = meeting
        self.pid = 0
        self.is_usable = True
        self._writers = writers
        self._arena = arena
        self._joined = writer_main.join(meeting)

    def save(self, request: Request) -> None:
        self._writers.reached.set()
        assert self._writers.may_go_on.wait(60)
        if self._writers.error is not None:
            raise self._writers.error
        if request.job:
            # What prepares the process prepares this one, which it is not.
            request = replace(
                request, job=pickle.dumps(replace(pickle.loads(request.job), init=None))
            )
        try:
            writer_main.save(request, self._arena, self._joined, os.getppid())
        except Exception as error:
            raise portable(error) from None

    def end(self) -> None:
        self.is_usable = False
        self._writers.may_go_on.set()


@dataclass
class KeptHere(DurableStorageConfig):
    """A storage that another process cannot be given."""

    lock: Any = field(default_factory=threading.Lock)


@dataclass
class Vanishing(DurableStorageConfig):
    """A storage whose checkpoints are taken away as soon as they have their name."""

    def create_storage(self) -> DurableStorage:
        return _VanishingStorage(self)


class _VanishingStorage(DurableStorage):
    def rename(self, src_path: Path, dst_path: Path, *others: Any, **named: Any) -> None:
        super().rename(src_path, dst_path, *others, **named)
        self.rmdir(dst_path)
