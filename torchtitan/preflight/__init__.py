"""Find settings that cannot work, before a process group starts.

    command line -> parse -> violations of single fields (collected while parsing)
                          -> problems: across sections, against the files, against the ranks
                          -> one message with all of them, exit code 2

The launcher runs this once in a plain process (``python -m torchtitan.preflight``), so that a
mistake costs seconds and one message; the ranks run it again, because they can be started without
the launcher. Nothing stays on the disk: whether a folder can be written is found out with a temporary
file that has no name.
"""

from torchtitan.config import ConfigManager
from torchtitan.config.recipes import CommandLineError
from torchtitan.config.violations import exit_with
from torchtitan.preflight.availability import not_available, without_effect
from torchtitan.preflight.checkpoint import checkpoint_problems
from torchtitan.preflight.compiler import compiler_problems
from torchtitan.preflight.data import data_problems
from torchtitan.preflight.folders import folder_problems
from torchtitan.preflight.model import fit, model_problems
from torchtitan.preflight.ranks import batch_problems, layout_problems, num_ranks
from torchtitan.trainer import Trainer

__all__ = ["num_ranks", "parse_or_exit", "problems"]


def parse_or_exit(args: list[str] | None = None) -> Trainer.Config:
    """The config of a command line, checked.

    Raises:
        SystemExit: with code 2 and one message on stderr when the settings cannot be used;
            with 0 after ``--help``.
    """
    try:
        return ConfigManager(checks=_problems_here).parse_args(args)
    except CommandLineError as error:
        exit_with([str(error)])


def _problems_here(config: Trainer.Config) -> list[str]:
    """``problems`` on the ranks that the environment announces."""
    mode = config.comm.mode if isinstance(config, Trainer.Config) else "default"
    try:
        world_size = num_ranks(simulated=mode == "fake_backend")
    except ValueError as error:
        return [str(error), *problems(config, None)]
    return problems(config, world_size)


def problems(config: Trainer.Config, world_size: int | None) -> list[str]:
    """Everything that keeps ``config`` from running on ``world_size`` ranks, one message each.

    Stands fields that are wrong by themselves, which are reported elsewhere. None as
    ``world_size`` leaves out what depends on it.
    """
    if not isinstance(config, Trainer.Config):
        return [f"The recipe made a {type(config).__name__}, which is not the config of a trainer."]
    config, found = fit(config)
    found += [*not_available(config), *without_effect(config)]
    if world_size is not None:
        found += layout_problems(config, world_size)
        found += batch_problems(config, world_size)
    found += compiler_problems(config.compile)
    found += model_problems(config)
    found += data_problems(config)
    found += folder_problems(config)
    found += checkpoint_problems(config, world_size)
    return list(dict.fromkeys(found))
