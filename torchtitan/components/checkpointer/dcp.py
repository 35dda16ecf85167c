"""Checkpoints in the format of torch.distributed.checkpoint (DCP).

Every rank writes its shards into ``step-<n>``; rank 0 writes ``.metadata`` there last. In the
asynchronous modes DCP's collectives run on a gloo group of their own in a background thread,
because on the training group they would interleave with training's and dead-lock.

    saving.py -> _settle, _write -> dcp_save -> dcp.save | dcp.async_save -> DurableFileSystemWriter
    _load -> _choose_start -> dcp_reading.restore -> dcp_load -> dcp.load -> the states
"""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from torchtitan.components.checkpointer import dcp_index
from torchtitan.components.checkpointer.agreement import own_group, renewed
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.checkpointer.dcp_entry import enter, taken
from torchtitan.components.checkpointer.dcp_pinned import PinnedSession
from torchtitan.components.checkpointer.dcp_reader import reading_through
from torchtitan.components.checkpointer.dcp_reading import restore
from torchtitan.components.checkpointer.dcp_writer import CopyingStager, DurableFileSystemWriter
from torchtitan.components.checkpointer.discovery import Kind, parse_step
from torchtitan.components.checkpointer.endings import agree, Verdict
from torchtitan.components.checkpointer.errors import CheckpointSaveError
from torchtitan.components.checkpointer.formats import (
    CheckpointFiles as _FilesystemCheckpointStorage,
    DCP,
)
from torchtitan.components.checkpointer.in_flight import await_staging, wait_for_saving
from torchtitan.components.checkpointer.integrity.manifest import Head, head_of
from torchtitan.components.checkpointer.integrity.verification import Verification
from torchtitan.components.checkpointer.modes import AsyncMode, SaveDone
from torchtitan.components.checkpointer.pinned import means
from torchtitan.components.checkpointer.pinned.stager import SharedMemoryStager as DefaultStager
from torchtitan.components.checkpointer.saving import Due, SavingManager
from torchtitan.components.checkpointer.source import Source
from torchtitan.components.checkpointer.state import (
    cast_for_export,
    changed_by_updates_only,
    DATALOADER,
    flatten_states,
    LR_SCHEDULER,
    MODEL,
    ModelWrapper,
    OPTIMIZER,
    require_known,
)
from torchtitan.components.checkpointer.templates import snapshots
from torchtitan.config.violations import reject
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

__all__ = ["AsyncMode", "CheckpointManager", "SaveDone"]


