"""The mode async_with_pinned_mem of the DCP manager: one stager, from its first use to the end of a run.

    step without a save: prewarm, once -------------------+
    step with a save: how the last one ended, settle -----+-> the ranks agree -> stage
    last step: settle, with nothing to prepare -----------+                  -> or fall back, all of them

While there is a stager, torch hands the saves of its writer process to it (pinned/torch_seam.py).
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from torchtitan.components.checkpointer.dcp_entry import enter, taken
from torchtitan.components.checkpointer.dcp_writer import DurableFileSystemWriter
from torchtitan.components.checkpointer.endings import Verdict
from torchtitan.components.checkpointer.errors import (
    CheckpointSaveError,
    CheckpointSaveTimeoutError,
)
from torchtitan.components.checkpointer.modes import AsyncMode
from torchtitan.components.checkpointer.pinned import dcp_shards, torch_seam
from torchtitan.components.checkpointer.pinned.settling import settle
from torchtitan.components.checkpointer.pinned.snapshot import CanWait
from torchtitan.components.checkpointer.pinned.stager import plain, SharedMemoryStager

WRITER_PROGRAM = "torchtitan.components.checkpointer.pinned.writer_main"

StateOf = Callable[[], dict[str, Any]]
"""The state to save, taken when it is called."""


class PinnedSession:
    """Makes a stager when one is needed, and has the ranks agree on it before each save."""

    def __init__(
        self,
        stager_type: Callable[..., SharedMemoryStager],
        *,
        group: "dist.ProcessGroup | None",
        limit_seconds: float,
        find_can_wait: Callable[[], CanWait],
    ) -> None:
        """Makes nothing yet; ``group`` is where the ranks agree, ``limit_seconds`` that of each wait."""
        self.stager: SharedMemoryStager | None = None
        self.prepared: dict[str, Any] = {}
        """The state that the next save is of, as plain values; nothing if it could not be had."""
        self._stager_type = stager_type
        self._group = group
        self._limit_seconds = limit_seconds
        self._find_can_wait = find_can_wait
        self._refusal: Exception | None = None

    def prewarm(self, state_of: StateOf) -> AsyncMode:
        """Once, before the first save: start the writer process and take memory beside training.

        Collective. Returns the mode of the saves that follow.
        """
        if self.stager is not None:
            return AsyncMode.ASYNC_WITH_PINNED_MEM
        try:
            self._open().prewarm(self._taken(state_of))
        finally:
            self.prepared = {}
        verdict = self._settle(None, needs_writer=True)
        return AsyncMode.ASYNC_WITH_PINNED_MEM if verdict.can_stage else AsyncMode.DISABLED

    def settle(self, failure: CheckpointSaveError | None, state_of: StateOf | None) -> Verdict:
        """Agree how the previous save ended, and prepare the next one, of ``state_of``. Collective.

        Args:
            failure: what this rank's previous save failed with.
            state_of: None if the next save will not be staged.
        """
        if state_of is not None and not isinstance(failure, CheckpointSaveTimeoutError):
            self._open().prepare(self._taken(state_of))
        return self._settle(failure, needs_writer=state_of is not None)

    def async_save(self, writer: DurableFileSystemWriter, checkpoint_id: str) -> AsyncSaveResponse:
        """Save what was prepared, through torch, which calls the stager that has it."""
        self.prepared = {}  # it keeps tensors alive that the run may replace
        if self._refusal is not None:
            writer.refuse(self._refusal)

        def save(state_dict: dict[str, Any], writer: DurableFileSystemWriter) -> Any:
            return dcp.async_save(
                state_dict,
                storage_writer=writer,
                checkpoint_id=checkpoint_id,
                process_group=self._group,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=cast(Any, self._open()),
            )

        # torch would ask each entry, and each tensor at length, whether it has a state of its own.
        return cast(AsyncSaveResponse, enter(save, {}, writer))

    def close(self) -> None:
        """End the writer process and free the memory; no save may be in flight."""
        self.prepared = {}
        if self.stager is None:
            return
        stager, self.stager = self.stager, None
        try:
            stager.close()
        finally:
            torch_seam.close_route()

    def _open(self) -> SharedMemoryStager:
        if self.stager is None:
            self.stager = self._stager_type(
                StagingOptions(),  # everything that the machine can do
                group=self._group,
                timeout=timedelta(seconds=self._limit_seconds),
                find_can_wait=self._find_can_wait,
                describe_shard=dcp_shards.describe,
                program=WRITER_PROGRAM,
            )
            torch_seam.open_route()
        return self.stager

    def _taken(self, state_of: StateOf) -> dict[str, Any]:
        """The state as plain values; nothing if it cannot be had, which is for the save to fail with."""
        self.prepared = {}  # before the next one is taken
        self.prepared, self._refusal = taken(
            lambda: {key: plain(value) for key, value in state_of().items()}
        )
        return self.prepared

    def _settle(self, failure: CheckpointSaveError | None, *, needs_writer: bool) -> Verdict:
        verdict = settle(self._open(), failure, self._group, needs_writer=needs_writer)
        if not verdict.can_stage:
            self.close()
        return verdict
