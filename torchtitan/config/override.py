"""Replace parts of a config tree by name, without touching the recipe that made it.

An override is a function that turns one config into another, registered for a config class. Naming
it in ``override.imports`` applies it to every config of that class in the tree. All matches are found and
all replacements are made before the first one is put in place, so a failing override changes nothing.

    @override(target=Attention.Config)  ->  registry  <- name -  --override.imports pkg.mod.function
                                               |
              config tree -> apply_overrides (find, check for conflicts, make, replace)
"""

import importlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

from torchtitan.config.configs import OverrideConfig, OverrideImport
from torchtitan.config.configurable import Configurable
from torchtitan.tools.logging import logger

Factory = TypeVar("Factory", bound=Callable[..., Any])


@dataclass(kw_only=True, slots=True)
class Override:
    """A registered function that replaces configs of one class."""

    target_cls: type
    """The config class whose instances are replaced."""

    factory: Callable[..., Any]
    """Takes the config found, and the options of the import as keywords; returns the config to use."""

    fqns: list[str] | None
    """Shell patterns of the places in the tree to replace; None is all of them."""

    description: str
    """One line for the log."""

    origin_module: str
    """The module that registered it."""

    exact: bool = False
    """Leave subclasses of target_cls alone."""

    @property
    def name(self) -> str:
        """How ``override.imports`` refers to it."""
        return f"{self.origin_module}.{self.factory.__name__}"

    def matches(self, fqn: str) -> bool:
        """Whether the place ``fqn`` is one this override is for."""
        return self.fqns is None or any(fnmatchcase(fqn, pattern) for pattern in self.fqns)


_registry: dict[str, Override] = {}


def override(
    *, target: type, fqns: list[str] | None = None, description: str = "", exact: bool = False
) -> Callable[[Factory], Factory]:
    """Register the decorated function as an override of configs of type ``target``.

    Raises ``TypeError`` if ``target`` is no config class of a ``Configurable`` and ``ValueError`` if the
    module has registered a function of that name before.
    """
    if not (isinstance(target, type) and issubclass(target, Configurable.Config)):
        raise TypeError(
            f"an override for {target!r} was asked for; only a Config of a Configurable class can be overridden. "
            "Pass that class as target, for example target=MyAttention.Config."
        )

    def register(factory: Factory) -> Factory:
        entry = Override(
            target_cls=target,
            factory=factory,
            fqns=fqns,
            description=description,
            origin_module=factory.__module__,
            exact=exact,
        )
        if entry.name in _registry:
            raise ValueError(
                f"the override {entry.name} is registered already, for "
                f"{_registry[entry.name].target_cls.__qualname__}. Give one of the two functions another name."
            )
        _registry[entry.name] = entry
        return factory

    return register


def clear_overrides() -> None:
    """Forget every registered override."""
    _registry.clear()


def derive(source: Any, target_cls: type, **deltas: Any) -> Any:
    """A ``target_cls`` with the fields it shares with ``source``, except that ``deltas`` win.

    Raises ``TypeError`` if ``target_cls`` is no dataclass and ``ValueError`` for a delta it has no field for.
    """
    if not (isinstance(target_cls, type) and is_dataclass(target_cls)):
        raise TypeError(
            f"cannot derive a {target_cls!r}: it is not a dataclass. Pass a config class as target_cls."
        )
    wanted = {field.name for field in fields(target_cls) if field.init}
    unknown = sorted(deltas.keys() - wanted)
    if unknown:
        raise ValueError(
            f"cannot set {unknown} on {target_cls.__qualname__}: it has no such fields. It has {sorted(wanted)}."
        )
    shared = wanted & {field.name for field in fields(source)}
    return target_cls(**{name: getattr(source, name) for name in shared} | deltas)


def problems(override_config: OverrideConfig, config_root: Any) -> list[str]:
    """The imports that ``apply_overrides`` would refuse or that change nothing, one message each.

    Imports their modules; changes nothing. Overrides that claim the same place are not looked for.
    """
    found = []
    for entry in override_config.imports:
        name = entry if isinstance(entry, str) else entry[0]
        try:
            if not _find_claims(_look_up(name), {}, config_root):
                found.append(_matches_nothing(name))
        except (ImportError, ValueError) as error:
            found.append(str(error))
    return found


def _matches_nothing(name: str) -> str:
    return (
        f"The override {name} changes nothing: no config in the tree matches it. "
        "Check its target and its fqns."
    )


class _Claim(NamedTuple):
    fqn: str
    config: Any
    parent: Any
    key: str | int
    override: Override
    options: dict[str, Any]


def apply_overrides(override_config: OverrideConfig, config_root: Any) -> list[str]:
    """Replace, inside ``config_root``, what the overrides of ``override_config`` are for.

    Returns the places that were replaced, in the order of the imports. Raises ``ImportError`` for a module
    that cannot be imported and ``ValueError`` for a name that no module registered or that is listed
    twice, for an override of the root, and for overrides that claim the same place or one inside the other.
    """
    claims: list[_Claim] = []
    seen: set[str] = set()
    for entry in override_config.imports:
        name, options = (entry, {}) if isinstance(entry, str) else entry
        if name in seen:
            raise ValueError(
                f"override.imports lists {name!r} more than once. Name each override once."
            )
        seen.add(name)
        found = _find_claims(_look_up(name), options, config_root)
        if not found:
            logger.warning(_matches_nothing(name))
        claims.extend(found)
    _require_disjoint(claims)
    replacements = [_make(claim) for claim in claims]
    for claim, replacement in zip(claims, replacements, strict=True):
        if isinstance(claim.key, int):
            claim.parent[claim.key] = replacement
        else:
            setattr(claim.parent, claim.key, replacement)
    return [claim.fqn for claim in claims]


