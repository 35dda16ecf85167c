"""The tables of what is compared: each mode of each manager beside the library call, and beside itself.

A new manager, mode or library call is one entry here.

    save, load, growth   Case: the library, the manager
    digests              Variants: a manager that takes no digests, and one that does
    verify               Variants: a manager that checks nothing, sizes, every byte, of one checkpoint
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchtitan.components.checkpointer.integrity.manifest import MANIFEST

from benchmarks.harness.models import Run
from benchmarks.saving.sides import ManagerSide, Side

MANAGER, LIBRARY = "manager", "library"
PIECES = "library, by pieces"
"""The library once more, where it has a second way to load."""
WITHOUT, WITH = "without", "with"
"""Sides of ``digests``."""
OFF, SIZE, FULL = "off", "size", "full"
"""Sides of ``verify``, by what they pass to it."""

_DCP = "torchtitan.components.checkpointer:CheckpointManager"
_TC = "torchtitan.components.checkpointer.torch_checkpointing:TorchCheckpointingManager"
_DCP_LIBRARY = "benchmarks.saving.library_dcp:DcpLibrary"
_TC_LIBRARY = "benchmarks.saving.library_tc:TcLibrary"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A mode of a manager and the library call that does the same."""

    library: str
    """``module:class`` of the library call."""

    how: str
    """Its mode."""

    library_call: str
    """The call in words."""

    second_how: str | None = None
    """Another mode of the library, which is measured beside the first one."""

    manager: str | None = None
    """``module:class`` of the manager; None where no manager does this."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of the manager's config."""

    is_async: bool = True
    """Whether training goes on before the checkpoint is written."""

    rank_pattern: str
    """Finds in the name of a file the number of the rank that wrote it."""

    needs: str | None = None
    """A package that may be missing."""

    is_last_save: bool = False
    """Whether each save is made as that after the last step, for which training always waits."""

    @property
    def sides(self) -> tuple[str, ...]:
        # The library first: torch keeps its writer process in a global, over which ours then stands.
        second = () if self.second_how is None else (PIECES,)
        return (LIBRARY, *second) if self.manager is None else (LIBRARY, *second, MANAGER)

    def build(self, side: str, run: Run, parent: Path) -> Side:
        """The object that saves ``run`` into a folder of its own below ``parent``; a collective."""
        if side == LIBRARY:
            return _class(self.library)(run, parent / side, self.how)
        if side == PIECES:
            return _class(self.library)(run, parent / "pieces", self.second_how)
        return self.build_manager(run, parent / side)

    def build_manager(
        self, run: Run, folder: Path, *, has_digests: bool = True, **settings: Any
    ) -> Side:
        """The manager, with further ``settings``; a collective."""
        assert self.manager is not None, "this case has no manager"
        return ManagerSide(
            run,
            folder,
            self.manager,
            self.settings | settings,
            has_digests=has_digests,
            is_last_save=self.is_last_save,
        )

    def check(self, side: str, checkpoint: Path) -> None:
        """Look whether ``checkpoint`` is what this side should have saved: any will do."""

    def obstacle(self) -> str | None:
        """Why this cannot be measured here, or None."""
        if self.needs is not None and importlib.util.find_spec(self.needs) is None:
            return f"the package {self.needs} is not installed"
        if self.manager is not None and not _exists(self.manager.partition(":")[0]):
            return f"there is no {self.manager.replace(':', '.')} in this version"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Variants:
    """A mode of a manager beside itself; the other sides are compared with the first one."""

    case: Case
    told: dict[str, dict[str, Any]]
    """What the manager of each side is built with, besides the settings of the case."""

    share_checkpoint: bool = False
    """Whether all sides read what the first one has saved."""

    @property
    def sides(self) -> tuple[str, ...]:
        return tuple(self.told)

    @property
    def is_async(self) -> bool:
        return self.case.is_async

    @property
    def rank_pattern(self) -> str:
        return self.case.rank_pattern

    def build(self, side: str, run: Run, parent: Path) -> Side:
        """As that of a case; sides that share a checkpoint share the folder."""
        folder = parent / (MANAGER if self.share_checkpoint else side)
        return self.case.build_manager(run, folder, **self.told[side])

    def check(self, side: str, checkpoint: Path) -> None:
        """Look whether ``checkpoint`` is what this side should have saved.

        Raises:
            RuntimeError: it has a manifest and should have none, or the other way round.
        """
        expected = self.told[side].get("has_digests", True)
        if (checkpoint / MANIFEST).is_file() is not expected:
            raise RuntimeError(
                f"{checkpoint} has {'no' if expected else 'a'} {MANIFEST}, so this would measure nothing"
            )

    def obstacle(self) -> str | None:
        """Why this cannot be measured here, or None."""
        return self.case.obstacle()


CASES: dict[str, Case] = {
    "dcp-disabled": Case(
        library=_DCP_LIBRARY,
        how="save",
        library_call="dcp.save",
        manager=_DCP,
        settings={"async_mode": "disabled"},
        is_async=False,
        rank_pattern=r"^__(\d+)_",
    ),
    "dcp-async": Case(
        library=_DCP_LIBRARY,
        how="thread",
        library_call="dcp.async_save, a thread writes",
        manager=_DCP,
        settings={"async_mode": "async"},
        rank_pattern=r"^__(\d+)_",
    ),
    "dcp-pinned": Case(
        library=_DCP_LIBRARY,
        how="process",
        library_call="dcp.async_save, a process writes, DefaultStager with shared memory",
        manager=_DCP,
        settings={"async_mode": "async_with_pinned_mem"},
        rank_pattern=r"^__(\d+)_",
    ),
    "tc-async": Case(
        library=_TC_LIBRARY,
        how="async",
        library_call="torch_checkpointing, asynchronous",
        manager=_TC,
        rank_pattern=r"_(\d+)\.pt$",
        needs="torch_checkpointing",
    ),
    "tc-sync": Case(
        library=_TC_LIBRARY,
        how="sync",
        library_call="torch_checkpointing, synchronous",
        is_async=False,
        rank_pattern=r"_(\d+)\.pt$",
        needs="torch_checkpointing",
    ),
}

LOAD_CASES: dict[str, Case] = {
    "dcp": CASES["dcp-disabled"],
    # A synchronous one writes what it takes to load in another layout only the first time.
    # In the layout that was saved it reads whole files, unless its resharder is told to reshard.
    "tc": replace(CASES["tc-async"], second_how="async, pieces"),
}
"""By format, since loading does not depend on the mode in which was saved."""

_LAST_SAVE_TC = replace(
    CASES["tc-async"],
    settings={"last_save_model_only": False},
    is_async=False,
    is_last_save=True,
)

DIGEST_CASES: dict[str, Variants] = {
    name: Variants(case=case, told={WITHOUT: {"has_digests": False}, WITH: {}})
    for name, case in (CASES | {"tc-sync": _LAST_SAVE_TC}).items()
}

VERIFY_CASES: dict[str, Variants] = {
    name: Variants(
        case=case,
        told={mode: {"verify": mode} for mode in (OFF, SIZE, FULL)},
        share_checkpoint=True,
    )
    for name, case in LOAD_CASES.items()
}

TABLES: Mapping[str, Mapping[str, Case | Variants]] = {
    "save": CASES,
    "load": LOAD_CASES,
    "growth": CASES,
    "digests": DIGEST_CASES,
    "verify": VERIFY_CASES,
}
"""By part of the program."""


def _class(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
