"""What every checkpoint manager has in common: when, where, which; only the bytes differ.

The public methods own the check for a disabled manager and the trace spans; a manager for a
certain backend overrides the hooks with an underscore, never the public methods.

    save -> _save:  wait for the previous save -> settle history -> retention -> write
    load -> _load:  _choose_start (rank 0 decides, every rank follows) -> read
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed

from torchtitan.components.checkpointer import discovery
from torchtitan.components.checkpointer.agreement import rank_zero_decides
from torchtitan.components.checkpointer.discovery import Finder, Kind, OwnFolder
from torchtitan.components.checkpointer.formats import Format, other_finders
from torchtitan.components.checkpointer.history import supersede, supersede_newer
from torchtitan.components.checkpointer.rank_state import RankState
from torchtitan.components.checkpointer.retention import plan_purge, purge_thread
from torchtitan.components.checkpointer.schedule import SaveSchedule
from torchtitan.components.checkpointer.settings import CheckpointSettings, violations
from torchtitan.components.checkpointer.source import find_start, Request, Start
from torchtitan.components.checkpointer.state import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    ModelWrapper,
    OPTIMIZER,
    RANK_STATE,
    TRAIN_STATE,
)
from torchtitan.components.checkpointer.storage import CheckpointStorage, MovingStorage
from torchtitan.components.checkpointer.waiting import explanation, within
from torchtitan.config import Configurable, TORCH_DTYPE_MAP
from torchtitan.config.violations import is_collecting, reject
from torchtitan.observability import structured_logger as sl
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

__all__ = [
    "BaseCheckpointManager",
    "CheckpointStorage",
    "DATALOADER",
    "LR_SCHEDULER",
    "MODEL",
    "ModelWrapper",
    "OPTIMIZER",
    "TRAIN_STATE",
    "purge_thread",
]


_FIRST_STEP_IGNORED = "checkpoint.load_only is True; enable_first_step_checkpoint will be ignored."


class BaseCheckpointManager(Configurable, ABC):
    """Saves and loads the state of a run; see the hooks for what a backend supplies."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointSettings):
        def __post_init__(self) -> None:
            if self.initial_load_path is not None:
                self.initial_load_path = self.initial_load_path.strip()
            for violation in violations(self):
                reject(violation)
            if is_collecting():
                return  # the copies that parsing and building make say nothing new
            if self.load_only and self.enable_first_step_checkpoint:
                logger.warning(_FIRST_STEP_IGNORED)
            if self.initial_load_model_only and not self.initial_load_path:
                logger.warning(
                    "initial_load_model_only=True has no effect without an initial_load_path."
                )

    FORMAT: ClassVar[Format | None] = None
    """How its checkpoints are told from those of other back ends; see formats.py."""

    enable: bool
    folder: str
    keep_latest_k: int
    save_future: "Future[Any] | None"
    _storage: MovingStorage
    timeout_seconds: float = 600
    blocked_seconds: float = 0.0
    """What saving has cost the training thread so far: the saves themselves and the waits for them."""

    _is_counting: bool = False
    # Queued for deletion: a directory that is half gone must not be taken for a save that died.
    _expiring: frozenset[str] = frozenset()

    def __init__(
        self, config: Config, *, storage: MovingStorage, base_folder: str, sd_adapter: Any
    ) -> None:
        # Before anything else: an object that is refused here has nothing to close.
        if config.enable and config.last_save_in_hf and sd_adapter is None:
            raise ValueError(
                "checkpoint.last_save_in_hf needs a state dict adapter, but this model has none; "
                "switch the option off."
            )
        self.enable = config.enable
        if not self.enable:
            return
        self._storage = storage
        self.folder = filesystem.join(base_folder, config.folder)
        self.interval = config.interval
        self.initial_load_path = config.initial_load_path
        self.initial_load_model_only = config.initial_load_model_only
        self.initial_load_in_hf = config.initial_load_in_hf
        self.initial_load_in_hf_quantized = config.initial_load_in_hf_quantized
        self.last_save_model_only = config.last_save_model_only
        self.last_save_in_hf = config.last_save_in_hf
        self.export_dtype = TORCH_DTYPE_MAP[config.export_dtype]
        self.keep_latest_k = config.keep_latest_k
        self.exclude_from_loading = config.exclude_from_loading
        self.enable_first_step_checkpoint = config.enable_first_step_checkpoint
        self.load_only = config.load_only
        self.timeout_seconds = config.timeout_seconds
        self.sd_adapter = sd_adapter
        if self.load_only and self.enable_first_step_checkpoint:
            # Said here too, because a config made by the command line says nothing itself.
            logger.warning(_FIRST_STEP_IGNORED)
        self.save_future = None
        self._loaded_step: int | None = None
        self._history_settled = False
        self.purge_queue: queue.Queue[str | None] = queue.Queue()
        self.purge_thread: threading.Thread | None = None
        if self.keep_latest_k > 0 and not self.load_only:
            self.purge_thread = threading.Thread(
                target=purge_thread, args=(self.purge_queue, self._storage.remove), daemon=True
            )
            self.purge_thread.start()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception as error:
            # Whoever needed this error should have called close().
            logger.warning(f"Closing an abandoned checkpoint manager failed: {error}")

    def load(self, step: int = -1) -> bool:
        """Restore the checkpoint of ``step``, or for -1 whatever the run should begin from.

        Returns:
            Whether anything was loaded.

        Raises:
            CheckpointError: nothing fits the request, or it cannot be read, or it holds other
                state. All ranks raise.
        """
        if not self.enable:
            return False
        what = "Loading a checkpoint"
        with sl.log_trace_span("checkpoint_load"), within(self.timeout_seconds, what):
            if not self._load(step):
                return False
            # Last of all: loading draws random numbers, and this sets the generators.
            rank_state = getattr(self, "states", {}).get(RANK_STATE)
            if isinstance(rank_state, RankState):
                rank_state.restore_last(self._loaded_step or 0)
            return True

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save after ``curr_step`` if a save is due.

        Returns:
            Whether a checkpoint was written, or its writing begun.

        Raises:
            CheckpointSaveError: this save failed, or the previous one did in the background.
        """
        if not self.enable:
            return False
        with sl.log_trace_span("checkpoint_save"), self._counted():
            return self._save(curr_step, last_step)

    def maybe_wait_for_staging(self) -> None:
        """Block while a save still reads the parameters; call it before they change."""
        if self.enable:
            with self._counted():
                self._maybe_wait_for_staging()

    def maybe_wait_for_saving(self) -> None:
        """Block until the save in flight is durable, and raise its error."""
        if self.enable and self.save_future is not None:
            with self._counted():
                self._wait_for_saving()

    def close(self) -> None:
        """Finish the save in flight and the deletions, then raise what went wrong."""
        if getattr(self, "enable", False):
            self._close()

    def newest_checkpoint(self) -> str | None:
        """Path of the checkpoint a restart goes on from, the newest full one, or None."""
        return self._own_folder().resume_path() if self.enable else None

    def exported_checkpoint(self) -> str | None:
        """Path of the newest complete checkpoint if it holds only weights, else None."""
        step = self._own_folder().export_step() if self.enable else -1
        return None if step == -1 else self._create_checkpoint_id(step)

    def is_finished(self, last_step: int) -> bool:
        """Whether the export of a run of ``last_step`` steps is there already. Collective."""
        if not self.enable:
            return False
        with within(self.timeout_seconds, f"Looking into {self.folder}"):
            return rank_zero_decides(lambda: self._own_folder().export_step() >= last_step)

    @contextmanager
    def _counted(self) -> Generator[None]:
        """Add the time of the block to ``blocked_seconds``; a block within another one counts once."""
        if self._is_counting:
            yield
            return
        self._is_counting, started_at = True, time.monotonic()
        try:
            yield
        finally:
            self._is_counting = False
            self.blocked_seconds += time.monotonic() - started_at

    @abstractmethod
    def _load(self, step: int) -> bool: ...

    @abstractmethod
    def _save(self, curr_step: int, last_step: bool) -> bool: ...

    @abstractmethod
    def _maybe_wait_for_staging(self) -> None: ...

    @abstractmethod
    def _wait_for_saving(self) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...

    @abstractmethod
    def _parse_step(self, filename: str) -> tuple[int, bool] | None:
        """The step that a directory name stands for and whether it is a staging name."""

    @abstractmethod
    def _is_valid_checkpoint(self, checkpoint_id: str) -> bool:
        """Whether the completion marker of this backend is in the directory."""

    def _kind_of(self, checkpoint_id: str) -> Kind:
        """What a complete checkpoint holds; a backend that can tell overrides this."""
        return Kind.FULL

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        schedule = SaveSchedule(
            interval=self.interval,
            first_step=self.enable_first_step_checkpoint,
            load_only=self.load_only,
        )
        return schedule.is_due(curr_step, last_step=last_step)

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return filesystem.join(folder or self.folder, discovery.step_name(step))

    def _finder(self) -> Finder:
        return Finder(
            storage=self._storage,
            parse=self._parse_step,
            is_complete=self._is_valid_checkpoint,
            kind_of=self._kind_of,
            backend=self.FORMAT.backend if self.FORMAT else type(self).__name__,
            others=other_finders(self.FORMAT, self._storage, self._full_keys()),
        )

    def _full_keys(self) -> frozenset[str]:
        """The state keys of which a full checkpoint holds some, and one of weights none."""
        states = getattr(self, "states", {})
        return frozenset(key for key, it in states.items() if key != MODEL and it is not None)

    def _own_folder(self) -> OwnFolder:
        return self._finder().look_into(self.folder)

    def _find_load_step(self, folder: str = "") -> int:
        """The newest complete step of this back end in ``folder`` (default: the own one), or -1."""
        return max(self._finder().look_into(folder or self.folder).own_steps(), default=-1)

    def _choose_start(self, step: int) -> Start:
        """What to load, and the line to log about it; the same on all ranks."""
        request = Request(
            load_step=step,
            initial_load_path=self.initial_load_path,
            initial_load_model_only=self.initial_load_model_only,
            initial_load_in_hf=self.initial_load_in_hf,
            initial_load_in_hf_quantized=self.initial_load_in_hf_quantized,
            hf_assets_path=getattr(self.sd_adapter, "hf_assets_path", None),
        )

        start = rank_zero_decides(lambda: find_start(request, self._own_folder(), self._finder()))
        # The run counts its steps from 0 when it takes over only weights (a seed has no more), or
        # everything but the step: whatever is beyond then belongs to another history.
        counts_on = TRAIN_STATE not in self.exclude_from_loading
        source = start.source
        self._loaded_step = source.step or 0 if source is not None and counts_on else 0
        self._history_settled = False
        return start

    def _make_ready(
        self,
        checkpoint_id: str,
        group: "torch.distributed.ProcessGroup | None",
        *,
        with_retention: bool,
    ) -> None:
        """Get the folder ready for a save: rank 0 acts, and an error there is one on all ranks.

        Call it while no save is in flight. Histories are settled first: retention must not count
        the checkpoints of a future that this run has left.
        """

        def act() -> list[str]:
            moved = self._leave_other_history()
            if with_retention:
                self._purge_stale_checkpoints(is_save_in_flight=False)
            self._clear_staging(checkpoint_id)
            if self._storage.isdir(checkpoint_id):
                if self._finder().is_complete_for_any(checkpoint_id):
                    moved.append(supersede(self._storage, self.folder, checkpoint_id))
                else:
                    self._remove_abandoned(checkpoint_id)
            return moved

        for path in rank_zero_decides(act, group):
            logger.warning(
                f"Moved a checkpoint that this run does not build on to {path}. Nothing deletes "
                "it there; move it back to use it again."
            )
        self._history_settled = True

    def _clear_staging(self, checkpoint_id: str) -> None:
        """Remove what an earlier save left where this one is staged; nothing for one written in place."""

    def _leave_other_history(self) -> list[str]:
        if self._history_settled or self._loaded_step is None:
            return []
        steps = self._finder().complete_steps(self.folder)
        return supersede_newer(self._storage, self.folder, steps, than=self._loaded_step)

    def _should_purge(self) -> bool:
        return (
            self.keep_latest_k > 0
            and torch.distributed.get_rank() == 0
            and self._storage.isdir(self.folder)
        )

    def _purge_stale_checkpoints(self, *, is_save_in_flight: bool = True) -> None:
        """Queue expired checkpoints for deletion, and delete at once what died; rank 0 only."""
        if not self._should_purge():
            return
        found = discovery.find_steps(self._storage, self.folder, parse=self._parse_step)
        purge = plan_purge(
            [entry for entry in found if entry[1] not in self._expiring],
            self.keep_latest_k,
            is_save_in_flight=is_save_in_flight,
            is_complete=self._finder().is_complete_for_any,
        )
        for path in purge.abandoned:
            self._remove_abandoned(path)
        self._expiring |= frozenset(purge.expired)
        for path in purge.expired:
            self.purge_queue.put(path)

    def _remove_abandoned(self, path: str) -> None:
        try:
            self._storage.remove(path)
            logger.info(f"Deleted {path}, left behind by a save that did not finish.")
        except Exception as error:
            logger.warning(f"Could not delete the unfinished checkpoint {path}: {error}.")

    def _stop_purging(self) -> None:
        """Delete what is queued, then end the thread; give up after the limit."""
        if self.purge_thread is not None and self.purge_thread.is_alive():
            self.purge_queue.put(None)
            self.purge_thread.join(self.timeout_seconds)
            if self.purge_thread.is_alive():
                # A daemon: it does not keep the process from ending.
                logger.warning(
                    f"Deleting expired checkpoints from {self.folder} was given up: "
                    f"{explanation(self.timeout_seconds)} What is left is deleted by a later run."
                )
