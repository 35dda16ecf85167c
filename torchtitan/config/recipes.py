"""Find a recipe: the function that ``--module`` and ``--config`` name.

A recipe is a function without arguments that returns the config of a run. Recipes are found by
dotted name and imported by nobody, so a user's own package needs no registration.

    --module llama3  ->  torchtitan.models.llama3.config_registry  --config llama3_jargon ->  function
"""

import difflib
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

REGISTRY = "config_registry"

_SHORTHAND_PACKAGES = (
    "torchtitan.models",
    "torchtitan.experiments",
    "torchtitan.experiments.rl.examples",
)


class CommandLineError(Exception):
    """What the user typed cannot be used. The text is meant for the user; a traceback would not help."""


class CommandLineValueError(CommandLineError, ValueError):
    """A flag is missing or its value is unknown."""


class RecipeImportError(CommandLineError, ImportError):
    """No module of recipes can be imported under the given name."""


def known_modules() -> list[str]:
    """The short names that ``--module`` accepts, sorted."""
    # By name, because the packages lie in layers above this one.
    models = importlib.import_module("torchtitan.models")._supported_models
    experiments = importlib.import_module("torchtitan.experiments")._supported_experiments
    return sorted(models | experiments)


class RecipeModule:
    """The module that ``--module`` names, imported, with the recipes in it.

    Raises ``RecipeImportError`` if nothing can be imported under ``name``.
    """

    def __init__(self, name: str) -> None:
        shorthands = known_modules()
        if name in shorthands:
            candidates = [f"{package}.{name}.{REGISTRY}" for package in _SHORTHAND_PACKAGES]
            headline = f"Cannot import {REGISTRY} for module {name!r}"
        else:
            candidates = [f"{name}.{REGISTRY}", name]
            headline = f"Cannot import module {name!r}"
        # Modules that exist and fail to import: the cause is in them, not in the name.
        self._broken: dict[str, ImportError] = {}
        module = self._import_first(candidates)
        if module is None:
            cause = next(iter(self._broken.values()), None)
            raise RecipeImportError(
                f"{headline}; tried {', '.join(candidates)}.{self._broken_note()} "
                f"Give --module one of {', '.join(shorthands)}, or the name of an importable module or package."
            ) from cause
        self._module = module

    def _import_first(self, candidates: list[str]) -> ModuleType | None:
        for candidate in candidates:
            if candidate.startswith("."):
                continue
            try:
                return importlib.import_module(candidate)
            except ImportError as error:
                if not _is_absent(candidate, error):
                    self._broken[candidate] = error
        return None

    def _broken_note(self) -> str:
        return "".join(
            f" {candidate} exists but fails to import: {type(error).__name__}: {error}."
            for candidate, error in sorted(self._broken.items())
        )

    def recipe_names(self) -> list[str]:
        """The recipes of the module, sorted: its public functions without required arguments."""
        module = self._module
        return sorted(
            name for name, value in vars(module).items() if _is_recipe(module.__name__, name, value)
        )

    def recipe(self, name: str) -> Callable[[], Any]:
        """The recipe ``name``; raises ``CommandLineValueError`` if there is none."""
        function = getattr(self._module, name, None)
        if callable(function):
            return function
        found = self.recipe_names()
        close = difflib.get_close_matches(name, found, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise CommandLineValueError(
            f"--config {name} is not a function of {self._module.__name__}.{hint}{self._broken_note()} "
            f"Available config functions: {', '.join(found) or 'none'}."
        )


def _is_absent(candidate: str, error: ImportError) -> bool:
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return False
    return candidate == error.name or candidate.startswith(f"{error.name}.")


def _is_recipe(module_name: str, name: str, value: Any) -> bool:
    if not name[0].islower() or not callable(value):
        return False
    # A module also holds the tools that it imported; a recipe comes from the same package.
    package = module_name.removesuffix(f".{REGISTRY}")
    origin = getattr(value, "__module__", None) or ""
    if origin != package and not origin.startswith(f"{package}."):
        return False
    return all(
        parameter.default is not parameter.empty
        or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in inspect.signature(value).parameters.values()
    )
