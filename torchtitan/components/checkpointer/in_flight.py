"""Wait for a save in flight, and turn what it failed with into one error that names step and path.

Two futures stand for a save: *staging* ends when the parameters may change again, *saving* when
the checkpoint is durable.

    dispatch -> staging future -> (optimizer.step) ... saving future -> (the next save, or close)
"""

from concurrent.futures import Future
from typing import Any

import torch.distributed.checkpoint as dcp

from torchtitan.components.checkpointer.errors import cause_of, CheckpointSaveError
from torchtitan.components.checkpointer.modes import AsyncMode
from torchtitan.components.checkpointer.save_report import SaveReport
from torchtitan.observability import structured_logger as sl

FAILURES = (Exception, dcp.CheckpointException)
"""What a failed save raises: DCP's own error is no Exception."""


def await_staging(future: "Future[Any]", mode: AsyncMode) -> None:
    """Block until the save no longer reads the parameters.

    Raises:
        RuntimeError: ``mode`` stages in the training thread, so nobody can have made ``future``.
    """
    if mode is not AsyncMode.ASYNC_WITH_PINNED_MEM:
        raise RuntimeError(
            f"A staging future is pending although async_mode is {mode.value}; "
            "only async_with_pinned_mem stages in the background."
        )
    with sl.log_trace_span("checkpoint_wait_staging"):
        future.result()


def await_save(future: "Future[Any]", report: SaveReport | None) -> None:
    """Block until the save is durable and was reported.

    Raises:
        CheckpointSaveError: it failed.
    """
    try:
        with sl.log_trace_span("checkpoint_wait_saving"):
            future.result()
    except FAILURES as error:
        if report is None:
            raise
        raise save_error(report.step, report.path, error) from error
    finally:
        if report is not None and future.done():
            report.completed(future)


def save_error(step: int, path: str, error: BaseException) -> CheckpointSaveError:
    """What the caller of a failed save is told."""
    return CheckpointSaveError(
        f"Saving the checkpoint of step {step} to {path} failed: {cause_of(error)}. Older checkpoints are "
        "untouched; what was written of this one never counts as a checkpoint."
    )
