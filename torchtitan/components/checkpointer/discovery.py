"""Tell checkpoints from everything else that lies in the folder.

Names are anchored: ``step-<n>`` without leading zeros is a checkpoint of step n, and
``step-7.bak``, ``tmp_step-7`` or ``step-07`` are somebody else's business. A directory counts only
once the marker that its writer puts there last is present. This module only reads.

    listdir -> parse_step -> is it a directory with its marker? -> OwnFolder
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torchtitan.components.checkpointer.storage import CheckpointStorage
from torchtitan.tools import filesystem

SUPERSEDED = "superseded"
"""Folder inside the checkpoint folder for what another history left behind."""

_STEP_NAME = re.compile(r"step-(0|[1-9][0-9]*)", re.ASCII)


class Kind(str, Enum):
    """What a directory named ``step-<n>`` turned out to be."""

    FULL = "full"
    """Model, optimizer and everything else a run needs to go on."""

    MODEL_ONLY = "model-only"
    """Weights alone (an export, or a step-0 seed)."""

    UNREADABLE = "unreadable"
    """Its completion marker is there and cannot be read."""


def step_name(step: int) -> str:
    """The directory name of ``step``."""
    return f"step-{step}"


def parse_step(name: str) -> int | None:
    """The step that ``name`` stands for, or None when it is not a checkpoint's name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def find_steps(
    storage: CheckpointStorage,
    folder: str,
    *,
    parse: Callable[[str], tuple[int, bool] | None],
) -> list[tuple[int, str, bool]]:
    """All directories of ours in ``folder`` as (step, path, is a staging name), oldest first."""
    found = []
    for name in storage.listdir(folder):
        parsed = parse(name)
        path = filesystem.join(folder, name)
        if parsed is not None and storage.isdir(path):
            step, is_staging = parsed
            found.append((step, path, is_staging))
    return sorted(found)


def complete_steps(
    storage: CheckpointStorage,
    folder: str,
    *,
    parse: Callable[[str], tuple[int, bool] | None],
    is_complete: Callable[[str], bool],
) -> dict[int, str]:
    """Paths of the complete checkpoints in ``folder`` by step; none when it does not exist."""
    if not storage.isdir(folder):
        return {}
    found = find_steps(storage, folder, parse=parse)
    return {step: path for step, path, is_staging in found if not is_staging and is_complete(path)}


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnFolder:
    """The complete checkpoints in a run's own folder."""

    path: str
    step_paths: dict[int, str]
    """Complete checkpoints by step; empty when the folder is missing or holds none."""

    kind_of: Callable[[str], Kind]
    """Looks into one of them; costs a read of its index, so newest first and no more than needed."""

    def export_step(self) -> int:
        """The newest step if it holds only weights, as the last save of a run may; else -1.

        Step 0 does not count: it is a seed, whatever it holds.
        """
        newest = max(self.step_paths, default=-1)
        is_export = newest > 0 and self.kind_of(self.step_paths[newest]) is Kind.MODEL_ONLY
        return newest if is_export else -1

    def newest_full(self) -> tuple[int | None, list[int]]:
        """The newest full step, and the steps above it whose index cannot be read.

        Step 0 does not count: it is a seed, whatever it holds.
        """
        unreadable = []
        for step in sorted(self.step_paths.keys() - {0}, reverse=True):
            kind = self.kind_of(self.step_paths[step])
            if kind is Kind.FULL:
                return step, unreadable
            if kind is Kind.UNREADABLE:
                unreadable.append(step)
        return None, unreadable
