"""How the events of torch_checkpointing get into the structured log, with the step of their save.

The library logs what it does as ordinary records with durations. The structured logger takes them from
the root logger, in the trainer and in the process that writes; that one has a log file of its own,
beside that of its rank.

    trainer: stamp(step), then the save    -> <source>.global_rank_<r>.<...>.jsonl
      context of the library, with the job
    writer: init_subprocess_logging, adopt -> <source>.writer.global_rank_<r>.<...>.jsonl
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch_checkpointing.logging_utils import checkpoint_logging_context

from torchtitan.observability import structured_logger as sl

BACKEND_LOGGER_NAME = "torch_checkpointing"
_WRITER = "writer"


def stamp(step: int) -> None:
    """Let the events of the save that follows carry ``step``, whatever step training is at by then."""
    checkpoint_logging_context.update(step=step)


def adopt(context: Mapping[str, Any]) -> None:
    """Go on with what the trainer exported from the library's context; for a process that only writes.

    The library writes files in threads that inherit no context. An event without a step gets that of
    its process, so the process enters the step too.
    """
    checkpoint_logging_context.import_context(dict(context))
    if (step := context.get("step")) is not None:
        sl.set_step(step)


def structured_logger_init_args() -> sl.InitArguments | None:
    """What the writer process is to pass to ``init_structured_logger``; None if this process records nothing."""
    arguments = sl.init_arguments()
    return None if arguments is None else arguments.of_helper(_WRITER)


def init_subprocess_logging(
    structured_logger_init_args: tuple[str, str, int] | None,
    init_fn: Callable[..., object] | None,
    init_args: tuple[Any, ...],
) -> None:
    """Prepare the logging of a process that writes: ``init_fn(*init_args)`` first, if it is given.

    Without arguments for it the structured log stays off.
    """
    if init_fn is not None:
        init_fn(*init_args)
    if structured_logger_init_args is not None:
        source, output_dir, rank = structured_logger_init_args
        sl.init_structured_logger(source=source, output_dir=output_dir, rank=rank)
    # A bare process shows warnings only, and with them the events would be lost. A level that somebody has
    # set is theirs.
    backend = logging.getLogger(BACKEND_LOGGER_NAME)
    if backend.level == logging.NOTSET and backend.getEffectiveLevel() > logging.INFO:
        backend.setLevel(logging.INFO)
