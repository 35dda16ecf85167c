"""What every checkpoint manager has in common: when, where, which; only the bytes differ.

The public methods own the check for a disabled manager and the trace spans; a manager for a
certain backend overrides the hooks with an underscore, never the public methods.

    save -> _save:  wait for the previous save -> settle history -> retention -> write
    load -> _load:  _choose_start (rank 0 decides, every rank follows) -> read; see starting.py
"""

import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from torchtitan.components.checkpointer.age import Age, CheckpointAge
from torchtitan.components.checkpointer.agreement import rank_zero_decides
from torchtitan.components.checkpointer.housekeeping import Housekeeping
from torchtitan.components.checkpointer.integrity.manifest import RunDescription
from torchtitan.components.checkpointer.rank_state import RankState
from torchtitan.components.checkpointer.retention import purge_thread
from torchtitan.components.checkpointer.save_report import SaveReport
from torchtitan.components.checkpointer.schedule import SaveSchedule
from torchtitan.components.checkpointer.settings import CheckpointSettings, violations
from torchtitan.components.checkpointer.starting import Starting
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
from torchtitan.components.checkpointer.waiting import within
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


class BaseCheckpointManager(Starting, Housekeeping, Configurable):
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

    enable: bool
    save_future: "Future[Any] | None"
    blocked_seconds: float = 0.0
    """What saving has cost the training thread so far: the saves themselves and the waits for them."""

    _is_counting: bool = False
    _age: CheckpointAge | None = None
    """None where nothing is saved."""

    _report: SaveReport | None = None

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
        self.keep_latest_k, self.keep_every = config.keep_latest_k, config.keep_every
        self.on_save_failure = config.on_save_failure
        self.max_failed_saves = config.max_failed_saves
        self.lock_timeout_seconds = config.lock_timeout_seconds
        self.exclude_from_loading = config.exclude_from_loading
        self.enable_first_step_checkpoint = config.enable_first_step_checkpoint
        self.load_only = config.load_only
        self.verify, self.on_damaged = config.verify, config.on_damaged
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
        if not self.load_only:
            self._age = CheckpointAge(self.interval)
        if self.keep_latest_k > 0 and not self.load_only:
            self._start_purging()

    def __del__(self) -> None:
        self._is_forgotten = True
        try:
            self.close()
        except Exception as error:
            # Whoever needed this error should have called close().
            logger.warning(f"Closing an abandoned checkpoint manager failed: {error}")

    def describe_run(self, run: RunDescription) -> None:
        """Take note of the settings and the layout of the run, which go into each of its checkpoints."""
        if self.enable:
            self._run = run

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
        self._join()
        self._claim_folder()
        what = "Loading a checkpoint"
        with (
            sl.log_trace_span("checkpoint_load"),
            within(self.timeout_seconds, what),
            self._nothing_is_deleted(),
        ):
            is_loaded = self._load_what_passes(step)
            if self._age is not None:
                self._age.began(self._loaded_step or 0 if is_loaded else 0)
            if not is_loaded:
                return False
            self._note_start()
            # Last of all: loading draws random numbers, and this sets the generators.
            rank_state = getattr(self, "states", {}).get(RANK_STATE)
            if isinstance(rank_state, RankState):
                rank_state.restore_last(self._loaded_step or 0)
            return True

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save after ``curr_step`` if a save is due.

        Returns:
            Whether a checkpoint was written, or its writing begun, by this call or beside training.

        Raises:
            CheckpointSaveError: this save failed, or the previous one did in the background.
            CheckpointInUseError: another run has the folder.
        """
        if not self.enable:
            return False
        with sl.log_trace_span("checkpoint_save"), self._counted():
            if self._may_claim and self._should_save(curr_step, last_step):
                self._claim_folder()
            is_saved = self._save(curr_step, last_step)
        self._watch_age(curr_step, is_saved=is_saved, last_step=last_step)
        return is_saved

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

    def has_lost(self, step: int) -> bool:
        """Whether a save of ``step`` was to be made and is lost, on any rank; waits for it. Collective.

        What it failed with in the background is raised by the next save.
        """
        if not self.enable:
            return False
        with self._counted():
            return self._has_lost(step)

    def close(self) -> None:
        """Finish the save in flight and the deletions, then raise what went wrong."""
        if getattr(self, "enable", False):
            try:
                self._close()
            finally:
                self._release_claim()

    @property
    def newest_good(self) -> tuple[int, float] | None:
        """The newest checkpoint a resume could use: its step, and since when on ``time.monotonic``."""
        return None if self._age is None else self._age.newest_good

    def checkpoint_age(self, step: int) -> Age | None:
        """What of the work up to ``step`` no checkpoint holds; None where nothing is saved."""
        return None if self._age is None else self._age.at(step)

    def newest_checkpoint(self) -> str | None:
        """Path of the checkpoint a restart goes on from, the newest full one, or None."""
        return self._own_folder().resume_path() if self.enable else None

    def has_saved(self, path: str) -> bool:
        """Whether ``path``, a complete checkpoint of the folder, is one that this run has saved."""
        # What was there under the name of a save has lost it before that begins.
        return self.enable and path in self._saved_paths

    def exported_checkpoint(self) -> str | None:
        """Path of the newest complete checkpoint if it holds only weights, else None."""
        own = self._own_folder() if self.enable else None
        step = -1 if own is None else own.export_step()
        return None if own is None or step == -1 else own.step_paths[step]

    def is_finished(self, last_step: int) -> bool:
        """Whether the export of a run of ``last_step`` steps is there already. Collective.

        Not when a look at its index and the sizes of its files shows that it is damaged.
        """
        if not self.enable:
            return False
        with within(self.timeout_seconds, f"Looking into {self.folder}"):
            return rank_zero_decides(lambda: self._has_export(last_step))

    def _watch_age(self, curr_step: int, *, is_saved: bool, last_step: bool) -> None:
        if self._age is None:
            return
        is_full = not (last_step and self.last_save_model_only)
        if is_saved and is_full and self._report is not None:
            self._report.tell(self._age.saved)
        warning = self._age.warning(curr_step, self.folder)
        if warning is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.warning(warning)

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
    def _save(self, curr_step: int, last_step: bool) -> bool: ...

    @abstractmethod
    def _maybe_wait_for_staging(self) -> None: ...

    @abstractmethod
    def _wait_for_saving(self) -> None: ...

    def _join(self) -> None:
        """Wait for what is done beside training to begin a save."""

    @abstractmethod
    def _close(self) -> None: ...

    def _has_lost(self, step: int) -> bool:
        return False  # for managers whose save is over when it returns

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        schedule = SaveSchedule(
            interval=self.interval,
            first_step=self.enable_first_step_checkpoint,
            load_only=self.load_only,
        )
        return schedule.is_due(curr_step, last_step=last_step)
