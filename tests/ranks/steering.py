"""Stops or fails the writers of a rank at one point of a save, in whatever process and way they write.

A patch does not reach a writer process, but what its trainer hands over does: DCP's writer, and the
storage of torch_checkpointing. Two named pipes make a hold exact: opening one blocks until the
other side opens it as well.

    writer: reached(open for writing) ... go_on(open for reading) -> on
    test:   await_reached ............... let_go
"""

import concurrent.futures
import io
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torchtitan.components.checkpointer import dcp
from torchtitan.components.checkpointer.dcp_writer import (
    CommittingFileSystem,
    DurableFileSystemWriter,
)
from torchtitan.components.checkpointer.tc.storage import DurableStorage, DurableStorageConfig

from tests.unit_tests.components.checkpointer.ways import Way

Act = Callable[[], object]

BEFORE_DATA, AFTER_DATA = "before the data", "after the data"
COMMIT = "before the checkpoint counts"
"""Of the writers of one save only that of rank 0 comes to this point."""
POINTS = [BEFORE_DATA, AFTER_DATA, COMMIT]


class Hold:
    """One place to stop at; goes to the writer process with what is handed over."""

    def __init__(self, folder: Path, name: str) -> None:
        self.reached, self.go_on = folder / f"{name}-reached", folder / f"{name}-go-on"

    def make(self) -> "Hold":
        for path in (self.reached, self.go_on):
            os.mkfifo(path)
        return self

    def stop_here(self) -> None:
        self.reached.open("w").close()
        self.go_on.open("r").close()

    def await_reached(self) -> None:
        self.reached.open("r").close()

    def let_go(self) -> None:
        self.go_on.open("w").close()


def disk_full() -> None:
    raise OSError(28, "No space left on device")


def hang() -> None:
    threading.Event().wait()


class Steering:
    """What the writers of one run on this rank do at a point of each save that begins from now on."""

    def __init__(self, way: Way) -> None:
        self._storage = SteeredStorageConfig()
        self._patch: Any = None
        self._is_dcp = way.format.backend == "dcp"
        keywords = {} if self._is_dcp else {"storage_config": self._storage}
        self.settings: dict[str, Any] = {**way.settings, "keywords": keywords}
        """What to build the run with."""

    def set(self, at: str, act: Act) -> None:
        """``act`` must pickle if a process of its own writes."""
        self.stop()
        self._storage.at, self._storage.act = at, act
        self._storage.num_told += 1
        if self._is_dcp:

            def steered(path: str, **others: Any) -> SteeredWriter:
                return SteeredWriter(path, at, act, **others)

            self._patch = patch.object(dcp, "DurableFileSystemWriter", steered)
            self._patch.start()

    def stop(self) -> None:
        """Let the saves after this one be. Not before it is at a hold or over, when all is handed over."""
        self._storage.at, self._storage.act = "", None
        if self._patch is not None:
            self._patch.stop()
            self._patch = None


def await_end_of_save(manager: Any) -> None:
    """Block until the save in flight has ended in some way, which nobody is told of yet."""
    if manager.save_future is not None:
        concurrent.futures.wait([manager.save_future])


class SteeredWriter(DurableFileSystemWriter):
    """Calls ``act`` when it comes to the point ``at``."""

    def __init__(self, path: str, at: str, act: Act, **others: Any) -> None:
        super().__init__(path, **others)
        self._at, self._act = at, act

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        if self._at == BEFORE_DATA:
            self._act()
        written = super().write_data(plan, planner)
        if self._at == AFTER_DATA:
            self._act()
        return written

    def finish(self, metadata: Metadata, results: Any) -> None:
        assert isinstance(self.fs, CommittingFileSystem)
        check = self.fs.before_rename

        def act_and_check() -> None:
            if self._at == COMMIT:
                self._act()
            if check is not None:
                check()

        self.commit_only_if(act_and_check)
        super().finish(metadata, results)


@dataclass
class SteeredStorageConfig(DurableStorageConfig):
    """Travels to the writer process anew with each save."""

    at: str = ""
    act: Act | None = None
    num_told: int = 0

    def create_storage(self) -> DurableStorage:
        return SteeredStorage(self)


class SteeredStorage(DurableStorage):
    """Does what its config says, once for each thing that it is told."""

    def __init__(self, config: SteeredStorageConfig) -> None:
        super().__init__(config)
        self._steering = config
        self._num_done = 0

    def stream_write(self, path: Path) -> io.IOBase:
        self._come_to(BEFORE_DATA)
        stream = super().stream_write(path)
        # The optimizer is the largest of what each rank writes.
        is_watched = path.name.startswith("optimizer_")
        return cast(io.IOBase, self._then_after(stream)) if is_watched else stream

    def rename(self, src_path: Path, dst_path: Path, *options: Any, **others: Any) -> None:
        if src_path.name.startswith("tmp_"):
            self._come_to(COMMIT)
        super().rename(src_path, dst_path, *options, **others)

    @contextmanager
    def _then_after(self, stream: Any) -> Generator[Any]:
        with stream as opened:
            yield opened
        self._come_to(AFTER_DATA)

    def _come_to(self, point: str) -> None:
        told = self._steering
        if told.act is not None and told.at == point and self._num_done < told.num_told:
            self._num_done = told.num_told
            told.act()