def _look_up(name: str) -> Override:
    module_name = name.rpartition(".")[0]
    if not module_name:
        raise ValueError(
            f"override.imports names {name!r}, which has no module. "
            "Give the full name of the function: package.module.function."
        )
    try:
        importlib.import_module(module_name)
    # Not ImportError alone: the module is the user's, and may be unfinished in any way.
    except Exception as error:
        raise ImportError(
            f"override.imports names {name!r}, but its module {module_name!r} cannot be imported: "
            f"{type(error).__name__}: {error}. "
            "Check the name, and that the module is on PYTHONPATH."
        ) from error
    if name not in _registry:
        known = sorted(known for known in _registry if known.startswith(f"{module_name}."))
        raise ValueError(
            f"override.imports names {name!r}, which is not a registered override; {module_name} has "
            f"{known or 'none'}. Name one of these, or decorate the function with @override(target=...)."
        )
    return _registry[name]


def _find_claims(entry: Override, options: dict[str, Any], root: Any) -> list[_Claim]:
    claims = []
    # Also below matches: the one that fqns asks for may hang under another of the same class.
    for fqn, config, parent, key in root.traverse(entry.target_cls, recurse=True):
        if entry.exact and type(config) is not entry.target_cls:
            continue
        if not entry.matches(fqn):
            continue
        if parent is None or key is None:
            raise ValueError(
                f"the override {entry.name} would replace the root config ({type(config).__qualname__}), which "
                "has no place to be replaced in. Choose a target below it, or restrict it with fqns."
            )
        claims.append(_Claim(fqn, config, parent, key, entry, options))
    return claims


def _require_disjoint(claims: Sequence[_Claim]) -> None:
    problems = []
    for position, first in enumerate(claims):
        for second in claims[position + 1 :]:
            outer, inner = sorted((first, second), key=lambda claim: len(claim.fqn))
            if outer.fqn == inner.fqn or inner.fqn.startswith(f"{outer.fqn}."):
                problems.append(
                    f"{outer.fqn} ({outer.override.name}) and {inner.fqn} ({inner.override.name})"
                )
    if problems:
        raise ValueError(
            f"overrides claim the same config, or one inside the other: {'; '.join(sorted(problems))}. "
            "Restrict them with fqns, or import only one of them."
        )


def _make(claim: _Claim) -> Any:
    replacement = claim.override.factory(claim.config, **claim.options)
    if not isinstance(replacement, Configurable.Config):
        raise TypeError(
            f"the override {claim.override.name} returned {type(replacement).__qualname__} for {claim.fqn}; "
            "it must return a Config of a Configurable class."
        )
    detail = f" ({claim.override.description})" if claim.override.description else ""
    logger.info(f"Override {claim.override.name}{detail} replaces {claim.fqn}")
    return replacement


def parse_cli_imports(tokens: Iterable[str]) -> list[OverrideImport]:
    """Read command-line tokens: ``a.b.f``, ``a.b.f,c.d.g``, ``a.b.f={"json": 1}`` and mixtures of these.

    Raises ``ValueError`` for options that are not a JSON object.
    """
    imports: list[OverrideImport] = []
    for token in tokens:
        rest = token.strip()
        while rest:
            rest = _parse_next(rest, imports)
    return imports


def _parse_next(text: str, imports: list[OverrideImport]) -> str:
    """Move the first import of ``text`` to ``imports``; return what is left of the text."""
    end = min((text.find(mark) for mark in ",=" if mark in text), default=len(text))
    name, separator, rest = text[:end].strip(), text[end : end + 1], text[end + 1 :].strip()
    if not name:
        raise ValueError(
            f"override.imports: no name before {text!r}. Write pkg.module.function for each override."
        )
    if separator != "=":
        imports.append(name)
        return rest
    try:
        # The options may hold commas, so only the JSON reader knows where they end.
        options, length = json.JSONDecoder().raw_decode(rest)
    except json.JSONDecodeError as error:
        options, length = error, 0
    rest, tail = rest[length:].strip(), rest
    if not isinstance(options, dict) or (rest and not rest.startswith(",")):
        raise ValueError(
            f"override.imports: the options of {name} are {tail!r}, not a JSON object. "
            f'Write {name}={{"option": 1}} and quote it for the shell.'
        )
    imports.append((name, options))
    return rest[1:].strip()


def format_cli_imports(entries: Iterable[OverrideImport]) -> list[str]:
    """The tokens that ``parse_cli_imports`` reads as ``entries``."""
    return [
        entry if isinstance(entry, str) else f"{entry[0]}={json.dumps(entry[1])}"
        for entry in entries
    ]
