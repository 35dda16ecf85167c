"""Exchange the class of one section of a config for that of another back end.

A recipe settles what a section *is*; the flags of that class follow from it. So the choice has to be
made between the two, and by dotted name, because the classes lie in layers above this one.

    recipe -> config.checkpoint is a CheckpointManager.Config
    --checkpoint.backend torch_checkpointing -> the Config of that manager, with the values of the recipe
    --checkpoint.interval 100 -> applies to the new one
"""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, MISSING, replace
from typing import Any

from torchtitan.config.early_flags import EarlyFlag, spelling
from torchtitan.config.violations import collecting, reject, speaks
from torchtitan.tools.logging import logger

CHECKPOINT_BACKENDS: Mapping[str, str] = {
    "dcp": "torchtitan.components.checkpointer.dcp:CheckpointManager",
    "torch_checkpointing": "torchtitan.components.checkpointer.torch_checkpointing:TorchCheckpointingManager",
}
"""Names of the checkpoint managers, and where each one is."""


def backend_flag(section: str, classes: Mapping[str, str], *, help: str) -> EarlyFlag:
    """The flag ``--<section>.backend``, which makes the section the Config of one of ``classes``.

    Args:
        classes: ``package.module:Class`` by the name that is typed.
    """
    choice = _Choice(section=section, classes=classes)
    return EarlyFlag(
        name=choice.flag, metavar="{" + ",".join(classes) + "}", help=help, change=choice.change
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    section: str
    classes: Mapping[str, str]

    @property
    def flag(self) -> str:
        return f"--{spelling(self.section)}.backend"

    def change(self, config: Any, name: str, args: Sequence[str]) -> Any:
        """``config`` with the section of back end ``name``; unchanged where that is refused."""
        current = getattr(config, self.section, None)
        if current is None:
            reject(
                f"{self.flag} {name} chooses the class of the section {self.section}, but the "
                "config of this recipe has no such section; leave the flag out."
            )
            return config
        target = self._config_class(name)
        # A class derived from the one asked for stays: it is that back end, and more.
        if target is None or isinstance(current, target):
            return config
        there = {each.name for each in fields(target) if each.init}
        here = [each for each in fields(current) if each.init]
        lost = {each.name for each in here} - there
        if typed := sorted(self._typed(args) & lost):
            reject(
                f"{self.flag} {name} was asked for together with "
                f"{', '.join(f'--{self.section}.{each}' for each in typed)}, which it does not have; "
                f"leave {'it' if len(typed) == 1 else 'them'} out, or choose another back end."
            )
            return config
        self._tell_dropped(name, current, lost)
        kept = {each.name: getattr(current, each.name) for each in here if each.name in there}
        try:
            # Values that are wrong are found again at the end, when a flag may have mended them.
            with collecting():
                return replace(config, **{self.section: target(**kept)})
        except ValueError as error:  # A class that does not leave its checks to reject.
            reject(f"{self.flag} {name} refuses a value of the recipe: {error}")
            return config

    def _config_class(self, name: str) -> Any:
        if name not in self.classes:
            reject(f"{self.flag} {name} is not a back end; choose one of {self._available()}.")
            return None
        module_name, _, class_name = self.classes[name].partition(":")
        if not _exists(module_name):
            reject(
                f"{self.flag} {name} is not available in this version, which has "
                f"{self._available()}; leave the flag out, or choose what is there."
            )
            return None
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            reject(
                f"{self.flag} {name} cannot be loaded: {error}. Install what is missing, or choose "
                "another back end."
            )
            return None
        return getattr(module, class_name).Config

    def _available(self) -> str:
        found = [name for name, place in self.classes.items() if _exists(place.partition(":")[0])]
        return ", ".join(found)

    def _typed(self, args: Sequence[str]) -> set[str]:
        """The fields of the section that ``args`` set."""
        start = spelling(f"--{self.section}.")
        names = set()
        for arg in args:
            typed = spelling(arg.partition("=")[0])
            if typed.startswith(start):
                name = typed.removeprefix(start).partition(".")[0].removeprefix("no-")
                names.add(name.replace("-", "_"))
        return names

    def _tell_dropped(self, name: str, current: Any, lost: set[str]) -> None:
        changed = [
            f"{each.name} {getattr(current, each.name)}"
            for each in fields(current)
            if each.name in lost and getattr(current, each.name) != _default(each)
        ]
        if changed and speaks():
            logger.info(
                f"{self.flag} {name} has no {', '.join(changed)}, which the recipe sets; left out."
            )


def _exists(module_name: str) -> bool:
    try:
        return importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError:  # Its package is not there either.
        return False


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
