"""Write docs/flags.md: every flag with its values, its default and its meaning.

All of it comes from the Config classes: the defaults from their fields, the meanings from the
docstrings below them. The main recipe says which class each section has. A test makes the page
again and compares, and holds its flags to those of ``--help``.

    recipe -> sections_of (one per Config) -> page -> docs/flags.md

    python -m scripts.flags_page
"""

import ast
import importlib
import importlib.util
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, Field, fields, is_dataclass, MISSING, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal

import tyro
from torchtitan.config.backends import CHECKPOINT_BACKENDS
from torchtitan.config.configs import OverrideImport
from torchtitan.config.manager import EARLY_FLAGS
from torchtitan.config.violations import collecting
from torchtitan.models.llama3.config_registry import llama3_jargon

PAGE = Path(__file__).resolve().parent.parent / "docs" / "flags.md"
COMMAND = "python -m scripts.flags_page"

_WORDS = {bool: "on, off", int: "integer", float: "number", str: "text", NoneType: "None"}
# What the command line reads in a way of its own, see the rules in config/manager.py.
_FORMS: dict[Any, str] = {list[str]: "`a,b,c`", list[OverrideImport]: "`pkg.module.function`, ..."}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag, as a row of the page."""

    name: str
    values: str
    default: str
    meaning: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """The flags of one Config."""

    name: str
    """Where it is in the tree; empty for the whole."""
    title: str
    """What it is called on the page."""
    intro: str
    config_class: type
    flags: tuple[Flag, ...]
    is_choice: bool = False
    """It stands in place of another section, from which it may differ only in what it lacks."""


def page() -> str:
    """The text of docs/flags.md."""
    sections = [section for section in all_sections() if section.flags or section.is_choice]
    links = ", ".join(f"[{section.title}](#{_anchor(section.title)})" for section in sections)
    lines = [
        "# Every flag",
        "",
        f"Made by `{COMMAND}` from the classes that read the settings; a test keeps it in step.",
        "[config.md](config.md) says how to write a flag. The defaults are those of the classes. A recipe sets many",
        "of them otherwise: `./run_train.sh --help` shows its values.",
        "",
        f"Sections: {links}",
        "",
        "## The recipe",
        "",
        "| Flag | Meaning |",
        "| --- | --- |",
        *(f"| `{flag.name} {flag.metavar}` | {_text(flag.help)} |" for flag in EARLY_FLAGS),
    ]
    described: dict[type, str] = {}
    for section in sections:
        lines += ["", f"## {section.title}", ""]
        lines += _body(section, described.get(section.config_class))
        described.setdefault(section.config_class, section.name)
    return "\n".join([*lines, ""])


def _body(section: Section, same_as: str | None) -> list[str]:
    intro = [section.intro, ""] if section.intro else []
    if same_as is not None:
        return [
            *intro,
            f"The flags are those of `{same_as}`, with `{section.name}.` in place of `{same_as}.`",
        ]
    if not section.flags:
        return [section.intro]
    rows = [
        f"| `--{flag.name}` | {flag.values} | {flag.default} | {flag.meaning} |"
        for flag in section.flags
    ]
    return [*intro, "| Flag | Values | Default | Meaning |", "| --- | --- | --- | --- |", *rows]


def all_sections() -> Iterator[Section]:
    """Those of the main recipe, each followed by what may stand in its place."""
    with collecting():  # A class that is tried out with its defaults has nothing to warn of.
        for section in sections_of(llama3_jargon(), title="the run as a whole"):
            yield section
            if section.name == "checkpoint":
                yield from _other_backends(section)


def _other_backends(known: Section) -> Iterator[Section]:
    for name, place in CHECKPOINT_BACKENDS.items():
        module_name, _, class_name = place.partition(":")
        if importlib.util.find_spec(module_name) is None:
            continue  # Not in this version.
        config = getattr(importlib.import_module(module_name), class_name).Config()
        if type(config) is known.config_class:
            continue
        own, *below = sections_of(config, name=known.name)
        common = {flag.name for flag in known.flags}
        lost = sorted(common - {flag.name for flag in own.flags})
        without = f" except {', '.join(f'`--{flag}`' for flag in lost)}" if lost else ""
        flags = tuple(flag for flag in own.flags if flag.name not in common)
        end = ", and:" if flags else "."
        yield replace(
            own,
            title=f"{known.name}.backend {name}",
            intro=f"The flags of [{known.title}](#{_anchor(known.title)}){without}{end}",
            flags=flags,
            is_choice=True,
        )
        yield from below


def sections_of(
    config: Any, *, name: str = "", title: str = "", intro: str = ""
) -> Iterator[Section]:
    """The section of ``config``, then those below it, depth first."""
    flags: list[Flag] = []
    below: list[Iterator[Section]] = []
    hints = typing.get_type_hints(type(config), include_extras=True)
    meanings = field_docstrings(type(config))
    for field in fields(config):
        hint, value = hints[field.name], getattr(config, field.name)
        if not field.init or field.name.startswith("_") or _is_hidden(hint):
            continue
        path = f"{name}.{field.name}" if name else field.name
        meaning = _text(meanings.get(field.name, ""))
        if choices := dict(_subcommands(hint)):
            below += [
                sections_of(made(), name=path, title=f"{_dashed(path)}:{choice}", intro=meaning)
                for choice, made in choices.items()
                if made is not NoneType
            ]
        elif is_dataclass(value) and not isinstance(value, type):
            below.append(sections_of(value, name=path, intro=meaning))
        elif isinstance(value, list) and value and is_dataclass(value[0]):
            below.append(sections_of(value[0], name=f"{path}.0", intro=meaning))
        elif isinstance(value, dict):
            meanings_of_keys = [meaning] + ["the same"] * len(value)
            flags += [
                Flag(name=f"{path}.{key}", values="", default="the recipe's", meaning=text)
                for key, text in zip(value, meanings_of_keys, strict=False)
            ]
        elif _is_typed(hint):
            flags.append(
                Flag(name=path, values=_values(hint), default=_default(field), meaning=meaning)
            )
    yield Section(
        name=name,
        title=title or name,
        intro=intro,
        config_class=type(config),
        flags=tuple(flags),
    )
    for sections in below:
        yield from sections


@cache
def field_docstrings(config_class: type) -> Mapping[str, str]:
    """The string below each field, by the name of the field; those of base classes too."""
    found: dict[str, str] = {}
    for cls in reversed(config_class.__mro__):
        if not is_dataclass(cls):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for statement, below in zip(body, body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                found[statement.target.id] = below.value.value
    return found


def _is_hidden(hint: Any) -> bool:
    return typing.get_origin(hint) is Annotated and tyro.conf.Suppress in hint.__metadata__


def _subcommands(hint: Any) -> Iterator[tuple[str, type]]:
    """Names and classes, if the field is a choice between classes."""
    for option in typing.get_args(hint):
        if typing.get_origin(option) is Annotated:
            named = [getattr(each, "name", None) for each in option.__metadata__]
            yield str(named[0]), option.__origin__


def _is_typed(hint: Any) -> bool:
    """Whether a value can be typed: a plain one, or lists and choices of such."""
    if hint in _FORMS or hint in _WORDS or typing.get_origin(hint) is Literal:
        return True
    return bool(typing.get_args(hint)) and all(map(_is_typed, typing.get_args(hint)))


def _values(hint: Any) -> str:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint in _FORMS:
        return _FORMS[hint]
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (UnionType, typing.Union):
        return " or ".join(dict.fromkeys(_values(each) for each in arguments))
    if origin is list:
        return f"several of: {_values(arguments[0])}"
    return _WORDS[hint]


def _default(field: Field[Any]) -> str:
    value = field.default
    if field.default_factory is not MISSING:
        value = field.default_factory()
    if value is MISSING:
        return "the recipe's"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value in ("", []):
        return "empty"
    return f"`{','.join(value) if isinstance(value, list) else value}`"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _anchor(title: str) -> str:
    """Where a link to the heading ``title`` goes, as Markdown viewers make it."""
    return re.sub(r"[^a-z0-9_ -]", "", title.lower()).replace(" ", "-")


def _text(docstring: str) -> str:
    """``docstring`` in one line that may stand in a table."""
    return " ".join(docstring.split()).replace("``", "`").replace("|", "\\|")


def main() -> None:
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
