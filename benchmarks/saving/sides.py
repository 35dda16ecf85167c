"""What is measured, seen alike: a checkpoint manager of ours, or a library called by itself.

A side owns a folder. ``library_dcp`` and ``library_tc`` hold the libraries, this module the managers.

    prepare -> [ save -> (forward, backward) -> wait_for_staging -> update -> wait_for_saving ]* -> close
"""

import importlib
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import TRAIN_STATE
from torchtitan.components.checkpointer.rank_state import RankState
from torchtitan.components.checkpointer.state import RANK_STATE

from benchmarks.harness.models import Run

FIRST_STEP = 2
"""The steps that are saved are even: a manager with an interval of 2 prepares itself on an odd one."""


class Side(Protocol):
    """One way to save and load a ``Run``."""

    def prepare(self) -> None:
        """What is done once, before the first save, on a step without one."""
        ...

    def save(self, step: int) -> None:
        """What stands behind the update in a training loop."""
        ...

    def wait_for_staging(self) -> None:
        """What stands before the next update."""
        ...

    def saving(self) -> "Future[Any] | None":
        """Ends when the save is durable, as far as this side sees to that; None if it is already."""
        ...

    def wait_for_saving(self) -> None:
        """Block until then, and raise what failed."""
        ...

    def path_of(self, step: int) -> Path:
        """The folder of a checkpoint."""
        ...

    def load(self, step: int) -> None:
        """Fill the run from a checkpoint."""
        ...

    def close(self) -> None: ...


class ManagerSide:
    """A checkpoint manager, built and called as the trainer does it."""

    def __init__(
        self,
        run: Run,
        folder: Path,
        manager: str,
        settings: dict[str, Any],
        *,
        has_digests: bool = True,
        is_last_save: bool = False,
    ) -> None:
        """
        Args:
            has_digests: whether saves take digests and leave a manifest.
            is_last_save: whether each save is made as that after the last step.
        """
        module, _, name = manager.partition(":")
        kind = getattr(importlib.import_module(module), name)
        rank_state = RankState(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            layout=f"fsdp={dist.get_world_size()}",
            device=torch.device("cpu"),
        )
        config = kind.Config(
            enable=True, folder=str(folder), interval=2, keep_latest_k=0, **settings
        )
        self._manager = config.build(
            dataloader=run.dataloader,
            model_parts=[run.model],
            optimizers=run.optimizers,
            lr_schedulers=run.lr_schedulers,
            states={TRAIN_STATE: run.progress, RANK_STATE: rank_state},
            sd_adapter=None,
            base_folder="",
        )
        self._folder, self._run = folder, run
        self._is_last_save = is_last_save
        if not has_digests:
            # Not a setting: nobody should be without them. A save that has no head has no manifest.
            self._manager._head_of = lambda *args, **kwargs: None

    def prepare(self) -> None:
        if not self._is_last_save:
            self._manager.save(FIRST_STEP - 1)

    def save(self, step: int) -> None:
        self._run.progress.values["step"] = step
        if not self._manager.save(step, last_step=self._is_last_save):
            raise RuntimeError(f"the manager did not save step {step}")

    def wait_for_staging(self) -> None:
        self._manager.maybe_wait_for_staging()

    def saving(self) -> "Future[Any] | None":
        return self._manager.save_future

    def wait_for_saving(self) -> None:
        self._manager.maybe_wait_for_saving()

    def path_of(self, step: int) -> Path:
        return self._folder / f"step-{step}"

    def load(self, step: int) -> None:
        if not self._manager.load(step):
            raise RuntimeError(f"the manager found nothing to load in {self._folder}")

    def close(self) -> None:
        self._manager.close()


def remove_checkpoint(side: Side, step: int) -> None:
    """Delete a checkpoint; rank 0 does it while the others wait."""
    dist.barrier()  # another rank may still sync a file of it
    if dist.get_rank() == 0:
        shutil.rmtree(side.path_of(step), ignore_errors=True)
    dist.barrier()
