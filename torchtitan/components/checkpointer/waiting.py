"""No wait of the checkpointer is endless: after ``--checkpoint.timeout_seconds`` it is given up.

What is waited for goes on all the same: a thread that hangs in the kernel cannot be ended. So the
program has to leave without it in the end, see ``leave_if_given_up``.

    a future      result_within                          the save in flight, staging
    a collective  the timeout of its group               on our own group, in the background
                  within, around the training thread     on training's group
    a thread      join with the limit                    deletions at the end
    a process     wait with the limit                    a writer that was killed
"""

import logging
import os
import sys
import traceback
from collections.abc import Generator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchtitan.components.checkpointer.errors import CheckpointError, CheckpointReadError
from torchtitan.distributed.utils import patience

FLAG = "--checkpoint.timeout_seconds"

_WORDS = "timed out", "timeout"

_has_given_up = False


class WaitExpiredError(RuntimeError):
    """What was waited for has not happened within the limit; it may still happen."""


def result_within(future: "Future[Any]", seconds: float) -> Any:
    """The result of ``future``.

    Raises:
        WaitExpiredError: it was not done after ``seconds``. This process then no longer waits for
            its threads at the end.
    """
    # What only answers like a future is asked directly.
    if isinstance(future, Future) and not wait([future], timeout=seconds).done:
        note_given_up()
        raise WaitExpiredError(f"not done after {seconds:g} s")
    return future.result()


def note_given_up() -> None:
    """Remember that something still runs which this process must not wait for at its end."""
    global _has_given_up
    _has_given_up = True


@contextmanager
def within(seconds: float, what: str) -> Generator[None]:
    """Let the collectives in the block take up to ``seconds``, on training's group as well.

    Raises:
        CheckpointReadError: ``what`` was waited for longer than that.
    """
    try:
        with patience(timedelta(seconds=seconds)):
            yield
    except RuntimeError as error:
        if isinstance(error, CheckpointError) or not is_late(error):
            raise
        raise CheckpointReadError(f"{what} was given up: {explanation(seconds)}") from error


def is_late(error: BaseException) -> bool:
    """Whether ``error`` is that of a wait that took too long, here or in a collective.

    An error of the operating system is that of a disk, whatever it says.
    """
    if isinstance(error, WaitExpiredError):
        return True
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict):  # DCP's error, which holds that of each rank.
        return any(is_late(cause) for cause, _ in failures.values())
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _WORDS)


def explanation(seconds: float) -> str:
    """Who waited how long, and what to do about it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return (
        f"rank {rank} has waited for {seconds:g} s, the limit of {FLAG}. If the disk is that slow, "
        "raise it; otherwise look for a rank that hangs and for a disk that does not answer."
    )


def leave_if_given_up() -> None:
    """End the process at once if a wait was given up, with the exit code it is about to have.

    For the very end of a program: Python would wait for the hung thread before it ended.
    """
    if not _has_given_up:
        return
    error = sys.exc_info()[1]
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    with suppress(Exception):  # streams that are full or gone must not keep the process here
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
