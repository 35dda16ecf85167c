"""From the command line to the config of a run.

``--module`` and ``--config`` choose a recipe, the recipe makes a config, and every other flag changes a
setting of it: the command line wins over the recipe. All settings that cannot be used are
reported together.

    args -> early flags (--module, --config, ...) -> recipe() -> tyro (all other flags) -> checks -> config

Print the config that a command line leads to:

    python -m torchtitan.config.manager --module llama3 --config llama3_debugmodel --training.steps 20
"""

import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass, replace
from typing import Any, get_type_hints

import tyro

from torchtitan.config.backends import backend_flag, CHECKPOINT_BACKENDS
from torchtitan.config.configs import OverrideImport
from torchtitan.config.configurable import to_plain
from torchtitan.config.early_flags import EarlyFlag, take_early_flags
from torchtitan.config.override import format_cli_imports, parse_cli_imports
from torchtitan.config.recipes import (
    CommandLineError,
    CommandLineValueError,
    known_modules,
    RecipeModule,
)
from torchtitan.config.unknown_flags import not_understood
from torchtitan.config.violations import collecting, exit_with, speaks
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

custom_registry = tyro.constructors.ConstructorRegistry()
"""How tyro reads the types that have a form of their own on our command line."""


@custom_registry.primitive_rule
def _string_list_rule(
    type_info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[list[str]] | None:
    if type_info.type != list[str]:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="A,B,C",
        instance_from_str=lambda tokens: [
            item.strip() for item in tokens[0].split(",") if item.strip()
        ],
        is_instance=lambda value: (
            isinstance(value, list) and all(isinstance(item, str) for item in value)
        ),
        str_from_instance=lambda items: [",".join(items)],
    )


@custom_registry.primitive_rule
def _override_list_rule(
    type_info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[list[OverrideImport]] | None:
    if type_info.type != list[OverrideImport]:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[PKG.MODULE.FUNCTION[=JSON] ...]",
        instance_from_str=parse_cli_imports,
        is_instance=lambda value: isinstance(value, list),
        str_from_instance=format_cli_imports,
    )


EARLY_FLAGS: tuple[EarlyFlag, ...] = (
    EarlyFlag(
        name="--module",
        metavar="NAME",
        help="where the recipe is: a short name, or an importable module or package",
    ),
    EarlyFlag(name="--config", metavar="FUNCTION", help="the recipe: a function in that module"),
    backend_flag(
        "checkpoint",
        CHECKPOINT_BACKENDS,
        help="what reads and writes checkpoints; without it the recipe's choice",
    ),
)
"""The flags that decide what the config of a run is, in the order of the help."""


