"""One save, in the order that both managers keep; they supply how it is settled and written.

Training goes on beside a save, so how it ended is known only later: looked for after each step without
waiting, waited for before the next save, and there agreed on by all ranks before one of them begins.

    step without a save -> has the one in flight failed? -> prewarm
    step with a save    -> wait for it -> _settle (all ranks agree) -> failures.py: does the run go on?
                                       -> _make_ready -> _write -> durable, or in flight
"""

import time
from abc import abstractmethod
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchtitan.components.checkpointer.agreement import gather
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.checkpointer.endings import Verdict
from torchtitan.components.checkpointer.errors import (
    CheckpointSaveError,
    CheckpointSaveTimeoutError,
)
from torchtitan.components.checkpointer.failures import FailedSaves
from torchtitan.components.checkpointer.in_flight import failure_of, saving, told_as_save_error
from torchtitan.components.checkpointer.pinned.meeting import OtherRankFailedError
from torchtitan.components.checkpointer.save_report import SaveReport
from torchtitan.components.checkpointer.storage import MovingStorage
from torchtitan.distributed.failure import is_echo
from torchtitan.distributed.utils import patience
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import logger


class SavingManager(BaseCheckpointManager):
    """A manager whose saves may be in flight while training goes on."""

    BACKEND_IN_TRACES: str
    """What measures its saves in the trace."""

    _failed: FailedSaves
    _settling_group: "dist.ProcessGroup | None" = None
    """Where the training threads meet before a save, even while another one is still in the background."""

    def __init__(
        self,
        config: BaseCheckpointManager.Config,
        *,
        storage: MovingStorage,
        base_folder: str,
        sd_adapter: Any,
    ) -> None:
        super().__init__(config, storage=storage, base_folder=base_folder, sd_adapter=sd_adapter)
        if self.enable:
            self._gave_up = False
            self._failed = FailedSaves(
                goes_on=self.on_save_failure == "warn", limit=self.max_failed_saves
            )

    @abstractmethod
    def _prewarm(self, asked: str) -> None:
        """Make what can be made for the first save while none is due; called after each such step.

        Args:
            asked: begins the error that tells what failed.
        """

    @abstractmethod
    def _settle(
        self, asked: str, earlier: CheckpointSaveError | None, curr_step: int, last_step: bool
    ) -> tuple[Verdict, Any]:
        """Agree with all ranks how the previous save ended, and take what this one needs. Collective.

        Args:
            asked: begins the error that tells what failed.
            earlier: how it ended on this rank.

        Returns:
            What all ranks have agreed on, and what ``_write`` gets to write.
        """

    @abstractmethod
    def _write(self, checkpoint_id: str, payload: Any, curr_step: int, last_step: bool) -> None:
        """Write, or begin to and leave the rest to ``save_future``; ``_report`` follows it. Collective."""

    @property
    @abstractmethod
    def _is_async(self) -> bool: ...

    def _save(self, curr_step: int, last_step: bool) -> bool:
        if not self._should_save(curr_step, last_step):
            self._look_back()
            if not self.load_only:
                self._look_ahead(curr_step)
            return False
        sl.add_step_tag("checkpoint_save")
        due_at, limit_seconds = time.monotonic(), self.timeout_seconds
        checkpoint_id = self._create_checkpoint_id(curr_step)
        asked = saving(curr_step, checkpoint_id)
        earlier = self._end_of_previous()
        try:
            with (
                told_as_save_error(asked, limit_seconds, earlier, folder=self.folder),
                patience(timedelta(seconds=limit_seconds)),
            ):
                verdict, payload = self._settle(asked, earlier, curr_step, last_step)
                is_late = isinstance(verdict.failure, CheckpointSaveTimeoutError)
                ending = self._failed.settled(
                    verdict.failure, is_excused=verdict.is_excused, newest_step=self._newest_step()
                )
                # After the last step the last chance to keep the work comes first; but nothing begins
                # beside a save that may still be running.
                may_begin = (ending is None or last_step) and not is_late
                if may_begin:
                    self._begin(checkpoint_id, payload, curr_step, last_step, due_at)
        except CheckpointSaveError as failure:
            ending = failure
            if not last_step and not is_out_of_step(failure):
                ending = self._failed.failed(failure, newest_step=self._newest_step())
            if ending is not None:
                if self._failed.unsettled is not None:  # told with it
                    self._failed.unsettled.was_raised = True
                raise ending
            return False
        if not may_begin and last_step:
            ending = ending or verdict.failure
        elif last_step and ending is not None and self._failed.goes_on:
            logger.warning(f"{ending} The last save is complete.")
            ending = None
        if ending is not None:
            raise ending
        return may_begin

    def _look_ahead(self, curr_step: int) -> None:
        asked = f"Preparing after step {curr_step} for saves into {self.folder}"
        try:
            with told_as_save_error(asked, self.timeout_seconds):
                self._prewarm(asked)
        except CheckpointSaveError as failure:
            if not self._failed.goes_on or is_out_of_step(failure):
                raise
            # No save has failed yet; one that fails in this way counts.
            logger.warning(f"{failure} It is tried again with the first save.")

    def _end_of_previous(self) -> CheckpointSaveError | None:
        """How the save in flight ended on this rank, once it has, or one that no save has settled since."""
        failure = failure_of(self.maybe_wait_for_saving, bears_late=self._failed.goes_on)
        if isinstance(failure, CheckpointSaveTimeoutError):
            return failure  # told anew by each wait, until it is over
        if failure is not None:
            self._failed.unsettled = failure
        return self._failed.unsettled

    def _look_back(self) -> None:
        """Raise what the save in flight has failed with, if it has by now; never waits.

        After a step, and not in the middle of one: its save, which may be the last, would not be tried.
        """
        future = self.save_future
        # What only answers like a future is asked before the next save.
        if not isinstance(future, Future) or not future.done():
            return
        if future.cancelled() or future.exception() is None:
            return
        failure = self._end_of_previous()
        if failure is None or isinstance(failure, CheckpointSaveTimeoutError):
            return
        if (ending := self._failed.seen(failure)) is not None:
            raise ending

    def _has_lost(self, step: int) -> bool:
        if not self._failed.is_open or self._report is None or self._report.step != step:
            return False
        return any(gather(self._end_of_previous() is not None, self._settling_group))

    def _newest_step(self) -> int | None:
        return None if self.newest_good is None else self.newest_good[0]

    def _begin(
        self, checkpoint_id: str, payload: Any, curr_step: int, last_step: bool, due_at: float
    ) -> None:
        is_background = self._is_async and not last_step
        self._report = SaveReport(
            curr_step,
            checkpoint_id,
            self._storage,
            background=is_background,
            is_speaker=not dist.is_initialized() or dist.get_rank() == 0,
            due_at=due_at,
            backend=self.BACKEND_IN_TRACES,
        )
        # Nothing expires with the last save: no later one needs the space.
        self._make_ready(checkpoint_id, self.pg, with_retention=not last_step)
        self._report.dispatched()
        self._doubtful |= {checkpoint_id}
        self._write(checkpoint_id, payload, curr_step, last_step)
        if self.save_future is None:
            self._doubtful -= {checkpoint_id}
            self._failed.succeeded()
        else:
            self._failed.is_open = True


def is_out_of_step(failure: CheckpointSaveError) -> bool:
    """Whether the ranks may stand at different places after ``failure``, so that no save can follow."""
    # What DCP, or a rank in its own words, has told all of them is no such thing, nor is the error of a disk.
    cause = failure.__cause__
    is_felt = isinstance(cause, RuntimeError) and not isinstance(cause, OtherRankFailedError)
    return isinstance(failure, CheckpointSaveTimeoutError) or (is_felt and is_echo(failure))
