"""One save, in the order that both managers keep; they supply how it is settled and written.

Training goes on beside a save, so how it ended is known only later: looked for after each step without
waiting, waited for before the next save, and there agreed on by all ranks before one of them begins.

    step without a save -> has the one in flight failed? -> prewarm
    step with a save    -> wait for it -> _carry_out: _settle (all ranks agree) -> failures.py: does the run
                                            go on? -> _make_ready -> _write -> durable, or in flight
                                       -> or, where the state can be _captured: a thread does so, see
                                          beginning.py, until it is joined
"""

import time
from abc import abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchtitan.components.checkpointer.agreement import gather
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.checkpointer.beginning import Beginning, NotBegunError
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
from torchtitan.components.checkpointer.waiting import note_given_up, WaitExpiredError
from torchtitan.distributed.failure import is_echo
from torchtitan.distributed.utils import patience
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection


@dataclass
class Due:
    """One that is due."""

    step: int
    path: str
    is_last: bool
    due_at: float = field(default_factory=time.monotonic)
    is_beside: bool = False
    """A thread begins it."""
    in_flight: "Future[Any] | None" = None
    """What ends when it is durable; None as long as it has not begun, and for one that is over."""

    @property
    def asked(self) -> str:
        """Begins the error that tells what failed."""
        return saving(self.step, self.path)


