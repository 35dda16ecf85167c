"""A writer that stops in the middle of a save, in whatever process, until a test lets it go on.

A patch does not reach a writer process, but a class that its trainer hands over does. Two named pipes
make the hold exact: opening one blocks until the other side opens it as well.

    writer: reached(open for writing) ... go_on(open for reading) -> on
    test:   await_reached ............... let_go
"""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torchtitan.components.checkpointer import dcp
from torchtitan.components.checkpointer.dcp_writer import DurableFileSystemWriter

DATA, INDEX = "before the data", "before the index has its name"


class Hold:
    """One place to stop at; goes to the writer process with the writer."""

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


class HeldWriter(DurableFileSystemWriter):
    """Stops at ``at``; of the writers of one save only that of rank 0 comes to the index."""

    def __init__(self, path: str, hold: Hold, at: str) -> None:
        super().__init__(path)
        self._hold, self._at = hold, at

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        if self._at == DATA:
            self._hold.stop_here()
        return super().write_data(plan, planner)

    def commit_only_if(self, check: Any) -> None:
        def stop_and_check() -> None:
            if self._at == INDEX:
                self._hold.stop_here()
            check()

        super().commit_only_if(stop_and_check)


class FullDiskWriter(DurableFileSystemWriter):
    """Finds no space on the disk."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        raise OSError(28, "No space left on device")


def hold_next_save(hold: Hold, at: str) -> Any:
    """From now on the writers of this rank stop; returns the patch, whose ``stop`` ends that."""
    return _start(lambda path: HeldWriter(path, hold, at))


def fill_disk() -> Any:
    """From now on the writers of this rank find the disk full."""
    return _start(FullDiskWriter)


def _start(make: Any) -> Any:
    replaced = patch.object(dcp, "DurableFileSystemWriter", make)
    replaced.start()
    return replaced
