"""Reads the line that starts a run as those who get it read it: torchrun its part, we ours.

A dry run of run_train.sh prints that line, so commands for machines that no test has can be checked
without starting anything.
"""

import shlex
from argparse import Namespace
from dataclasses import dataclass

from torch.distributed.run import get_args_parser
from torchtitan.config import ConfigManager
from torchtitan.trainer import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One start of all ranks of a machine."""

    torchrun: Namespace
    """The options of torchrun by name."""
    config: Trainer.Config


def launch_in(output: str) -> Launch:
    """The start in the last line of a dry run's ``output``.

    Raises AssertionError if there is none; torchrun and the config end the program with
    SystemExit where they cannot read their part.
    """
    words = shlex.split(output.splitlines()[-1]) if output.strip() else []
    assert "torchtitan.launch" in words, f"no line that starts ranks in:\n{output}"
    options = get_args_parser().parse_args(words[words.index("torchtitan.launch") + 1 :])
    assert (options.module, options.training_script) == (True, "torchtitan.train"), words
    return Launch(torchrun=options, config=ConfigManager().parse_args(options.training_script_args))
