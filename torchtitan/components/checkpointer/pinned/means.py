"""What this machine can do to copy beside training, found out before the first step.

Pinned memory and copies that do not block need an accelerator; memory that two processes share is
needed on every machine. Asked at the start and said in one line, so that no step fails over it.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor as torch_executor
from torch.distributed.checkpoint.staging import StagingOptions

from torchtitan.components.checkpointer.pinned.arena import anonymous_file
from torchtitan.tools.logging import logger


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """How a staged copy is made here."""

    device: torch.device | None
    """The accelerator whose side stream carries the copies; None copies on the CPU."""

    pins: bool
    """The shared memory can be locked, so that the accelerator copies into it by itself."""

    @property
    def in_words(self) -> str:
        """For the one line at the start of a run."""
        if self.device is None:
            memory = "shared memory, not pinned because this machine trains without an accelerator"
            return f"{memory}; a thread copies into it"
        memory = "pinned shared memory" if self.pins else "shared memory that cannot be pinned"
        return f"{memory}; a stream of its own on {self.device} copies into it"


def find_means(options: StagingOptions) -> Means:
    """As much of ``options`` as this machine has."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "mps" or not options.use_non_blocking_copy:
        return Means(device=None, pins=False)
    device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    pins = options.use_pinned_memory and accelerator.type == "cuda" and torch.cuda.is_available()
    return Means(device=device, pins=pins)


def announce() -> None:
    """Say in one line how saves are staged on this machine.

    Raises:
        ValueError: they cannot be.
    """
    if problem := refusal():
        raise ValueError(problem)
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info(
            f"Saves are staged in {find_means(StagingOptions()).in_words}; a process writes them."
        )


def refusal() -> str | None:
    """What to tell when this mode cannot work on this machine, or None."""
    if (problem := obstacle()) is None:
        return None
    return (
        f"--checkpoint.async_mode async_with_pinned_mem cannot work here: {problem}. Use "
        "--checkpoint.async_mode async, which needs neither shared memory nor a process of its own."
    )


def obstacle() -> str | None:
    """Why this mode cannot work on this machine at all, or None."""
    if not hasattr(torch_executor, "_CHECKPOINT_PROCESS"):
        return f"torch {torch.__version__} starts writer processes in another way than 2.13 does"
    return no_shared_memory()


def no_shared_memory() -> str | None:
    """Why no process can write from the memory of another one here, whatever it writes, or None."""
    try:
        os.close(anonymous_file())
    except (AttributeError, OSError) as error:
        return f"this system has no memory that two processes can share (memfd_create: {error})"
    return None
