"""What torch_checkpointing is asked for.

default_backend_config -> for_this_run -> library.on_this_rank -> Backend
                              |-> with_sync_save: last saves, runs that only load
"""

import math
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch_checkpointing.barriers import TCPStoreBarrierConfig
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.base_storage import StorageConfig

from torchtitan.components.checkpointer.state import MODEL, OPTIMIZER
from torchtitan.components.checkpointer.tc.commit import CommitBarrierConfig
from torchtitan.components.checkpointer.tc.events import (
    init_subprocess_logging,
    structured_logger_init_args,
)
from torchtitan.components.checkpointer.tc.resharder import Resharder
from torchtitan.tools import filesystem

DEFAULT_TORCH_CHECKPOINTING_BARRIER_TCPSTORE_PORT = 43001
"""Of the barrier in the default config; a run replaces that barrier (``for_this_run``)."""

_LIMIT_SECONDS = 600
_FILE_NAME = re.compile(r"[A-Za-z0-9_-]+")


ConfigT = TypeVar("ConfigT", bound=CheckpointManager.Config)


def require_local(folder: str, initial_load_path: str | None) -> None:
    """Check that the library's storage is asked for local paths only. Raises ValueError."""
    for name, path in (("folder", folder), ("initial_load_path", initial_load_path)):
        if path and filesystem.is_remote(path):
            raise ValueError(
                f"checkpoint.{name} is {path}, and remote paths are not yet supported by torch_checkpointing "
                f"here; set --checkpoint.{name} to a local path, or use --checkpoint.backend dcp."
            )


def why_not_to_another_process(storage_config: StorageConfig | None) -> str | None:
    """What keeps a writer process from using this storage, or None."""
    kind = type(storage_config)
    if kind.__module__ == "__main__":
        return f"the storage {kind.__name__} is of the program that was started, which no other process has"
    try:
        pickle.dumps(storage_config)
    except Exception as error:  # whatever its class raises
        return f"the storage {kind.__name__} cannot be handed to a process that writes: {error}"
    return None


def item_specs() -> dict[str, ItemSpec]:
    """How the items with sharded tensors are saved; each may be missing from a save."""
    spec = ItemSpec(requires_copy=True, resharder=Resharder(), required=False)
    return {MODEL: spec, OPTIMIZER: spec}


def default_backend_config() -> CheckpointManager.Config:
    """Asynchronous saves, committed together at a store on ``MASTER_ADDR``."""
    barrier = TCPStoreBarrierConfig(
        master_address=os.environ.get("MASTER_ADDR") or "localhost",
        tcpstore_port=DEFAULT_TORCH_CHECKPOINTING_BARRIER_TCPSTORE_PORT,
        timeout_barrier_init_sec=60,
        use_checkpoint_barrier_tcpstore_libuv=True,
    )
    return CheckpointManager.Config(
        items=item_specs(),
        default=ItemSpec(requires_copy=False),
        save=AsyncCheckpointSaverConfig(
            writer_config=CheckpointWriterConfig(
                checkpoint_write_barrier_timeout_sec=_LIMIT_SECONDS, barrier_config=barrier
            ),
            wait_timeout_secs=_LIMIT_SECONDS,
            staging_config=CheckpointStagerConfig(use_pinned_memory=True),
        ),
    )


def with_sync_save(config: ConfigT, *, use_barrier: bool = True) -> ConfigT:
    """``config`` with saves that the caller waits for, of the same type.

    Args:
        use_barrier: False for a run that saves nothing and so has no other rank to wait for.
    """
    writer = config.save.writer_config
    if not use_barrier:
        # Without a barrier nothing may look finished under a temporary name, says the library.
        writer = replace(writer, barrier_config=None, write_to_temp_dir=False)
    save = SyncCheckpointSaverConfig(
        writer_config=writer, wait_timeout_secs=config.save.wait_timeout_secs
    )
    return replace(config, save=save, pre_finalize_callback=None)


def for_this_run(
    config: CheckpointManager.Config,
    states: Mapping[str, Any],
    *,
    storage_config: StorageConfig,
    limit_seconds: float,
    load_only: bool,
) -> CheckpointManager.Config:
    """``config`` with what this run and this machine need.

    Args:
        states: the objects of the run, by the keys that become items.

    Raises:
        ValueError: ranks would not wait for each other, or a key cannot name a file.
    """
    if unfit := sorted(key for key in states if not _FILE_NAME.fullmatch(key)):
        raise ValueError(
            f"states to save are named {', '.join(map(repr, unfit))}, and torch_checkpointing makes file "
            "names of that, which may have letters, digits, - and _. Rename them."
        )
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if config.save.writer_config.barrier_config is None and world_size > 1 and not load_only:
        raise ValueError(
            f"torch_checkpointing was configured without a barrier for {world_size} ranks: rank 0 would "
            "publish a checkpoint before the others have written theirs. Give its writer a barrier_config, "
            "or set --checkpoint.load_only."
        )
    whole_seconds = math.ceil(limit_seconds)
    # At a port that every job has, one job would pass the barrier of another on the same host.
    barrier = None if config.save.writer_config.barrier_config is None else CommitBarrierConfig()
    writer = replace(
        config.save.writer_config,
        barrier_config=barrier,
        checkpoint_write_barrier_timeout_sec=whole_seconds,
    )
    save = replace(config.save, writer_config=writer, wait_timeout_secs=whole_seconds)
    default = config.default
    if default is not None and default.resharder is None:
        # Any object of a run may hold sharded tensors, a copy of the weights for instance.
        default = replace(default, resharder=config.items[MODEL].resharder)
    logging_args = structured_logger_init_args()
    config = replace(
        config,
        default=default,
        save=save,
        storage_config=storage_config,
        subprocess_init_fn=init_subprocess_logging,
        subprocess_init_args=(logging_args, config.subprocess_init_fn, config.subprocess_init_args),
    )
    return with_sync_save(config, use_barrier=False) if load_only else config
