"""The table of what is compared: each mode of each manager, and the library call beside it.

A new manager, mode or library call is one entry here.
"""

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.models import Run
from benchmarks.saving.sides import ManagerSide, Side

MANAGER, LIBRARY = "manager", "library"

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

    @property
    def sides(self) -> tuple[str, ...]:
        # The library first: torch keeps its writer process in a global, over which ours then stands.
        return (LIBRARY,) if self.manager is None else (LIBRARY, MANAGER)

    def build(self, side: str, run: Run, folder: Path) -> Side:
        """The object that saves ``run`` into ``folder``; a collective."""
        if side == LIBRARY:
            return _class(self.library)(run, folder, self.how)
        assert self.manager is not None, "this case has no manager"
        return ManagerSide(run, folder, self.manager, self.settings)

    def obstacle(self) -> str | None:
        """Why this cannot be measured here, or None."""
        if self.needs is not None and importlib.util.find_spec(self.needs) is None:
            return f"the package {self.needs} is not installed"
        if self.manager is not None and not _exists(self.manager.partition(":")[0]):
            return f"there is no {self.manager.replace(':', '.')} in this version"
        return None


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
    "tc": CASES["tc-async"],
}
"""By format, since loading does not depend on the mode in which was saved."""


def _class(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
