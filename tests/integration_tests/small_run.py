"""Settings that make a run short, ranks that run the main program, and what their output tells."""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from torchtitan import train

from tests.ranks.pool import end_of_ranks, RankEnd
from tests.unit_tests.structure.sources import ROOT

CONTEXT = 64
SETTINGS = [
    "--debug.seed=7",
    "--metrics.log_freq=1",
    f"--training.max_context_length={CONTEXT}",
    f"--training.num_tokens_per_microbatch_per_dp_rank={CONTEXT}",
    f"--training.num_tokens_per_train_step={2 * CONTEXT}",
]
LLAMA = ["--module", "llama3", "--config", "llama3_jargon"]
FAULTY = ["--module", "tests.integration_tests.faults", "--config", "faulty"]
_STEP = re.compile(r"step: +(\d+)/\d+ +(loss: +\S+ +grad_norm: +\S+)")
_LOADED = re.compile(r"Loading the checkpoint \S+/step-(\d+) ")


@dataclass
class Story:
    """What the output of a run says."""

    output: str

    def losses(self) -> dict[int, str]:
        """Loss and gradient norm as printed, by step."""
        return {int(step): " ".join(text.split()) for step, text in _STEP.findall(self.output)}

    def loaded_steps(self) -> list[int]:
        return [int(step) for step in _LOADED.findall(self.output)]

    def last_line(self) -> str:
        """The last line that comes from us; at the exit libraries may still warn."""
        return [line for line in self.output.splitlines() if "[titan" in line][-1]


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints of the run that dumps into ``folder``."""
    return sorted(
        int(marker.parent.name.removeprefix("step-"))
        for marker in folder.glob("checkpoint/step-*/.metadata")
    )


def main_on_ranks(
    world_size: int, arguments: list[str], *, cache: Path, timeout_seconds: float = 200.0
) -> list[RankEnd]:
    """Run the main program on ranks that need no launcher; says how each of them ended.

    The end of the process is not the one of the program: an exit code other than 0 is found as
    ``SystemExit`` in ``detail``, an error as its traceback.
    """
    return end_of_ranks(
        world_size,
        _main,
        arguments,
        str(cache),
        init=False,
        timeout_seconds=timeout_seconds,
        settle_seconds=60.0,
    )


def _main(arguments: list[str], cache: str) -> None:
    os.chdir(ROOT)  # as run_train.sh does; recipes name files relative to it
    os.environ["TORCHTITAN_CACHE_DIR"] = cache
    sys.argv = ["train", *arguments]
    train.main()
