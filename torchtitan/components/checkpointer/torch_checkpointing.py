"""Checkpoints in the format of torch_checkpointing.

Every rank writes its share of the state, one file per item, into ``tmp_step-<n>``; when all have
written, rank 0 gives the directory its name. Training waits for nothing but a copy into shared memory,
and for that only where it is not done when the optimizer wants to step; a process of each rank writes it.

    [_captured: the state is taken, and a thread goes on beside training]
    _settle -> hand_over (the ranks agree on who writes what) -> _write -> Backend.save -> writer process
    last step: _write -> end of the background -> a synchronous Backend.save -> step-<n>
    _load -> _choose_start -> tc/reading.restore -> Backend.load (tensors) -> the states

Every file is hashed as it is written and checked as it is read (tc/checked_storage.py).

What of the library is changed, and why, is in tc/library.py; what it is asked for is in tc/defaults.py.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.storage.base_storage import StorageConfig

from torchtitan.components.checkpointer.agreement import own_group
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.checkpointer.discovery import Kind
from torchtitan.components.checkpointer.endings import Verdict
from torchtitan.components.checkpointer.errors import (
    CheckpointSaveError,
    CheckpointSaveTimeoutError,
)
from torchtitan.components.checkpointer.formats import TORCH_CHECKPOINTING
from torchtitan.components.checkpointer.in_flight import saving, told_as_save_error, wait_for_saving
from torchtitan.components.checkpointer.integrity.manifest import Head, head_of
from torchtitan.components.checkpointer.modes import AsyncMode
from torchtitan.components.checkpointer.saving import Due, SavingManager
from torchtitan.components.checkpointer.state import (
    cast_for_export,
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    ModelWrapper,
    OPTIMIZER,
)
from torchtitan.components.checkpointer.tc import index
from torchtitan.components.checkpointer.tc.capture import capture, Captured, could_capture
from torchtitan.components.checkpointer.tc.checked_storage import CheckedStorage
from torchtitan.components.checkpointer.tc.defaults import (
    default_backend_config as _default_backend_config,
    DEFAULT_TORCH_CHECKPOINTING_BARRIER_TCPSTORE_PORT,
    for_this_run,
    item_specs as _item_specs,
    require_local,
    with_sync_save as _with_sync_save,
)
from torchtitan.components.checkpointer.tc.events import (
    BACKEND_LOGGER_NAME as _BACKEND_LOGGER_NAME,
    init_subprocess_logging as _init_subprocess_logging,
    stamp,
)
from torchtitan.components.checkpointer.tc.handover import hand_over, Handover, Prepare
from torchtitan.components.checkpointer.tc.index import step_dir_pattern as _step_dir_pattern
from torchtitan.components.checkpointer.tc.library import Backend, BackendConfig, on_this_rank
from torchtitan.components.checkpointer.tc.machine import carried_out_here
from torchtitan.components.checkpointer.tc.payload import Items, items_of
from torchtitan.components.checkpointer.tc.reading import (
    restore,
    restore_state_dict as _restore_state_dict,
)
from torchtitan.components.checkpointer.tc.storage import (
    BackendCheckpointStorage as _BackendCheckpointStorage,
    DurableStorageConfig,
)
from torchtitan.distributed.utils import patience
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

__all__ = [
    "DEFAULT_TORCH_CHECKPOINTING_BARRIER_TCPSTORE_PORT",
    "TorchCheckpointingManager",
    "_BACKEND_LOGGER_NAME",
    "_BackendCheckpointStorage",
    "_default_backend_config",
    "_init_subprocess_logging",
    "_item_specs",
    "_restore_state_dict",
    "_step_dir_pattern",
    "_with_sync_save",
]


class TorchCheckpointingManager(SavingManager):
    """Saves and loads a run through torch_checkpointing."""

    FORMAT = TORCH_CHECKPOINTING
    BACKEND_IN_TRACES = TORCH_CHECKPOINTING.backend

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """Nothing beyond what both managers share: saves are asynchronous wherever the machine can."""

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
        storage_config: StorageConfig | None = None,
    ) -> None:
        """Take over ``states`` (updated in place) and the objects a run consists of. Collective.

        Args:
            states: further entries of the checkpoint by key.
            sd_adapter: converts to other formats, or None.
            base_folder: what a relative ``config.folder`` is relative to.
            storage_config: where the library reads and writes; None is local files, made durable.

        Raises:
            ValueError: a setting needs something that is not there.
        """
        chosen_storage = storage_config or DurableStorageConfig()
        # Before anything is there that would have to be closed.
        backend_config = _backend_config(config, states, chosen_storage) if config.enable else None
        self._backend_storage = chosen_storage.create_storage()
        super().__init__(
            config,
            storage=_BackendCheckpointStorage(self._backend_storage),
            base_folder=base_folder,
            sd_adapter=sd_adapter,
        )
        if backend_config is None:
            return
        states |= {
            MODEL: ModelWrapper(model_parts),
            OPTIMIZER: optimizers,
            DATALOADER: dataloader,
            LR_SCHEDULER: lr_schedulers,
        }
        self.states = states
        self._prewarmed = False
        self._all_can_capture = False
        self.pg = own_group(self.timeout_seconds) if dist.is_initialized() else None
        self._settling_group = self.pg
        self._manager_config: BackendConfig = self._with_stager(backend_config)
        self._stager = self._manager_config.stager
        self._temp_dir_prefix = self._manager_config.save.writer_config.temp_dir_prefix
        self._step_dir_pattern = _step_dir_pattern(self._temp_dir_prefix)
        self._manager: Backend = self._manager_config.build()

    def _with_stager(self, config: Any) -> BackendConfig:
        """``config`` with what carries out its kind of saving; said in one line."""
        return carried_out_here(
            config, lambda: self.states, group=self.pg, limit_seconds=self.timeout_seconds
        )

    def _parse_step(self, filename: str) -> tuple[int, bool] | None:
        return index.parse_entry(filename, self._step_dir_pattern)

    def _is_valid_checkpoint(self, checkpoint_id: str) -> bool:
        return index.is_complete(self._storage, checkpoint_id)

    def _kind_of(self, checkpoint_id: str) -> Kind:
        return index.kind_of(self._storage, checkpoint_id, self._full_keys())

    def _clear_staging(self, checkpoint_id: str) -> list[str]:
        folder, _, name = checkpoint_id.rpartition("/")
        staging_id = f"{folder}/{self._temp_dir_prefix}{name}"
        # What a deletion has left there that was cut short may be queued, and would go while it is written.
        self._deletions.withdraw(staging_id, self._left_seconds)
        # Files of ranks that are no more would become part of the checkpoint.
        return self._clear_leftover(staging_id) if self._storage.isdir(staging_id) else []

    @property
    def _is_async(self) -> bool:
        return isinstance(self._manager_config.save, AsyncCheckpointSaverConfig)

    def _captured(self) -> Captured | None:
        # A rank that does it by itself waits in its save for the folder, and the others in a forward pass for
        # that rank, where they have less patience. So all have told each other before that they can.
        if not (self._all_can_capture and self._is_async and self._stager is not None):
            return None
        # They may be apart by what they have waited for the previous save.
        with patience(timedelta(seconds=self.timeout_seconds)):
            return capture(self.states, self._stager)

    def _could_capture(self) -> bool:
        return self._is_async and self._stager is not None and could_capture(self.states)

    def _settle(
        self, save: Due, earlier: CheckpointSaveError | None, captured: Captured | None
    ) -> tuple[Verdict, dict[str, Any]]:
        stamp(save.step)
        stager = self._stager if self._is_async and not save.is_last else None
        prepare: Prepare | None = None
        if stager is not None:
            taken_at = None if captured is None else captured.taken_at
            prepare = partial(stager.prepare, taken_at=taken_at)
        handed = self._hand_over(
            save.asked,
            earlier,
            take=partial(self._take, save.is_last) if captured is None else captured.items,
            prepare=prepare,
            can_capture=captured is not None or (not save.is_last and self._could_capture()),
        )
        return handed.verdict, handed.payload

    def _write(self, save: Due, payload: dict[str, Any]) -> "Future[Any] | None":
        if save.is_last:
            self._announce_last_save(save.step)
            self._go_synchronous()
        is_full = not (save.is_last and self.last_save_model_only)
        self._manager.head = self._head_of(save.step, is_full=is_full)
        if self._lock is not None:
            self._manager.may_publish = self._lock.require_ours
        # Once, and not beside the copy: training waits for it. What this save leaves, the next one collects.
        if self._is_async and not save.is_beside:
            GarbageCollection.collect("before staging a checkpoint")
        in_flight = self._manager.save(save.path, payload)
        if in_flight is None:
            GarbageCollection.collect("after the checkpoint was written")
        return in_flight

    def _take(self, last_step: bool) -> Items:
        if not (last_step and self.last_save_model_only):
            return items_of(self.states)
        items = items_of({MODEL: self.states[MODEL]})
        weights = cast_for_export(items.values[MODEL], self.export_dtype)
        return Items({MODEL: weights}, items.digests)

    def _prewarm(self, asked: str) -> None:
        if not self._prewarmed and self._is_async:
            self._join()
            self._prewarmed = True
            prepare = self._manager.prewarm_staging
            can_capture = self._could_capture()
            take = partial(self._take, False)
            self._hand_over(asked, None, take=take, prepare=prepare, can_capture=can_capture)

    def _hand_over(
        self,
        asked: str,
        failure: CheckpointSaveError | None,
        *,
        take: Callable[[], Items],
        prepare: Prepare | None,
        can_capture: bool,
    ) -> Handover:
        """What this rank is to write; and how the previous save ended, as all ranks see it."""
        handed = hand_over(
            take,
            self._manager,
            self._stager if self._is_async else None,
            prepare=prepare,
            earlier=failure,
            group=self.pg,
            asked=asked,
            can_capture=can_capture,
        )
        self._all_can_capture = handed.can_capture
        is_late = isinstance(handed.verdict.failure, CheckpointSaveTimeoutError)
        if self._is_async and not is_late:
            self._manager.forget_failure()
            if not handed.verdict.can_stage:
                self._go_synchronous()
        return handed

    def _go_synchronous(self) -> None:
        """End what saves in the background, which is idle, and go on with saves that training waits for."""
        self._close_backend()
        self._manager_config = on_this_rank(
            _with_sync_save(self._manager_config),
            group=self.pg,
            stager=None,
            metadata=self._manager.metadata,
        )
        self._manager = self._manager_config.build()

    def _announce_last_save(self, curr_step: int) -> None:
        if self.last_save_model_only:
            what = f"Saving only the model, in {self.export_dtype},"
        else:
            what = "Saving the full state"
        logger.info(f"{what} after the last step, {curr_step}.")

    def _head_of(self, curr_step: int, *, is_full: bool) -> Head | None:
        """How the manifest of a save begins; None would save without one."""
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        kind = "full" if is_full else "model_only"
        backend = TORCH_CHECKPOINTING.backend
        return head_of(curr_step, kind, backend, world_size, self._run)

    def _load(self, step: int) -> bool:
        start = self._choose_start(step)
        logger.info(start.line)
        source = start.source
        if source is None:
            return False
        if source.from_hf or source.from_quantized:
            raise ValueError("Loading from Hugging Face format is not available yet.")
        verification = self._verification(source)
        self._manager.check_with(verification)
        try:
            restore(
                source,
                self.states,
                lambda into: self._manager.load(source.path, into=into, strict=True),
                storage=CheckedStorage(self._backend_storage, verification),
                excluded=self.exclude_from_loading,
                group=self.pg,
            )
        finally:
            self._manager.check_with(None)  # a manifest is large, and nothing else is read
        return True

    def _maybe_wait_for_staging(self) -> None:
        if self.save_future is None or self._report is None:
            return
        asked = saving(self._report.step, self._report.path)
        with (
            told_as_save_error(asked, self.timeout_seconds),
            sl.log_trace_span("checkpoint_wait_staging"),
            self._report.training_waits(),
        ):
            self._join()
            with self._manager.lock():
                pass  # It is free as soon as everything is copied.

    def _wait_for_saving(self) -> None:
        self._take_refused()
        wait_for_saving(self, AsyncMode.ASYNC_WITH_PINNED_MEM)

    def _close(self) -> None:
        try:
            if not self._gave_up:  # which was raised already
                self.maybe_wait_for_saving()
        finally:
            self._leave_thread()
            try:
                self._stop_purging()
            finally:  # a second Ctrl-C leaves no process behind
                self._close_backend()

    def _close_backend(self) -> None:
        stager, self._stager = self._stager, None
        try:
            self._manager.close()
        finally:
            if stager is not None:
                stager.close()


def _backend_config(
    config: TorchCheckpointingManager.Config, states: dict[str, Any], storage_config: StorageConfig
) -> Any:
    require_local(config.folder, config.initial_load_path)
    return for_this_run(
        _default_backend_config(),
        states,
        storage_config=storage_config,
        limit_seconds=config.timeout_seconds,
        load_only=config.load_only,
    )