class ConfigManager:
    """Reads a command line; the result stays in ``config``."""

    def __init__(
        self,
        early_flags: Sequence[EarlyFlag] = EARLY_FLAGS,
        *,
        checks: Callable[[Any], Iterable[str]] | None = None,
    ) -> None:
        """``checks`` adds rules across sections; it must stand a config whose fields are wrong."""
        self._early_flags = tuple(early_flags)
        self._checks = checks
        self.config: Any = None

    def parse_args(self, args: list[str] | None = None) -> Any:
        """The config that ``args`` (default: those of this process) lead to.

        Raises ``ValueError`` or ``ImportError`` (both also ``CommandLineError``) when ``--module`` or
        ``--config`` does not lead to a recipe; what the recipe itself raises passes through. Everything else
        that is wrong is printed and ends in ``SystemExit(2)``, ``--help`` in ``SystemExit(0)``.
        """
        values, rest = take_early_flags(self._early_flags, sys.argv[1:] if args is None else args)
        module_name, recipe_name = values.get("--module"), values.get("--config")
        if (module_name is None or recipe_name is None) and {"-h", "--help"} & set(rest):
            self._print_short_help(module_name)
            raise SystemExit(0)
        if module_name is None:
            raise CommandLineValueError(
                f"--module is required. It says where the recipe is: one of {', '.join(known_modules())}, "
                "or an importable module."
            )
        if recipe_name is None:
            raise CommandLineValueError(
                f"--config is required. It names the recipe in module {module_name!r}; "
                f"--module {module_name} --help lists them."
            )
        recipe = RecipeModule(module_name).recipe(recipe_name)
        # Only what holds in the end counts: a flag may mend a setting of the recipe.
        with collecting():
            config = self._run_recipe(recipe, recipe_name)
            with collecting() as refused:
                config = self._change(config, values, rest)
            config, unknown = self._parse_with_tyro(config, rest, values)
        found = [*refused, *unknown, *_violations(config)]
        found += self._checks(config) if self._checks else ()
        if found:
            exit_with(list(dict.fromkeys(found)))
        self.config = config
        self._validate_config()
        return config

    def _run_recipe(self, recipe: Callable[[], Any], name: str) -> Any:
        config = recipe()
        if isinstance(config, type) or not is_dataclass(config):
            raise CommandLineValueError(
                f"--config {name} returned {type(config).__name__}, not a config (an instance of a dataclass). "
                "Name a function that returns the config of a run."
            )
        return config

    def _change(self, config: Any, values: Mapping[str, str], args: Sequence[str]) -> Any:
        for flag in self._early_flags:
            if flag.change is not None and flag.name in values:
                config = flag.change(config, values[flag.name], args)
        return config

    def _parse_with_tyro(
        self, config: Any, args: list[str], values: Mapping[str, str]
    ) -> tuple[Any, list[str]]:
        """The config after ``args``, and a message for each flag that there is not."""
        typed = [
            f"{flag.name} {values[flag.name]}" for flag in self._early_flags if flag.name in values
        ]
        # tyro repeats this in its advice, so it has to be a command that works.
        program = " ".join([_program(), *typed])
        settings: dict[str, Any] = {
            "prog": program,
            "args": args,
            "default": config,
            "registry": custom_registry,
            "description": f"{self._early_flags_help()}\n\nThe flags below show the values of this recipe. "
            "In their names, dashes and underscores mean the same.",
            # With underscores in its own names tyro does not find every subcommand that is typed with dashes.
            "use_underscores": False,
            "console_outputs": speaks(),
        }
        parsed, left_over = tyro.cli(type(config), return_unknown_args=True, **settings)
        unknown = not_understood(config, args, left_over)
        if left_over and not unknown:
            # Of a word that is no flag, such as a mistyped subcommand, tyro knows more: this ends the program.
            return tyro.cli(type(config), **settings), []
        if unknown:
            unknown[-1] += f" `{program} --help` lists all."
        return parsed, unknown

    def _early_flags_help(self) -> str:
        usages = [f"{flag.name} {flag.metavar}" for flag in self._early_flags]
        width = max(len(usage) for usage in usages)
        return "\n".join(
            f"  {usage:<{width}}  {flag.help}"
            for usage, flag in zip(usages, self._early_flags, strict=True)
        )

    def _print_short_help(self, module_name: str | None) -> None:
        if module_name is None:
            found = f"known modules: {', '.join(known_modules())}"
        else:
            names = RecipeModule(module_name).recipe_names()
            found = f"recipes in {module_name}: {', '.join(names) or 'none'}"
        print(
            f"usage: {_program()} --module NAME --config FUNCTION [--section.setting VALUE ...]\n\n"
            f"{self._early_flags_help()}\n\n{found}\n\n"
            "With both of them, --help lists every setting and the value the recipe gives it."
        )

    def _validate_config(self) -> None:
        path = getattr(self.config, "hf_assets_path", None)
        if path is None:
            return
        if not filesystem.exists(path):
            logger.warning(
                f"hf_assets_path is {path}, which does not exist. The tokenizer and Hugging Face weights are read "
                "from there; set --hf_assets_path if this run needs them."
            )
        elif path.endswith("tokenizer.model"):
            raise Exception(
                f"hf_assets_path is {path}, a tokenizer file of the old kind. "
                "Set --hf_assets_path to the folder that holds tokenizer.json."
            )

    @staticmethod
    def _merge_configs(base: type, custom: type) -> type:
        """A dataclass ``Merged<Base>`` that derives from ``base`` and takes the fields of ``custom`` over it.

        Fields that are dataclasses on both sides are merged in turn. Deprecated: derive a config class instead.
        """
        warnings.warn(
            "ConfigManager._merge_configs is deprecated; write a subclass of the config class instead.",
            DeprecationWarning,
            stacklevel=2,
        )
        return _merge(base, custom)


def _program() -> str:
    if "TORCHTITAN_COMMAND" in os.environ:
        return "./run_train.sh"  # which sets it, and starts what runs here
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return os.path.basename(sys.argv[0])
    return f"python -m {spec.name.removesuffix('.__main__')}"


def _violations(config: Any) -> list[str]:
    """What the checks of the dataclasses in ``config`` find when they run once more."""
    with collecting() as found:
        for node in _dataclasses_in(config):
            replace(node)
    return found


def _dataclasses_in(value: Any) -> Iterator[Any]:
    """The dataclasses in ``value`` that check themselves, inner ones first."""
    if isinstance(value, type):
        return
    if is_dataclass(value):
        for each in fields(value):
            yield from _dataclasses_in(getattr(value, each.name))
        if hasattr(value, "__post_init__"):
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _dataclasses_in(item)
    elif isinstance(value, dict):
        yield from _dataclasses_in(list(value.values()))


def _merge(base: type, custom: type) -> type:
    base_types, custom_types = get_type_hints(base), get_type_hints(custom)
    merged: list[tuple[str, Any, Any]] = []
    for each in fields(custom):
        declared = custom_types[each.name]
        default = field(
            default=each.default, default_factory=each.default_factory, init=each.init, kw_only=True
        )
        in_base = base_types.get(each.name)
        if is_dataclass(declared) and is_dataclass(in_base) and isinstance(in_base, type):
            declared = _merge(in_base, declared)
            default = field(default_factory=declared, kw_only=True)
        merged.append((each.name, declared, default))
    return make_dataclass(f"Merged{base.__name__}", merged, bases=(base,), kw_only=True, slots=True)


def main() -> None:
    """Print the config that the arguments of this process lead to, as JSON."""
    try:
        config = ConfigManager().parse_args()
    except CommandLineError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    text = json.dumps(to_plain(config), indent=2)
    try:
        rich = importlib.import_module("rich")
    except ImportError:
        print(text)
        return
    rich.print_json(text)


if __name__ == "__main__":
    main()
