"""docs/flags.md names every flag that the command line knows, as the classes describe it."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
import tyro
from scripts import flags_page
from torchtitan.config import Configurable
from torchtitan.preflight import parse_or_exit

RECIPE = ["--module", "llama3", "--config", "llama3_jargon"]


def test_the_page_is_what_the_classes_say() -> None:
    assert (
        flags_page.PAGE.read_text() == flags_page.page()
    ), f"docs/flags.md is behind the code: run {flags_page.COMMAND}"


def flags_of_help(text: str) -> set[str]:
    """The settings in the text of ``--help``; what switches one off is not a flag of its own."""
    found = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9._-]*)", text))
    off = {name for name in found if re.sub(r"(^|\.)no-(?=[^.]*$)", r"\1", name) in found - {name}}
    return {name.replace("-", "_") for name in found - off}


def test_the_page_has_the_flags_of_the_help_and_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    sections = list(flags_page.all_sections())
    choices = [s.title for s in sections if s.title.startswith("activation-checkpoint:")]
    backends = [s.title.split() for s in sections if ".backend " in s.title]
    assert len(choices) == 3
    known: set[str] = set()
    for choice in ([], *([choice] for choice in choices), *(["--" + b[0], b[1]] for b in backends)):
        with pytest.raises(SystemExit):
            parse_or_exit([*RECIPE, *choice, "--help"])
        known |= flags_of_help(capsys.readouterr().out)
    known -= {"help", "module", "config", "checkpoint.backend"}
    described = {flag.name for section in sections for flag in section.flags}
    assert sorted(known - described) == []
    assert sorted(described - known) == []
    assert len(described) > 120


def test_every_flag_has_a_meaning_and_a_default() -> None:
    for section in flags_page.all_sections():
        for flag in section.flags:
            assert flag.meaning, f"--{flag.name} has no docstring below its field"
            assert flag.default, flag.name


class Inner(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        size: int
        """How large."""


class Outer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Inner.Config):
        kind: Literal["a", "b"] | None = "a"
        """Which ``kind`` | of two
        lines."""

        names: list[str] = field(default_factory=lambda: ["x", "y"])
        """Names."""

        on: bool = True
        """Switch."""

        secret: Annotated[int, tyro.conf.Suppress] = 0
        function: Any = None
        _private: int = 0
        inner: Inner.Config = field(default_factory=lambda: Inner.Config(size=3))
        """Below."""

        several: list[Inner.Config] = field(default_factory=list)
        """Many."""

        settings: dict[str, float] = field(default_factory=dict)
        """Free."""


def test_a_section_has_the_fields_that_can_be_typed_with_those_of_its_base() -> None:
    config = Outer.Config(size=1, several=[Inner.Config(size=2)], settings={"lr": 1.0, "eps": 0.1})
    own, inner, several = flags_page.sections_of(config, name="outer")
    assert [(flag.name, flag.values, flag.default, flag.meaning) for flag in own.flags] == [
        ("outer.size", "integer", "the recipe's", "How large."),
        ("outer.kind", "`a`, `b` or None", "`a`", "Which `kind` \\| of two lines."),
        ("outer.names", "`a,b,c`", "`x,y`", "Names."),
        ("outer.on", "on, off", "on", "Switch."),
        ("outer.settings.lr", "", "the recipe's", "Free."),
        ("outer.settings.eps", "", "the recipe's", "the same"),
    ]
    assert (inner.name, inner.intro) == ("outer.inner", "Below.")
    assert [flag.name for flag in several.flags] == ["outer.several.0.size"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--a.no-repeat, --a.repeat", {"a.repeat"}),
        ("--a.no-b", {"a.no_b"}),
        ("--no-a --a", {"a"}),
        ("--dump-folder X, as in --a.b.0.c_d", {"dump_folder", "a.b.0.c_d"}),
    ],
)
def test_the_flags_of_a_help_text_are_found(text: str, expected: set[str]) -> None:
    assert flags_of_help(text) == expected
