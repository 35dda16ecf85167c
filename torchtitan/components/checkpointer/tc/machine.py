"""Decide whether saves go on beside training on this machine, and say so in one line.

They do where memory can be shared with another process and the storage can be handed to it;
otherwise training waits for each save.

    defaults.for_this_run -> carried_out_here -> library.BackendConfig -> Backend
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.staging import StagingOptions
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig

from torchtitan.components.checkpointer.pinned import means
from torchtitan.components.checkpointer.pinned.stager import SharedMemoryStager
from torchtitan.components.checkpointer.state import changed_by_updates_only
from torchtitan.components.checkpointer.tc import writer_main
from torchtitan.components.checkpointer.tc.defaults import (
    why_not_to_another_process,
    with_sync_save,
)
from torchtitan.components.checkpointer.tc.library import BackendConfig, on_this_rank
from torchtitan.tools.logging import logger


def carried_out_here(
    config: CheckpointManager.Config,
    find_states: Callable[[], Mapping[str, Any]],
    *,
    group: "dist.ProcessGroup | None",
    limit_seconds: float,
) -> BackendConfig:
    """``config`` as this rank can carry it out, with a stager if it saves beside training.

    Args:
        find_states: what will be saved, by state key; asked when it is staged. It should refer back to
            the manager: one that an exception drops is then not closed at once, which would wait for
            its writer process while the exception is on its way.
    """
    stager = None
    if isinstance(config.save, AsyncCheckpointSaverConfig):
        problem = means.no_shared_memory() or why_not_to_another_process(config.storage_config)
        if problem is None:
            staging = config.save.staging_config
            stager = SharedMemoryStager(
                StagingOptions(
                    use_pinned_memory=staging.use_pinned_memory,
                    use_non_blocking_copy=staging.use_non_blocking_copy,
                ),
                group=group,
                timeout=timedelta(seconds=limit_seconds),
                find_can_wait=lambda: changed_by_updates_only(find_states()),
                describe_shard=writer_main.describe_shard,
                program=writer_main.PROGRAM,
            )
            way = f"are staged in {stager.means.in_words}; a process writes them"
        else:
            config = with_sync_save(config)
            way = f"make training wait, because {problem}"
        if not dist.is_initialized() or dist.get_rank() == 0:
            is_direct = getattr(config.storage_config, "use_direct_io", False)
            io = f"{'with' if is_direct else 'without'} direct I/O"
            logger.info(f"Saves {way}, {io}, through torch_checkpointing.")
    return on_this_rank(config, group=group, stager=stager)
