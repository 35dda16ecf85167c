"""Configs build their own class, print as JSON, and find their children."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from torchtitan.config import Configurable, derive, Function


class Leaf(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        size: int = 1

    def __init__(self, config: Config, *, device: str = "cpu") -> None:
        self.config = config
        self.device = device


class Middle(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        leaf: Leaf.Config = field(default_factory=Leaf.Config)


class Root(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        middle: Middle.Config = field(default_factory=Middle.Config)
        layers: list[Any] = field(default_factory=lambda: [Middle.Config(), Middle.Config()])
        unseen: tuple[Any, ...] = field(default_factory=lambda: (Leaf.Config(),))


@dataclass
class Plain:
    fn: Any
    sizes: tuple[int, ...] = (1, 2)


def test_build_makes_the_class_around_the_config_and_passes_keywords():
    built = Leaf.Config(size=3).build(device="meta")
    assert type(built) is Leaf and built.config.size == 3 and built.device == "meta"


def test_the_built_object_holds_a_copy_of_its_config():
    config = Leaf.Config(size=3)
    config.build().config.size = 4
    assert config.size == 3


def test_a_subclass_with_a_config_of_its_own_builds_itself_and_one_without_builds_its_parent():
    class Own(Leaf):
        @dataclass(kw_only=True, slots=True)
        class Config(Leaf.Config):
            pass

    class Inherited(Leaf):
        pass

    assert type(Own.Config().build()) is Own
    assert type(Inherited.Config().build()) is Leaf
    assert Leaf.Config._owner is Leaf


def test_a_config_that_belongs_to_no_class_cannot_be_built():
    with pytest.raises(NotImplementedError, match="not nested in a Configurable"):
        Configurable.Config().build()


def test_a_keyword_with_the_name_of_a_setting_is_refused():
    with pytest.raises(ValueError, match=r"\['size'\].*Set them on the config"):
        Leaf.Config().build(size=3)


def test_checks_run_again_on_the_copy_that_build_hands_over():
    class Checked(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            size: int = 1

            def __post_init__(self) -> None:
                if self.size < 1:
                    raise ValueError("size")

        def __init__(self, config: Config) -> None:
            pass

    config = Checked.Config()
    config.size = 0
    with pytest.raises(ValueError, match="size"):
        config.build()


def test_a_config_without_slots_is_refused():
    with pytest.raises(TypeError, match="Loose.Config has no __slots__"):

        class Loose(Configurable):
            @dataclass(kw_only=True)
            class Config(Configurable.Config):
                size: int = 1


def test_a_config_with_positional_settings_is_refused():
    with pytest.raises(TypeError, match=r"not keyword-only: \['size'\]"):

        class Loose(Configurable):
            @dataclass(slots=True)
            class Config(Configurable.Config):
                size: int = 1


def test_a_misspelt_setting_is_an_error():
    config: Any = Leaf.Config()
    with pytest.raises(AttributeError):
        config.sise = 3


def test_to_dict_survives_json_whatever_it_holds(caplog: pytest.LogCaptureFixture):
    class Holder(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            leaf: Leaf.Config = field(default_factory=Leaf.Config)
            plain: Any = field(default_factory=lambda: Plain(fn=len))
            type_: Any = Leaf.Config
            table: dict[Any, Any] = field(default_factory=lambda: {(1, 2): [None, 1.5, True]})
            _private: int = 3
            odd: Any = field(default_factory=lambda: {1})

    result = Holder.Config().to_dict()
    assert json.loads(json.dumps(result)) == {
        "leaf": {"size": 1},
        "plain": {"fn": "<built-in function len>", "sizes": [1, 2]},
        "type_": repr(Leaf.Config),
        "table": {"(1, 2)": [None, 1.5, True]},
        "odd": "{1}",
    }
    assert result["plain"]["sizes"] == (1, 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_traverse_goes_in_the_order_of_declaration_and_below_matches_if_told_to():
    root = Root.Config()
    found = [name for name, *_ in root.traverse(Configurable.Config, recurse=True)]
    assert found == [
        "",
        "middle",
        "middle.leaf",
        "layers.0",
        "layers.0.leaf",
        "layers.1",
        "layers.1.leaf",
    ]
    assert [name for name, *_ in root.traverse(Middle.Config)] == ["middle", "layers.0", "layers.1"]
    assert list(root.traverse(Configurable.Config)) == [("", root, None, None)]


def test_traverse_says_where_a_replacement_goes():
    root = Root.Config()
    places = {name: (parent, key) for name, _, parent, key in root.traverse(Middle.Config)}
    assert places["middle"][0] is root and places["middle"][1] == "middle"
    assert places["layers.1"][0] is root.layers and places["layers.1"][1] == 1
    (leaf,) = [match for match in root.traverse(Leaf.Config) if match[0] == "layers.0.leaf"]
    assert leaf[2] is root.layers[0] and leaf[3] == "leaf"


def test_traverse_enters_foreign_objects_that_can_be_traversed():
    class Spec:
        def __init__(self, model: Any) -> None:
            self.model = model

        def traverse(self, config_cls: type, *, recurse: bool = False, _prefix: str = "") -> Any:
            yield f"{_prefix}.model", self.model, self, "model"

    root = Root.Config(layers=[Spec(Leaf.Config())])
    names = [name for name, *_ in root.traverse(Leaf.Config)]
    assert names == ["middle.leaf", "layers.0.model"]


def test_derive_copies_shared_fields_and_lets_deltas_win():
    assert derive(Leaf.Config(size=5), Leaf.Config) == Leaf.Config(size=5)
    assert derive(Leaf.Config(size=5), Leaf.Config, size=6) == Leaf.Config(size=6)
    assert derive(Middle.Config(), Leaf.Config) == Leaf.Config()
    with pytest.raises(ValueError, match=r"\['sise'\]"):
        derive(Leaf.Config(), Leaf.Config, sise=6)
    with pytest.raises(TypeError, match="not a dataclass"):
        derive(Leaf.Config(), int)


def test_a_function_config_builds_something_to_call():
    add = Function.Config(fn=lambda left, right=1: left + right).build()
    assert add(2) == 3 and add(2, right=5) == 7
