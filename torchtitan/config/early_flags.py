"""Flags that are read before the config of a run exists, because they decide what it is.

tyro reads the flags of a config that is there already. What comes before it is taken out of the
command line here, by hand and in the same spellings.

    args -> take_early_flags -> values -> recipe() -> change of each flag -> tyro (the rest of args)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.config.recipes import CommandLineValueError


@dataclass(kw_only=True, slots=True, frozen=True)
class EarlyFlag:
    """A flag that is read before the recipe's config exists, because it decides what that config is."""

    name: str
    """With dashes and dots, as typed: ``--module``."""

    metavar: str
    """What the help shows for the value."""

    help: str
    """One line for the help."""

    change: Callable[[Any, str, Sequence[str]], Any] | None = None
    """Given the recipe's config, the value and all other flags as typed, returns the config that
    these apply to. What it passes to ``reject`` is reported with everything else."""


def take_early_flags(
    flags: Sequence[EarlyFlag], args: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Split ``args`` into the values of ``flags`` and the rest; of a repeated flag the last one counts.

    Raises:
        CommandLineValueError: one of them stands without a value.
    """
    names = {spelling(flag.name): flag.name for flag in flags}
    values: dict[str, str] = {}
    rest: list[str] = []
    remaining = iter(args)
    for arg in remaining:
        typed, equals, value = arg.partition("=")
        name = names.get(spelling(typed))
        if name is None:
            rest.append(arg)
            continue
        if not equals:
            value = next(remaining, "")
        if not value or value.startswith("--"):
            raise CommandLineValueError(f"{name} requires a value")
        values[name] = value
    return values, rest


def spelling(flag: str) -> str:
    """The one spelling of a flag's name, in which dashes and underscores mean the same."""
    return flag.replace("_", "-")
