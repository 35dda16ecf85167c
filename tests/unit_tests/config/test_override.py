"""Overrides replace what they are for, all or nothing."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
from torchtitan.config import (
    apply_overrides,
    clear_overrides,
    Configurable,
    derive,
    override,
    OverrideConfig,
)
from torchtitan.config.override import format_cli_imports, parse_cli_imports

MODULE = "some_overrides"


class Part(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        size: int = 1


class BigPart(Part):
    @dataclass(kw_only=True, slots=True)
    class Config(Part.Config):
        extra: int = 0


class Layer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        part: Part.Config = field(default_factory=Part.Config)


class Root(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        layers: list[Layer.Config] = field(
            default_factory=lambda: [Layer.Config(), Layer.Config(part=BigPart.Config())]
        )
        head: Part.Config = field(default_factory=Part.Config)


def grow(config: Part.Config, *, extra: int = 5) -> Part.Config:
    return derive(config, BigPart.Config, extra=extra)


@pytest.fixture(autouse=True)
def _overrides_module() -> Iterator[None]:
    sys.modules[MODULE] = ModuleType(MODULE)
    yield
    del sys.modules[MODULE]
    clear_overrides()


def register(name: str, factory: Any = grow, *, target: type = Part.Config, **settings: Any) -> str:
    """Register a copy of ``factory`` as if the module had defined it; returns its full name."""

    def call(config: Any, **options: Any) -> Any:
        return factory(config, **options)

    call.__module__, call.__name__ = MODULE, name
    assert override(target=target, **settings)(call) is call
    return f"{MODULE}.{name}"


def test_an_override_replaces_every_config_of_its_class():
    root = Root.Config()
    assert apply_overrides(OverrideConfig(imports=[register("grow")]), root) == [
        "layers.0.part",
        "layers.1.part",
        "head",
    ]
    assert root.head == BigPart.Config(extra=5)
    assert [layer.part for layer in root.layers] == [BigPart.Config(extra=5)] * 2


def test_an_item_of_a_list_is_replaced_in_the_list():
    root = Root.Config()

    def new_layer(config: Layer.Config) -> Layer.Config:
        return Layer.Config(part=Part.Config(size=9))

    name = register("new_layer", new_layer, target=Layer.Config, fqns=["layers.1"])
    apply_overrides(OverrideConfig(imports=[name]), root)
    assert [layer.part.size for layer in root.layers] == [1, 9]


def test_patterns_exactness_and_options_narrow_an_override():
    root = Root.Config()
    names = [
        register("heads", fqns=["he*"]),
        register("exact", exact=True, fqns=["layers.*"]),
    ]
    imports: list[Any] = [(names[0], {"extra": 7}), names[1]]
    assert apply_overrides(OverrideConfig(imports=imports), root) == ["head", "layers.0.part"]
    assert root.head == BigPart.Config(extra=7)
    assert root.layers[1].part == BigPart.Config(extra=0)


def test_an_override_that_matches_nothing_is_a_warning(caplog: pytest.LogCaptureFixture):
    name = register("nowhere", fqns=["tail"])
    assert apply_overrides(OverrideConfig(imports=[name]), Root.Config()) == []
    assert f"{name} changes nothing" in caplog.text


def test_two_overrides_of_one_config_or_of_one_inside_the_other_are_refused():
    root = Root.Config()
    same = [register("first"), register("second", fqns=["head"])]
    with pytest.raises(ValueError, match=r"head \(some_overrides.first\) and head"):
        apply_overrides(OverrideConfig(imports=list(same)), root)
    nested = [register("outer", lambda config: config, target=Layer.Config), same[0]]
    with pytest.raises(ValueError, match=r"layers.0 \(some_overrides.outer\) and layers.0.part"):
        apply_overrides(OverrideConfig(imports=list(nested)), root)
    assert root == Root.Config()


def test_a_failing_override_changes_nothing():
    root = Root.Config()
    names = [register("good", fqns=["head"]), register("bad", lambda config: 3, fqns=["layers.*"])]
    with pytest.raises(TypeError, match="returned int for layers.0.part"):
        apply_overrides(OverrideConfig(imports=list(names)), root)
    assert root == Root.Config()


def test_the_root_cannot_be_overridden():
    name = register("whole", lambda config: config, target=Root.Config)
    with pytest.raises(ValueError, match="would replace the root config"):
        apply_overrides(OverrideConfig(imports=[name]), Root.Config())


@pytest.mark.parametrize(
    ("imports", "error", "text"),
    [
        (["no_such_module.f"], ImportError, "module 'no_such_module' cannot be imported"),
        ([f"{MODULE}.unknown"], ValueError, r"not a registered override; some_overrides has \["),
        (["bare"], ValueError, "has no module"),
        ([f"{MODULE}.known", (f"{MODULE}.known", {})], ValueError, "more than once"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(imports: list[Any], error: type, text: str):
    register("known")
    with pytest.raises(error, match=text):
        apply_overrides(OverrideConfig(imports=imports), Root.Config())


def test_a_wrong_registration_is_refused():
    with pytest.raises(TypeError, match="only a Config of a Configurable class"):
        override(target=int)
    register("twice")
    with pytest.raises(ValueError, match="registered already"):
        register("twice")
    clear_overrides()
    register("twice")


@pytest.mark.parametrize(
    ("tokens", "entries"),
    [
        ([], []),
        (["a.f"], ["a.f"]),
        (["a.f,b.g", "c.h"], ["a.f", "b.g", "c.h"]),
        (['a.f={"x": [1, 2], "y": "p,q=r"}'], [("a.f", {"x": [1, 2], "y": "p,q=r"})]),
        (['a.f, b.g={"x": 1}, c.h'], ["a.f", ("b.g", {"x": 1}), "c.h"]),
    ],
)
def test_tokens_and_entries_convert_both_ways(tokens: list[str], entries: list[Any]):
    assert parse_cli_imports(tokens) == entries
    assert parse_cli_imports(format_cli_imports(entries)) == entries


@pytest.mark.parametrize("token", ["a.f=[1]", "a.f=1", "a.f={", "a.f=", 'a.f={"x": 1}b.g', "={}"])
def test_options_that_are_no_json_object_are_refused(token: str):
    with pytest.raises(ValueError, match="override.imports"):
        parse_cli_imports([token])
