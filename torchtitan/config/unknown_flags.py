"""Say which flag was meant by one that is none. Pure.

Whoever mistypes a flag mostly knows its last part, such as ``load_step``, and not the section it is in,
or knows both and misses a letter. So names are compared as wholes and by their last parts.

    tokens that tyro left over -> not_understood -> one message for each flag among them
"""

import difflib
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import tyro

from torchtitan.config.early_flags import spelling

_MOST_GUESSES = 3
_LEAST_LIKENESS = 0.6
_NEAR_THE_BEST = 0.1
_LAST_PART = 0.95
"""What the likeness of last parts counts beside that of whole names, which say the section too."""
_SUBCOMMAND = re.compile(r"[a-z][a-z_-]*:[A-Za-z_-]+")


def not_understood(config: Any, args: Sequence[str], left_over: Sequence[str]) -> list[str]:
    """One message for each flag in ``left_over``, which are those of ``args`` that nothing has read."""
    typed = [token.partition("=")[0] for token in left_over if _is_flag(token)]
    if not typed:
        return []
    known = list(flags_of(config))
    subcommand = next((arg for arg in args if _SUBCOMMAND.fullmatch(arg)), "")
    return [_message(flag, known, subcommand) for flag in dict.fromkeys(typed)]


def flags_of(config: Any, prefix: str = "") -> Iterator[str]:
    """The flags that change a setting of ``config``, with dashes; of a switch both."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in fields(config):
        hint, value = hints[field.name], getattr(config, field.name)
        if not field.init or field.name.startswith("_") or _is_hidden(hint):
            continue
        if value is not None or not _is_choice_of_classes(hint):
            yield from _flags_below(f"{prefix}{field.name}", value)


def _flags_below(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, type):
        return
    if is_dataclass(value):
        yield from flags_of(value, f"{name}.")
    elif isinstance(value, list) and value and is_dataclass(value[0]):
        for index, item in enumerate(value):
            yield from flags_of(item, f"{name}.{index}.")
    elif isinstance(value, dict):
        for key in value:
            yield spelling(f"--{name}.{key}")
    elif not callable(value):
        yield spelling(f"--{name}")
        if isinstance(value, bool):
            section, dot, last = name.rpartition(".")
            yield spelling(f"--{section}{dot}no-{last}")


def closest(typed: str, known: Sequence[str]) -> list[str]:
    """Those of ``known`` that may have been meant by the flag ``typed``, the likeliest first."""
    likeness = {flag: _likeness(spelling(typed), flag) for flag in known}
    best = max(likeness.values(), default=0)
    least = max(_LEAST_LIKENESS, best - _NEAR_THE_BEST)
    near = [flag for flag in known if likeness[flag] >= least]
    return sorted(near, key=lambda flag: -likeness[flag])[:_MOST_GUESSES]


def _likeness(typed: str, flag: str) -> float:
    def ratio(one: str, other: str) -> float:
        return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()

    whole = ratio(typed.lstrip("-"), flag.lstrip("-"))
    # Of several that end alike the one with the shortest section.
    return max(whole, _LAST_PART * ratio(_last_part(typed), _last_part(flag))) + whole / 100


def _last_part(flag: str) -> str:
    return flag.lstrip("-").rpartition(".")[2]


def _message(typed: str, known: Sequence[str], subcommand: str) -> str:
    if spelling(typed) in known:
        behind = subcommand or "a subcommand"
        return f"{typed} stands behind {behind}, which takes only flags of its own; put it before that."
    guesses = closest(typed, known)
    meant = f"; did you mean {' or '.join(guesses)}?" if guesses else "."
    return f"{typed} is no flag of this recipe{meant}"


def _is_flag(token: str) -> bool:
    return token.startswith("-") and token.lstrip("-")[:1].isalpha()


def _is_choice_of_classes(hint: Any) -> bool:
    return any(typing.get_origin(option) is Annotated for option in typing.get_args(hint))


def _is_hidden(hint: Any) -> bool:
    return typing.get_origin(hint) is Annotated and tyro.conf.Suppress in hint.__metadata__
