"""The ways to save. What a user is promised of a checkpoint is tested over all of them.

build_run(folder, **way.settings, ...)      make_config(folder, name, **way.settings, ...)
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
from torch_checkpointing.checkpoint_manager import CheckpointManager as LibraryManager
from torchtitan.components.checkpointer import AsyncMode, BaseCheckpointManager, CheckpointManager
from torchtitan.components.checkpointer.formats import DCP, Format
from torchtitan.components.checkpointer.pinned import means
from torchtitan.components.checkpointer.pinned.stager import SharedMemoryStager
from torchtitan.components.checkpointer.tc.library import BackendConfig
from torchtitan.components.checkpointer.torch_checkpointing import TorchCheckpointingManager


class WaitingManager(TorchCheckpointingManager):
    """On a machine that cannot share memory between processes: training waits for each save."""

    @dataclass(kw_only=True, slots=True)
    class Config(TorchCheckpointingManager.Config):
        pass

    def _with_stager(self, config: LibraryManager.Config) -> BackendConfig:
        with patch.object(means, "no_shared_memory", return_value="the test says so"):
            return super()._with_stager(config)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A manager and its mode."""

    name: str
    manager: type[BaseCheckpointManager]
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    is_background: bool
    """A save is over some time after the call."""

    has_writer: bool = False
    """A process of its own writes, and stages beside training."""

    begins_beside_training: bool = False
    """From the second save on a thread begins it; what that finds is told after the next step."""

    def __str__(self) -> str:
        return self.name

    @property
    def settings(self) -> dict[str, Any]:
        """What a run is built with to save in this way."""
        return {"manager": self.manager, **self.options}

    @property
    def format(self) -> Format:
        """What its checkpoints look like."""
        assert self.manager.FORMAT is not None
        return self.manager.FORMAT

    def complete(self, folder: Path) -> list[str]:
        """The names of all complete checkpoints of a run that dumps into ``folder``."""
        found = (folder / "checkpoint").glob(f"step-*/{self.format.marker}")
        return sorted(path.parent.name for path in found)

    def unfinished(self, step: int) -> str:
        """The name under which a save that was not finished lies there."""
        return f"step-{step}" if self.format is DCP else f"tmp_step-{step}"


def _dcp(mode: str, **facts: bool) -> Way:
    options = {"async_mode": mode}
    return Way(name=f"dcp {mode}", manager=CheckpointManager, options=options, **facts)


DISABLED = _dcp("disabled", is_background=False)
ASYNC = _dcp("async", is_background=True)
PINNED = _dcp("async_with_pinned_mem", is_background=True, has_writer=True)
TC = Way(
    name="torch_checkpointing",
    manager=TorchCheckpointingManager,
    is_background=True,
    has_writer=True,
    begins_beside_training=True,
)
TC_WAITING = Way(
    name="torch_checkpointing without shared memory",
    manager=WaitingManager,
    is_background=False,
)
WAYS = [DISABLED, ASYNC, PINNED, TC, TC_WAITING]


def over(*ways: Way) -> pytest.MarkDecorator:
    """Run a test once for each of ``ways``, which it gets as ``way``."""
    chosen: Iterable[Way] = ways or WAYS
    return pytest.mark.parametrize("way", chosen, ids=str)


def stager_of(manager: Any) -> SharedMemoryStager | None:
    """What copies beside training, once it is there."""
    found = manager.stager if isinstance(manager, CheckpointManager) else manager._stager
    return cast(SharedMemoryStager | None, found)


def saves_in_background(manager: Any) -> bool:
    """Whether training goes on during the next save; a manager may have given that up."""
    if isinstance(manager, CheckpointManager):
        return manager.async_mode is not AsyncMode.DISABLED
    return manager._is_async
