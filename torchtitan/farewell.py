"""The last line of a run: which checkpoint a restart takes, and what to type for it.

Only what is true may be said here. A checkpoint that a restart would pass over is not the newest one,
and a command that would begin again, or fail again, is no way to go on. Nor is one that undoes what the
run was told: until a checkpoint of its own holds that, only the command does.

    what the user typed -> read_command -> Command.to_go_on (what must not be repeated is left out)
    the folder of the run -> newest full checkpoint, export -> last_line
                                   settings of the beginning -> only_told -^
"""

import os
import re
import shlex
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType

from torchtitan.components.checkpointer.discovery import parse_step

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_STEPS = "--training.steps"
# These choose what the last run began from. Repeated, they would choose it again.
_BEGINNING_WITH_VALUE = {
    "--checkpoint.load-step",
    "--checkpoint.exclude-from-loading",
    "--checkpoint.initial-load-path",
}
_BEGINNING_SWITCHES = {
    "--checkpoint.initial-load-model-only",
    "--checkpoint.initial-load-in-hf",
    "--checkpoint.initial-load-in-hf-quantized",
}
_DONE = {"--checkpoint.create-seed-checkpoint"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What started the run, taken apart."""

    start: str
    """Everything before the arguments, ready for a shell: assignments and the program."""

    arguments: Sequence[str]

    def to_go_on(
        self, sections: Collection[str], steps: int | None = None, *, begins_as_told: bool = False
    ) -> str:
        """The command that resumes the run, up to ``steps`` if given, ready for a shell.

        Args:
            sections: the field names of the config, by which a subcommand is told from a value.
            begins_as_told: keep what chose the beginning of the run, which no checkpoint holds yet.
        """
        own, subcommands = split_at_subcommand(self.arguments, sections)
        own = _without(own, set(), _DONE)
        if not begins_as_told:
            own = _without(own, _BEGINNING_WITH_VALUE, _BEGINNING_SWITCHES)
        if steps is not None:
            own = [*_without(own, {_STEPS}, set()), _STEPS, str(steps)]
        return f"{self.start} {shlex.join([*own, *subcommands])}".rstrip()


def read_command(environment: Mapping[str, str], arguments: Sequence[str]) -> Command:
    """The command that ``run_train.sh`` passes on, or what stands for ranks started without it."""
    try:
        words = shlex.split(environment.get("TORCHTITAN_COMMAND", ""))
    except ValueError:  # Set by hand, and no shell would read it.
        words = []
    program = next((i for i, word in enumerate(words) if not _ASSIGNMENT.match(word)), None)
    if program is None:
        return Command(start="torchrun ... -m torchtitan.train", arguments=arguments)
    # The name of a variable must stay outside the quotes, or a shell takes it for a program.
    pairs = [word.partition("=") for word in words[:program]]
    assigned = [f"{name}={shlex.quote(value)}" for name, _, value in pairs]
    start = " ".join([*assigned, shlex.quote(words[program])])
    return Command(start=start, arguments=words[program + 1 :])


def split_at_subcommand(
    arguments: Sequence[str], sections: Collection[str]
) -> tuple[list[str], list[str]]:
    """Flags of the run, then the first subcommand (``activation-checkpoint:full``) and what is its own."""
    for index, word in enumerate(arguments):
        section, colon, _ = word.partition(":")
        if colon and section.split(".")[0].replace("-", "_") in sections:
            return list(arguments[:index]), list(arguments[index:])
    return list(arguments), []


def step_of(path: str | None) -> int:
    """The step of a checkpoint, by the name of its directory; 0 where there is none."""
    return parse_step(os.path.basename(path or "")) or 0


def only_told(newest: str, *, load_step: int, excluded: Sequence[str]) -> str:
    """What a run was told of its beginning that a start without these settings would not do, or nothing.

    ``newest`` is what such a start finds, as long as the run has saved no full checkpoint.
    """
    told = []
    if -1 < load_step < step_of(newest):
        told.append(f"go back to step {load_step}")
    if excluded:
        told.append(f"leave out {', '.join(excluded)}")
    return " and to ".join(told)


def last_line(
    newest: str | None,
    export: str | None,
    *,
    command: str,
    has_seed: bool = False,
    told: str = "",
) -> str:
    """What a run says last.

    Args:
        newest: the full checkpoint that a restart takes.
        export: one of weights alone that is newer.
        has_seed: this run made a seed checkpoint, from which a restart begins where there is no full one.
        told: as ``only_told`` says it; ``command`` tells it again.
    """
    is_seed = export is not None and os.path.basename(export) == "step-0"
    if newest is None and (has_seed or is_seed):
        return f"To begin from the seed checkpoint: {command}"
    if newest is None and export is None:
        return "No checkpoint was saved."
    if newest is None:
        assert export is not None
        return (
            f"Only weights were saved: {export}. They cannot be resumed from; another run begins from "
            f"them with --checkpoint.initial_load_path {shlex.quote(os.path.abspath(export))} and a new "
            "--dump_folder. --checkpoint.no-last-save-model-only makes the last save a full one."
        )
    line = f"Newest checkpoint: {newest}. To go on from it: {command}"
    if told:
        line = f"No full checkpoint was saved since this run was told to {told}. To do that again: {command}"
    if export is None:
        return line
    return f"Exported {export} (weights only, cannot be resumed from). {line}"


def was_raised_inside(error: BaseException, code: CodeType) -> bool:
    """Whether ``error`` came out of a call of the function with this ``code``."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is code for frame, _ in frames)


def _without(words: Sequence[str], with_value: set[str], switches: set[str]) -> list[str]:
    """``words`` without some flags, however they are spelled; ``with_value`` take the next word."""
    kept = []
    remaining = iter(words)
    for word in remaining:
        typed, equals, _ = word.partition("=")
        name = typed.replace("_", "-").replace(".no-", ".")
        if name in with_value:
            if not equals:
                next(remaining, None)
        elif name not in switches:
            kept.append(word)
    return kept
