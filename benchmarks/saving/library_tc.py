"""torch_checkpointing by itself, with the two changes without which it does not run on CPUs.

Its storage writes past the page cache at addresses that ext4 does not take, so that is switched off. Its
metadata manager gathers through the memory of a CUDA device, so that is gathered as objects instead.
"""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch_checkpointing import checkpoint_manager
from torch_checkpointing.checkpoint_layout import LayoutInfo, TorchSerialization
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from benchmarks.harness.models import Run

_VALUES = "values"
"""The item of everything that is no tensor. It is equal on all ranks, so rank 0 writes it."""


class GlooMetadataManager(DefaultMetadataManager):
    """Gathers on any backend."""

    def _all_gather_pickled_data(self, data: Any, process_group: Any = None) -> dict[int, Any]:
        gathered: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(gathered, data, group=process_group)
        return dict(enumerate(gathered))


class AlwaysByPieces(DefaultResharder):
    """Reads just what is needed out of the files, in the layout that was saved as well."""

    def should_reshard(self, source_metadata: Any, target_metadata: Any) -> bool:
        return True


class TcLibrary:
    """The library's ``CheckpointManager``, otherwise with its defaults."""

    def __init__(self, run: Run, folder: Path, how: str) -> None:
        """``how`` is sync or async, and may end with ", pieces" for the way it loads."""
        self._run, self._folder = run, folder
        folder.mkdir(parents=True, exist_ok=True)
        # The manager takes the class from its module when it is built.
        checkpoint_manager.DefaultMetadataManager = GlooMetadataManager
        way, _, reads = how.partition(", ")
        resharder = AlwaysByPieces() if reads == "pieces" else DefaultResharder()
        resharded = ItemSpec(requires_copy=True, resharder=resharder, required=False)
        # In a file per rank, as is the default, more ranks than have saved would miss theirs.
        layout = LayoutInfo(f"{_VALUES}.pt", TorchSerialization())
        values = ItemSpec(requires_copy=False, layout=layout, required=False)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                items={"model": resharded, "optimizer": resharded, _VALUES: values},
                save=SyncCheckpointSaverConfig() if way == "sync" else _asynchronous(),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        self._saving: Future[Any] | None = None

    def prepare(self) -> None:
        self._manager.prewarm_staging(self._state(to_save=True))

    def save(self, step: int) -> None:
        self._run.progress.values["step"] = step
        self._saving = self._manager.save(str(self.path_of(step)), self._state(to_save=True))

    def wait_for_staging(self) -> None:
        with self._manager.lock():
            pass

    def saving(self) -> "Future[Any] | None":
        return self._saving

    def wait_for_saving(self) -> None:
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def path_of(self, step: int) -> Path:
        return self._folder / f"step-{step}"

    def load(self, step: int) -> None:
        self._manager.load(str(self.path_of(step)), into=self._state(to_save=False), strict=True)

    def close(self) -> None:
        self._manager.close()

    def _state(self, *, to_save: bool) -> dict[str, Any]:
        run = self._run
        optimizer = run.optimizers.state_dict()
        # Plain values in an item that is resharded would not be restored.
        values = {key: value for key, value in optimizer.items() if not torch.is_tensor(value)}
        state = {
            "model": run.model.state_dict(),
            "optimizer": {key: value for key, value in optimizer.items() if key not in values},
        }
        if dist.get_rank() == 0 or not to_save:
            state[_VALUES] = {
                "optimizer": values,
                "lr_scheduler": run.lr_schedulers.state_dict(),
                "dataloader": run.dataloader.state_dict(),
                "train_state": run.progress.state_dict(),
            }
        return state


def _asynchronous() -> AsyncCheckpointSaverConfig:
    # By default its process has 30 s to start, which several of them on few cores may exceed.
    process = CheckpointProcessConfig(subprocess_init_timeout_secs=300)
    return AsyncCheckpointSaverConfig(process_config=process)
