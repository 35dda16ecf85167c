"""Fill the objects of a run from the checkpoint that was chosen for it.

Source -> dcp_index.read_outline -> templates -> matching.require_match -> read (dcp.load)
       -> is it the step of its name?
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torchtitan.components.checkpointer import dcp_index, matching
from torchtitan.components.checkpointer.dcp_reader import read_error
from torchtitan.components.checkpointer.integrity.verification import Verification
from torchtitan.components.checkpointer.source import require_step, Source
from torchtitan.components.checkpointer.state import MODEL, RANK_STATE, TRAIN_STATE
from torchtitan.components.checkpointer.templates import templates
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection


@GarbageCollection.paused()
def restore(
    source: Source,
    wanted: dict[str, Any],
    read: Callable[[dict[str, Any]], None],
    *,
    states: Mapping[str, Any],
    excluded: Iterable[str],
    group: "dist.ProcessGroup | None",
    verification: Verification | None = None,
) -> None:
    """Fill ``wanted``, entries as they lie in a checkpoint, through ``read``. Collective.

    No object changes before the ranks agree that the read was good, but for tensors, which the next
    attempt writes over.

    Args:
        states: all objects of the run by state key.
        excluded: the keys among them that are not to be restored.
        verification: checks the index; None for a checkpoint without one.

    Raises:
        CheckpointMismatchError: the checkpoint holds other state, or another step.
        CheckpointDamagedError: a file of it is not what was saved, found by any rank.
        CheckpointReadError: it cannot be read.
    """
    started_at = time.monotonic()
    if not source.from_hf:
        other_keys = frozenset(states) - {MODEL}
        outline = dcp_index.read_outline(source.path, group, verification)
        wanted = templates(wanted, other_keys, outline)
        # A run without per-rank state may load a checkpoint that has it.
        others = other_keys | {RANK_STATE}
        matching.require_match(source.path, wanted, other_keys=others, group=group, outline=outline)
    try:
        read(wanted)
    except dcp.CheckpointException as error:
        raise read_error(source.path, error, verification) from error
    if TRAIN_STATE not in excluded:
        require_step(source, states.get(TRAIN_STATE))
    GarbageCollection.collect("after loading a checkpoint")
    logger.info(f"Loaded the checkpoint in {time.monotonic() - started_at:.2f} s.")
