"""Wait for a save in flight, and turn what it failed with into one error that names step and path.

Two futures stand for a save: *staging* ends when the parameters may change again, *saving* when
the checkpoint is durable.

    dispatch -> staging future -> (optimizer.step) ... saving future -> (the next save, or close)
"""

from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch.distributed.checkpoint as dcp

from torchtitan.components.checkpointer.disk_trouble import told_in_words
from torchtitan.components.checkpointer.errors import (
    cause_of,
    CheckpointInUseError,
    CheckpointSaveError,
    CheckpointSaveTimeoutError,
)
from torchtitan.components.checkpointer.failures import FailedSaves
from torchtitan.components.checkpointer.modes import AsyncMode
from torchtitan.components.checkpointer.save_report import SaveReport
from torchtitan.components.checkpointer.waiting import explanation, is_late, result_within
from torchtitan.observability import structured_logger as sl

FAILURES = (Exception, dcp.CheckpointException)
"""What a failed save raises: DCP's own error is no Exception."""


def await_staging(
    future: "Future[Any]", mode: AsyncMode, report: SaveReport | None, limit_seconds: float
) -> None:
    """Block until the save no longer reads the parameters.

    Raises:
        CheckpointSaveTimeoutError: it still does after ``limit_seconds``.
        RuntimeError: ``mode`` stages in the training thread, so nobody can have made ``future``.
    """
    if mode is not AsyncMode.ASYNC_WITH_PINNED_MEM:
        raise RuntimeError(
            f"A staging future is pending although async_mode is {mode.value}; "
            "only async_with_pinned_mem stages in the background."
        )
    try:
        waiting = nullcontext() if report is None else report.training_waits()
        with sl.log_trace_span("checkpoint_wait_staging"), waiting:
            result_within(future, limit_seconds)
    except FAILURES as error:
        if report is None or not is_late(error):
            raise
        raise save_error(saving(report.step, report.path), error, limit_seconds) from error


def await_save(
    future: "Future[Any]",
    mode: AsyncMode,
    report: SaveReport | None,
    limit_seconds: float,
    *,
    has_waited: bool = False,
    bears_late: bool = False,
) -> None:
    """Block until the save is durable and was reported.

    Args:
        has_waited: it was given up before, and is not waited for as long again.
        bears_late: the ranks will tell each other on which of them it may still be running.

    Raises:
        CheckpointSaveError: it failed, or was not done after ``limit_seconds``.
    """
    wait_seconds = 0 if has_waited else limit_seconds
    if mode is AsyncMode.ASYNC_WITH_PINNED_MEM:
        # Staging and the writer process have that limit each, and know better what is late.
        limit_seconds, wait_seconds = 2 * limit_seconds + 10, 2 * wait_seconds + 10
    try:
        with sl.log_trace_span("checkpoint_wait_saving"):
            result_within(future, wait_seconds)
    except FAILURES as error:
        if report is None:
            raise
        folder = report.path.rpartition("/")[0]
        failure = save_error(saving(report.step, report.path), error, limit_seconds, folder)
        if isinstance(failure, CheckpointSaveTimeoutError) and future.done():
            # Nothing of the late save is left on this rank if the writer process is replaced, or if
            # this is what its thread has ended with.
            is_replaced = mode is AsyncMode.ASYNC_WITH_PINNED_MEM
            if is_replaced or bears_late and future.exception() is error:
                failure = CheckpointSaveError(str(failure))
        raise failure from error
    finally:
        if report is not None and future.done():
            report.completed(future)


class SavesInBackground(Protocol):
    """A manager, as far as it has a save in flight."""

    save_future: "Future[Any] | None"
    timeout_seconds: float
    _report: SaveReport | None
    _gave_up: bool
    """The save in flight was given up, and its caller told."""
    _failed: FailedSaves
    _doubtful: frozenset[str]
    """Saves that are not known to be good, by path."""


def wait_for_saving(manager: SavesInBackground, mode: AsyncMode) -> None:
    """Wait for the save in flight of ``manager``, whose error is raised once.

    Raises:
        CheckpointSaveError: it failed, or was not done within the limit.
    """
    if manager.save_future is None:
        return
    # Cleared before it is awaited: an error is raised once, and the next save starts clean.
    future, manager.save_future = manager.save_future, None
    has_waited, manager._gave_up = manager._gave_up, False
    try:
        await_save(
            future,
            mode,
            manager._report,
            manager.timeout_seconds,
            has_waited=has_waited,
            bears_late=manager._failed.goes_on,
        )
    except CheckpointSaveTimeoutError:
        # It may still be running: the next save must not begin, and close() need not wait again.
        manager.save_future, manager._gave_up = future, True
        raise
    except CheckpointSaveError as failure:
        manager._failed.raised(failure)  # unless whoever waits for it takes that back
        raise
    except FAILURES:
        raise
    except BaseException:
        # Ctrl-C: it is still in flight, and close() has to wait for it.
        manager.save_future = future
        raise
    if manager._report is not None:
        manager._doubtful -= {manager._report.path}


def failure_of(
    wait_for_previous: Callable[[], None], *, bears_late: bool = False
) -> CheckpointSaveError | None:
    """What the save failed with that ``wait_for_previous`` waits for; nobody is told of it yet.

    Args:
        bears_late: return it too if it may still be running.

    Raises:
        CheckpointSaveTimeoutError: it may, and the ranks stand in the middle of it.
    """
    try:
        wait_for_previous()
    except CheckpointSaveError as error:
        if isinstance(error, CheckpointSaveTimeoutError) and not bears_late:
            raise
        error.was_raised = False
        return error
    return None


@contextmanager
def told_as_save_error(
    asked: str,
    limit_seconds: float,
    earlier: CheckpointSaveError | None = None,
    *,
    folder: str = "",
) -> Generator[None]:
    """Let all that the block fails with be an error that begins with what was ``asked``.

    It tells of the ``earlier`` failure as well, which was to be told next, and says in plain words what
    the disk of ``folder`` has refused.

    Raises:
        CheckpointSaveError: it failed, or waited for longer than ``limit_seconds``.
        CheckpointInUseError: as it came from the block.
    """
    try:
        yield
    except (CheckpointSaveError, CheckpointInUseError) as failure:
        # As it is where the folder is in use: no save has failed then, there must be none.
        if earlier not in (None, failure, failure.__cause__):
            failure.add_note(f"Before that: {earlier}")
        raise
    except FAILURES as error:
        failure = save_error(asked, error, limit_seconds, folder)
        if earlier is not None:
            failure.add_note(f"Before that: {earlier}")
        raise failure from error


def saving(step: int, path: str) -> str:
    """What is asked for by a save, for the beginning of an error."""
    return f"Saving the checkpoint of step {step} to {path}"


def save_error(
    asked: str, error: BaseException, limit_seconds: float, folder: str = ""
) -> CheckpointSaveError:
    """What the caller of a failed save is told; ``folder`` is where it was to be written."""
    if is_late(error):
        return CheckpointSaveTimeoutError(
            f"{asked} was given up: {explanation(limit_seconds)} Older checkpoints are untouched."
        )
    cause = cause_of(error)
    words = told_in_words(cause, folder) if folder else ""
    meaning = f" {words}" if words else ""
    return CheckpointSaveError(
        f"{asked} failed: {cause}.{meaning} Older checkpoints are untouched; what was written of this "
        "one never counts as a checkpoint."
    )
