"""Classes that are built from a config of their own.

A ``Configurable`` class carries a nested dataclass ``Config`` with everything a user may set;
``config.build(...)`` makes the object and hands it a copy. What only the program knows (tensors, meshes,
other objects) goes to ``build`` as keywords. Every concrete class declares its own ``Config``, even an
empty one: an inherited ``Config`` builds the class that declared it.

    recipe / command line -> Config -> (traverse, override) -> Config.build(**runtime objects) -> object
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Self

from torchtitan.config.violations import collecting
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import logger


class Configurable:
    """Base of every class with a nested ``Config``; checks that class when the outer one is created."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Settings of the class around it."""

        _owner: ClassVar[type | None] = None

        def build(self, **kwargs: Any) -> Any:
            """Make an object of the class this config belongs to, from a shallow copy of the config.

            The copy is checked again. Raises ``NotImplementedError`` for a config that
            belongs to no class and ``ValueError`` when a keyword bears the name of a setting.
            """
            owner = self._owner
            if owner is None:
                raise NotImplementedError(
                    f"{type(self).__qualname__} cannot be built: it is not nested in a Configurable class. "
                    "Declare it inside the class that it configures."
                )
            settings = {field.name for field in fields(self)}
            clashes = sorted(settings & kwargs.keys())
            if clashes:
                raise ValueError(
                    f"{type(self).__qualname__}.build got {clashes} as keywords, but these are settings of "
                    "the config. Set them on the config before building."
                )
            with sl.log_trace_span(f"{type(self).__qualname__}.build"):
                return owner(config=self._checked_copy(), **kwargs)

        def _checked_copy(self) -> Self:
            # Settings may have been changed since they were checked, so the copy checks them again;
            # what its checks merely warn about was said when the config was made.
            with collecting() as found:
                copied = replace(self)
            if found:
                raise ValueError("\n".join(found))
            return copied

        def to_dict(self) -> dict[str, Any]:
            """The settings as plain values that ``json.dumps`` accepts; private fields are left out."""
            return {
                field.name: to_plain(getattr(self, field.name))
                for field in fields(self)
                if not field.name.startswith("_")
            }

        def traverse(
            self, config_cls: type, *, recurse: bool = False, _prefix: str = ""
        ) -> Iterator[tuple[str, Any, Any, str | int | None]]:
            """Find the configs of type ``config_cls`` in this tree, in the order of declaration.

            Yields (name, config, parent, field): ``name`` is dotted, with positions for the items of lists;
            ``parent`` and ``field`` say where a replacement would go (an attribute of an object, an index
            of a list; both None for this config itself). Below a match the search goes on only with
            ``recurse``. Dicts and tuples are not searched.
            """
            if isinstance(self, config_cls):
                yield _prefix, self, None, None
                if not recurse:
                    return
            for name, child, parent, key in _children(self, _prefix):
                if isinstance(child, type) or not callable(getattr(child, "traverse", None)):
                    continue
                matches = child.traverse(config_cls, recurse=recurse, _prefix=name)
                for fqn, config, match_parent, match_key in matches:
                    if match_parent is None:
                        # The child itself, which cannot know where it hangs.
                        match_parent, match_key = parent, key
                    yield fqn, config, match_parent, match_key

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        config_cls = cls.__dict__.get("Config")
        if not (isinstance(config_cls, type) and issubclass(config_cls, Configurable.Config)):
            return
        _require_config_style(cls, config_cls)
        config_cls._owner = cls


def _require_config_style(cls: type, config_cls: type) -> None:
    name = f"{cls.__qualname__}.Config"
    advice = "Declare it with @dataclass(kw_only=True, slots=True)."
    if "__slots__" not in config_cls.__dict__:
        # Without slots a misspelt setting would become a new attribute that nobody reads.
        raise TypeError(f"{name} has no __slots__ of its own. {advice}")
    positional = [field.name for field in fields(config_cls) if field.init and not field.kw_only]
    if positional:
        raise TypeError(f"{name} has settings that are not keyword-only: {positional}. {advice}")


def _children(config: Any, prefix: str) -> Iterator[tuple[str, Any, Any, str | int]]:
    """Values of the fields, and items of those that are lists, as (name, value, parent, key)."""
    for field in fields(config):
        value = getattr(config, field.name)
        name = f"{prefix}.{field.name}" if prefix else field.name
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield f"{name}.{index}", item, value, index
        else:
            yield name, value, config, field.name


def to_plain(value: Any) -> Any:
    """``value`` in terms of dicts, lists, tuples, strings, numbers, booleans and None.

    Callables and types become their ``repr``; so does everything unknown, with a warning.
    """
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, type):
        return repr(value)
    if callable(getattr(value, "to_dict", None)):
        return value.to_dict()
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(to_plain(item) for item in value)
    if isinstance(value, Mapping):
        return {_plain_key(key): to_plain(item) for key, item in value.items()}
    if not callable(value):
        logger.warning(
            f"A setting of type {type(value).__qualname__} is shown as its repr: {value!r}. "
            "It cannot be read back from there; use plain values if that matters."
        )
    return repr(value)


def _plain_key(key: Any) -> Any:
    return key if key is None or isinstance(key, (str, int, float, bool)) else repr(key)