class SavingManager(BaseCheckpointManager):
    """A manager whose saves may be in flight while training goes on."""

    BACKEND_IN_TRACES: str
    """What measures its saves in the trace."""

    _failed: FailedSaves
    _settling_group: "dist.ProcessGroup | None" = None
    """Where the training threads meet before a save, even while another one is still in the background."""

    _beginning: Beginning | None = None
    """A save that a thread begins, and which nobody has joined yet."""

    _not_begun: int | None = None
    """The step of the last save that such a thread has not begun in the end."""

    _refused: Exception | None = None
    """Why not, if the run is to end with it."""

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
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-beginning")
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
        self, save: Due, earlier: CheckpointSaveError | None, captured: Any | None
    ) -> tuple[Verdict, Any]:
        """Agree with all ranks how the previous save ended, and take what this one needs. Collective.

        Args:
            earlier: how it ended on this rank.
            captured: what ``_captured`` has given, if a thread begins this one beside training.

        Returns:
            What all ranks have agreed on, and what ``_write`` gets to write.
        """

    @abstractmethod
    def _write(self, save: Due, payload: Any) -> "Future[Any] | None":
        """Write, or begin to: then what ends when it is durable. Collective."""

    @property
    @abstractmethod
    def _is_async(self) -> bool: ...

    def _captured(self) -> Any | None:
        """The state as it is now, for a save that a thread begins; None where training has to do that.

        What is given says in ``must_be_waited_for`` whether training may go on before that thread is through.
        """
        return None

    def _save(self, curr_step: int, last_step: bool) -> bool:
        if not self._should_save(curr_step, last_step):
            self._look_back()
            if not self.load_only:
                self._look_ahead(curr_step)
            return False
        sl.add_step_tag("checkpoint_save")
        save = Due(curr_step, self._create_checkpoint_id(curr_step), last_step)
        refused, self._not_begun = self._take_refused(but_agreed_on=last_step), None
        earlier = self._end_of_previous()
        # A run that ends with the previous save is to end now; and beside one that may still run nothing begins.
        may_begin = not isinstance(earlier, CheckpointSaveTimeoutError) and (
            earlier is None or not self._failed.ends_with(earlier)
        )
        if may_begin and not last_step and (captured := self._captured()) is not None:
            self._begin_beside_training(save, earlier, captured)
            if captured.must_be_waited_for:
                self._join()
            return True
        with patience(timedelta(seconds=self.timeout_seconds)):
            has_begun, ending = self._carry_out(save, earlier, None)
        if not has_begun:
            self._not_begun = curr_step
        if ending is not None and refused is not None:
            ending.add_note(f"Before that: {refused}")
        ending = ending or refused
        if has_begun and last_step and ending is not None and self._failed.goes_on:
            logger.warning(f"{ending} The last save is complete.")
            ending = None
        if ending is not None:
            raise ending
        return has_begun

    def _begin_beside_training(
        self, save: Due, earlier: CheckpointSaveError | None, captured: Any
    ) -> None:
        save.is_beside = True
        self._report = self._report_of(save)

        def begin() -> "Future[Any] | None":
            has_begun, ending = self._carry_out(save, earlier, captured)
            if ending is not None:
                raise ending
            if not has_begun:
                raise NotBegunError(f"{save.asked} was given up.")
            return save.in_flight

        # First, because the save may be over before the last line is.
        self._report.handed_over()
        # In this order, because a signal to stop may come in between.
        self._beginning = Beginning(begin)
        self.save_future = self._beginning.durable
        self._beginning.start(self._executor)

    def _carry_out(
        self, save: Due, earlier: CheckpointSaveError | None, captured: Any | None
    ) -> tuple[bool, CheckpointSaveError | None]:
        """Settle how the previous save ended and begin this one. Collective.

        Args:
            earlier: how it ended on this rank.
            captured: what this one saves, in a thread beside training; None is the state as it is.

        Returns:
            Whether it has begun, and what the run is to end with.
        """
        try:
            with told_as_save_error(save.asked, self.timeout_seconds, earlier, folder=self.folder):
                verdict, payload = self._settle(save, earlier, captured)
                is_late = isinstance(verdict.failure, CheckpointSaveTimeoutError)
                ending = self._failed.settled(
                    verdict.failure, is_excused=verdict.is_excused, newest_step=self._newest_step()
                )
                # After the last step the last chance to keep the work comes first; but nothing begins
                # beside a save that may still be running.
                may_begin = (ending is None or save.is_last) and not is_late
                if may_begin:
                    self._begin(save, payload)
        except CheckpointSaveError as failure:
            ending = failure
            if not save.is_last and not is_out_of_step(failure):
                ending = self._failed.failed(failure, newest_step=self._newest_step())
            if ending is not None and self._failed.unsettled is not None:  # told with it
                self._failed.unsettled.was_raised = True
            return False, ending
        if not may_begin and save.is_last:
            ending = ending or verdict.failure
        return may_begin, ending

    def _join(self) -> None:
        """Wait for the thread that begins a save, and let that save be as any other from here on.

        Raises:
            CheckpointSaveTimeoutError: it is not through within the limit.
        """
        beginning, report = self._beginning, self._report
        if beginning is None or report is None:
            return
        limit_seconds = self.timeout_seconds
        with told_as_save_error(saving(report.step, report.path), limit_seconds):
            try:
                # Given up once, it is not waited for as long again.
                beginning.join(0 if self._gave_up else limit_seconds)
            except WaitExpiredError:
                self._gave_up = True
                raise
        # In this order, because a signal to stop may come in between.
        self._gave_up = False
        try:
            self.save_future = beginning.result()
        except NotBegunError:
            self._not_begun, self.save_future = report.step, None
        except Exception as error:
            # Its future tells the same, until somebody is told.
            self._not_begun, self._refused = report.step, error
        self._beginning = None
        # Not in that thread: ranks that pause at different moments wait for each other.
        GarbageCollection.collect("after a save was begun beside training")

    def _leave_thread(self) -> None:
        """Have no thread that begins saves any more, or leave it behind if it hangs."""
        if self._beginning is not None and not self._beginning.is_over:
            # Somebody has not waited for it, and nothing may be deleted beside it.
            note_given_up()
            self._gave_up = True
        self._executor.shutdown(wait=False)

    def _take_refused(self, *, but_agreed_on: bool = False) -> CheckpointSaveError | None:
        """Raise what the thread has found that begins saves, if the run is to end with it.

        Returns:
            That, if it is asked for, where all ranks have agreed on it and stand at one place.
        """
        self._join()
        refused, self._refused = self._refused, None
        if refused is None:
            return None
        self.save_future = None
        if (
            but_agreed_on
            and isinstance(refused, CheckpointSaveError)
            and not is_out_of_step(refused)
        ):
            return refused
        raise refused

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
        if self._beginning is not None and not self._beginning.is_over:
            return
        self._take_refused()
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
        self._join()
        is_lost = self._not_begun == step
        if self._failed.is_open and self._report is not None and self._report.step == step:
            is_lost |= self._end_of_previous() is not None
        return any(gather(is_lost, self._settling_group))

    def _newest_step(self) -> int | None:
        return None if self.newest_good is None else self.newest_good[0]

    def _report_of(self, save: Due) -> SaveReport:
        return SaveReport(
            save.step,
            save.path,
            self._storage,
            background=self._is_async and not save.is_last,
            is_speaker=not dist.is_initialized() or dist.get_rank() == 0,
            due_at=save.due_at,
            backend=self.BACKEND_IN_TRACES,
        )

    def _begin(self, save: Due, payload: Any) -> None:
        report = self._report
        if report is None or not save.is_beside:
            report = self._report = self._report_of(save)
        # Nothing expires with the last save: no later one needs the space.
        self._make_ready(save.path, self.pg, with_retention=not save.is_last)
        report.dispatched()
        self._doubtful |= {save.path}
        if self._beginning is not None and not self._is_async:
            self._beginning.is_writing = True
        save.in_flight = self._write(save, payload)
        if not save.is_beside:
            self.save_future = save.in_flight
            report.handed_over()
        if save.in_flight is None:
            self._doubtful -= {save.path}
            self._failed.succeeded()
            report.completed_now()
        else:
            self._failed.is_open = True
            report.follow(save.in_flight)


def is_out_of_step(failure: CheckpointSaveError) -> bool:
    """Whether the ranks may stand at different places after ``failure``, so that no save can follow."""
    # What DCP, or a rank in its own words, has told all of them is no such thing, nor is the error of a disk.
    cause = failure.__cause__
    is_felt = isinstance(cause, RuntimeError) and not isinstance(cause, OtherRankFailedError)
    return isinstance(failure, CheckpointSaveTimeoutError) or (is_felt and is_echo(failure))