class CheckpointManager(SavingManager):
    """Saves and loads a run through torch.distributed.checkpoint."""

    FORMAT = DCP
    BACKEND_IN_TRACES = "native_dcp"

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
        """disabled: training waits for the write. async: training waits for a copy into CPU
        memory, then goes on. async_with_pinned_mem: the copy overlaps training as well, into
        memory that is shared with a process that writes, and pinned where there is a GPU."""

        def __post_init__(self) -> None:
            # super() without arguments does not work in a class that slots=True has rebuilt.
            BaseCheckpointManager.Config.__post_init__(self)
            mode = str(getattr(self.async_mode, "value", self.async_mode)).lower()
            known = [member.value for member in AsyncMode]
            if mode not in known:
                reject(f"Invalid async_mode {self.async_mode!r}: choose one of {known}.")
                return
            self.async_mode = mode  # pyrefly: ignore[bad-assignment]  (checked above)

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        """Take over ``states`` (updated in place) and the objects a run consists of.

        Args:
            states: further entries of the checkpoint by key.
            sd_adapter: converts to other formats, or None.
            base_folder: what a relative ``config.folder`` is relative to.

        Raises:
            ValueError: a setting needs something that is not there.
        """
        super().__init__(
            config,
            storage=_FilesystemCheckpointStorage(),
            base_folder=base_folder,
            sd_adapter=sd_adapter,
        )
        if not self.enable:
            return
        states.update(
            {
                MODEL: ModelWrapper(model_parts),
                OPTIMIZER: optimizers,
                DATALOADER: dataloader,
                LR_SCHEDULER: lr_schedulers,
            }
        )
        self.states = states
        self.staging_future: Future[Any] | None = None
        self._pinned: PinnedSession | None = None
        self._copying_stager: CopyingStager | None = None
        self._reading: Verification | None = None
        self.async_mode = AsyncMode(config.async_mode)
        if self.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM and not self.load_only:
            means.announce()
        is_async = self.async_mode is not AsyncMode.DISABLED
        self.pg = self._settling_group = own_group(self.timeout_seconds) if is_async else None
        if self.async_mode is AsyncMode.ASYNC and self._failed.goes_on and dist.is_initialized():
            # A run that goes on may have a save that still uses the first one in its thread.
            self._settling_group = own_group(self.timeout_seconds)

    @property
    def stager(self) -> DefaultStager | None:
        """What copies in the mode async_with_pinned_mem; None until its first use."""
        return None if self._pinned is None else self._pinned.stager

    def _pinned_session(self) -> PinnedSession:
        if self._pinned is None:
            self._pinned = PinnedSession(
                lambda *args, **keywords: DefaultStager(*args, **keywords),
                group=self.pg,
                limit_seconds=self.timeout_seconds,
                # This refers back to the manager. So one that an exception drops is not closed at
                # once, which would wait for its writer process while the exception is on its way.
                find_can_wait=lambda: changed_by_updates_only(self.states),
            )
        return self._pinned

    def _parse_step(self, filename: str) -> tuple[int, bool] | None:
        return dcp_index.parse_entry(filename)

    def _is_valid_checkpoint(self, checkpoint_id: str) -> bool:
        return dcp_index.is_complete(self._storage, checkpoint_id)

    def _kind_of(self, checkpoint_id: str) -> Kind:
        return dcp_index.kind_of(self._storage, checkpoint_id, self._full_keys())

    def _flattened_model_states_sd(
        self, state_dict: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The top level of a checkpoint; without ``state_dict``, of everything, to be saved."""
        if state_dict is None:
            return snapshots(flatten_states(self.states), self._other_keys())
        return flatten_states(state_dict)

    def _other_keys(self) -> frozenset[str]:
        return frozenset(self.states) - {MODEL}

    def _states_to_load(self, model_only: bool) -> dict[str, Any]:
        """The entries to fill, as they lie in a checkpoint.

        Raises:
            ValueError: ``exclude_from_loading`` names something that no checkpoint holds.
        """
        if model_only:
            return self.states[MODEL].state_dict()
        require_known(self.exclude_from_loading, self.states)
        kept = {
            key: value for key, value in self.states.items() if key not in self.exclude_from_loading
        }
        return self._flattened_model_states_sd(kept)

    def _head_of(self, state_dict: dict[str, Any], checkpoint_id: str) -> Head | None:
        """How the manifest of a save begins; None for one that is not of a step."""
        step = parse_step(checkpoint_id.rpartition("/")[2])
        if step is None:
            return None
        keys = self._full_keys()
        kind = "full" if not keys or keys & state_dict.keys() else "model_only"
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        return head_of(step, kind, DCP.backend, world_size, self._run)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
        *,
        refusal: Exception | None = None,
    ) -> "Future[Any] | AsyncSaveResponse | None":
        """Write ``state_dict``; a collective over all ranks.

        Args:
            refusal: why this rank has nothing to write, which fails the save on all ranks.

        Returns:
            None when the checkpoint is durable already, otherwise what ``dcp.async_save``
            returned.
        """
        if to_hf:
            raise ValueError("Saving in Hugging Face format is not available yet.")
        stager = None
        if async_mode is AsyncMode.ASYNC:
            stager = self._copying_stager = self._copying_stager or CopyingStager()
        head = self._head_of(state_dict, checkpoint_id)
        writer = DurableFileSystemWriter(checkpoint_id, stager=stager, head=head)
        if self._lock is not None and async_mode is not AsyncMode.ASYNC_WITH_PINNED_MEM:
            writer.commit_only_if(self._lock.require_ours)
        if refusal is not None:
            writer.refuse(refusal)
        result: Future[Any] | AsyncSaveResponse | None = None
        if async_mode is AsyncMode.DISABLED:
            enter(
                lambda state, writer: dcp.save(
                    state, storage_writer=writer, checkpoint_id=checkpoint_id
                ),
                state_dict,
                writer,
            )
        elif async_mode is AsyncMode.ASYNC:
            result = enter(
                lambda state, writer: dcp.async_save(
                    state,
                    storage_writer=writer,
                    checkpoint_id=checkpoint_id,
                    process_group=self.pg,
                ),
                state_dict,
                writer,
            )
        else:
            result = self._pinned_session().async_save(writer, checkpoint_id)
        if enable_garbage_collection:
            GarbageCollection.collect("after the checkpoint was handed over")
        return result

    def dcp_load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,
        from_quantized: bool,
    ) -> None:
        """Fill ``state_dict`` in place, and with it the objects it came from."""
        if from_hf or from_quantized:
            raise ValueError("Loading from Hugging Face format is not available yet.")
        verification = self._reading
        if verification is None or verification.path != checkpoint_id:
            verification = self._verification(Source(path=checkpoint_id))
        dcp.load(state_dict, checkpoint_id=checkpoint_id, **reading_through(verification))
        # Stateful objects were restored by DCP; the model's entries are bare tensors to it.
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    @property
    def _is_async(self) -> bool:
        return self.async_mode is not AsyncMode.DISABLED

    def _prewarm(self, asked: str) -> None:
        if self.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM:
            self.async_mode = self._pinned_session().prewarm(self._flattened_model_states_sd)

    def _settle(
        self, save: Due, earlier: CheckpointSaveError | None, captured: None
    ) -> tuple[Verdict, None]:
        if self.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM:
            state_of = None if save.is_last else self._flattened_model_states_sd
            verdict = self._pinned_session().settle(earlier, state_of)
            if not verdict.can_stage:
                self.async_mode = AsyncMode.DISABLED
            return verdict, None
        if self.async_mode is AsyncMode.ASYNC:
            earlier = agree(earlier, self._settling_group)
            if type(earlier) is CheckpointSaveError and self._settling_group is not self.pg:
                # It is over on all ranks; one that gave up there has closed it for all of them.
                self.pg = renewed(self.pg, self.timeout_seconds)
        # Without either, no save is ever in flight, and DCP has told all ranks of what failed.
        return Verdict(earlier, can_stage=self._is_async), None

    def _write(self, save: Due, payload: None) -> "Future[Any] | None":
        if not save.is_last:
            return self._dispatch(save.path)
        self._save_last_step(save.step)
        return None

    def _dispatch(self, checkpoint_id: str) -> "Future[Any] | None":
        if self._is_async:
            GarbageCollection.collect("before staging a checkpoint")
        if self.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM:
            state, refusal = self._pinned_session().prepared, None
        else:
            state, refusal = taken(self._flattened_model_states_sd)
        result = self.dcp_save(
            state,
            checkpoint_id,
            self.async_mode,
            # Once is enough, and not beside a copy that training will wait for.
            enable_garbage_collection=not self._is_async,
            refusal=refusal,
        )
        if isinstance(result, AsyncSaveResponse):
            self.staging_future = result.staging_completion
            return result.upload_completion
        return result

    def _save_last_step(self, curr_step: int) -> None:
        checkpoint_id = self._create_checkpoint_id(curr_step)
        if not self.last_save_model_only:
            logger.info(f"Saving the full state after the last step, {curr_step}.")
            state, refusal = taken(self._flattened_model_states_sd)
            self.dcp_save(state, checkpoint_id, AsyncMode.DISABLED, refusal=refusal)
            return
        logger.info(
            f"Saving only the model, in {self.export_dtype}, after the last step, {curr_step}."
        )
        state, refusal = taken(
            lambda: cast_for_export(self.states[MODEL].state_dict(), self.export_dtype)
        )
        self.dcp_save(
            state,
            checkpoint_id,
            AsyncMode.DISABLED,
            enable_garbage_collection=True,
            to_hf=self.last_save_in_hf,
            refusal=refusal,
        )

    def _load(self, step: int) -> bool:
        start = self._choose_start(step)
        logger.info(start.line)
        source = start.source
        if source is None:
            return False
        self._reading = None if source.from_hf else self._verification(source)
        try:
            restore(
                source,
                self._states_to_load(source.model_only),
                lambda wanted: self.dcp_load(
                    wanted, source.path, source.from_hf, source.from_quantized
                ),
                states=self.states,
                excluded=self.exclude_from_loading,
                group=self.pg,
                verification=self._reading,
            )
        finally:
            self._reading = None  # what lies there may be another checkpoint one day
        return True

    def _maybe_wait_for_staging(self) -> None:
        if self.staging_future is None:
            return
        future, self.staging_future = self.staging_future, None
        await_staging(future, self.async_mode, self._report, self.timeout_seconds)

    def _wait_for_saving(self) -> None:
        if self.async_mode is AsyncMode.DISABLED:
            raise RuntimeError("A save is in flight although async_mode is disabled.")
        wait_for_saving(self, self.async_mode)

    def _close(self) -> None:
        try:
            if not self._gave_up:  # which was raised already
                self.maybe_wait_for_saving()
        finally:
            self._stop_purging()
            for stager in (self._pinned, self._copying_stager):
                if stager is not None:
                    stager.close()
            self._pinned = self._copying_stager = None
