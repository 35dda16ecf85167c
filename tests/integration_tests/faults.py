"""The Jargon recipe with a fault planted in it, to see what a run makes of it.

Used like any other recipe, so that the whole path from the command line to the exit code is real:

    ./run_train.sh --module tests.integration_tests.faults --config faulty --fault.kind raise ...
"""

import os
import resource
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.components.data import TrainerBatch
from torchtitan.models.llama3.config_registry import llama3_jargon
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

MAX_FILE_BYTES = 1 << 20
"""What a full disk takes; a rank's part of a checkpoint is more than twenty times that."""


@dataclass(kw_only=True, slots=True)
class Fault:
    kind: Literal["none", "raise", "kill", "terminate", "wait", "full_disk"] = "none"
    """raise an error; SIGKILL the own process; SIGTERM for it; wait for a signal; no longer be able
    to write a file of more than a mebibyte, once the saves that were begun are written."""

    rank: int = 1
    """Where; -1 is everywhere."""

    after_steps: int = 3
    """When: before the step that follows this many steps of this process."""

    first_attempt_only: bool = False
    """Not after torchrun has restarted the ranks."""


class FaultyTrainer(Trainer):
    """A trainer in which one thing goes wrong."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        fault: Fault = field(default_factory=Fault)
        """What goes wrong."""

    def train_step(self, data_iterator: Iterator[TrainerBatch]) -> None:
        fault, rank = self.config.fault, int(os.environ["RANK"])
        steps_done = self.step - 1 - self.metrics_processor.start_step
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if fault.kind == "full_disk" and steps_done == fault.after_steps:
            # Or it would hit whichever save a machine of this speed still writes. On all ranks, as none is
            # done before the others are.
            self.checkpointer.maybe_wait_for_saving()
        if fault.rank in (rank, -1) and steps_done == fault.after_steps:
            if not (fault.first_attempt_only and attempt > 0):
                self._plant(fault.kind)
        super().train_step(data_iterator)

    def _plant(self, kind: str) -> None:
        logger.info(f"planted fault: {kind}")
        if kind == "raise":
            raise ValueError(f"row 7 of step {self.step} is broken")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        if kind == "wait":
            threading.Event().wait()
        if kind == "full_disk":
            # Python ignores the signal that comes with it, so writes fail with EFBIG.
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, hard))


def faulty() -> FaultyTrainer.Config:
    """``llama3_jargon`` with what ``--fault`` asks for."""
    jargon = llama3_jargon()
    sections: dict[str, Any] = {name: getattr(jargon, name) for name in type(jargon).__slots__}
    return FaultyTrainer.Config(**sections)
