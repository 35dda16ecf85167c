"""Tell checkpoints from everything else that lies in the folder.

Names are anchored: ``step-<n>`` without leading zeros is a checkpoint of step n, and
``step-7.bak``, ``tmp_step-7`` or ``step-07`` are somebody else's business. A directory counts only
once the marker that its writer puts there last is present, or the manifest that comes after it, and
until its deletion begins. A folder may hold checkpoints of several back ends: they all count as
complete, and it is known whose they are. What history.py has put aside counts as history.py says. This
module only reads.

    listdir -> parse_step -> is it a directory with a marker, and whose? -> OwnFolder -> source.py
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from torchtitan.components.checkpointer.errors import CheckpointError, CheckpointReadError
from torchtitan.components.checkpointer.history import (
    is_replacing,
    REPLACED,
    SUPERSEDED,
    superseded_names,
    SUPERSEDED_RECORD,
)
from torchtitan.components.checkpointer.integrity.manifest import MANIFEST, read as read_manifest
from torchtitan.components.checkpointer.storage import CheckpointStorage, DELETED, MovingStorage
from torchtitan.tools import filesystem

HF_MARKER = "model.safetensors.index.json"
"""Index of an export in Hugging Face format, which every back end can make."""

_STEP_NAME = re.compile(r"step-(0|[1-9][0-9]*)", re.ASCII)


class Kind(str, Enum):
    """What a directory named ``step-<n>`` turned out to be."""

    FULL = "full"
    """Model, optimizer and everything else a run needs to go on."""

    MODEL_ONLY = "model-only"
    """Weights alone (an export, or a step-0 seed)."""

    UNREADABLE = "unreadable"
    """Its index cannot be read, or is gone from beside its manifest."""

    DAMAGED = "damaged"
    """This start has tried to load it, and it is not what was saved."""


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
    """All directories of ours in ``folder`` as (step, path, is a staging name), oldest first.

    Raises:
        CheckpointReadError: links of such names lead nowhere.
    """
    found, others = [], []
    for name in storage.listdir(folder):
        parsed = parse(name)
        path = filesystem.join(folder, name)
        if parsed is None:
            continue
        if storage.isdir(path):
            step, is_staging = parsed
            found.append((step, path, is_staging))
        else:
            others.append(path)
    require_no_lost_links(storage, others)
    return sorted(found)


def require_no_lost_links(storage: CheckpointStorage, paths: Iterable[str]) -> None:
    """Check that none of ``paths``, which are no directories, is a link that leads nowhere.

    A disk that is not mounted looks like this. To pass over the checkpoints that are on it would be to
    begin again.

    Raises:
        CheckpointReadError: names all that are.
    """
    lost = sorted(path for path in paths if os.path.islink(path) and not storage.isfile(path))
    if lost:
        leads = ", ".join(f"{path} -> {os.readlink(path)}" for path in lost)
        raise CheckpointReadError(
            f"These links have the names of checkpoints and lead nowhere: {leads}. Mount what they lead "
            "to and start again; if those checkpoints are not to count, delete the links."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnFolder:
    """What lies in a run's own folder."""

    path: str
    step_paths: dict[int, str]
    """Complete checkpoints by step; empty when the folder is missing or holds none. Of every back
    end, because they all are steps of this run, whether or not this start can load them."""

    kind_of: Callable[[str], Kind]
    """Looks into one of them; costs a read of its manifest or index, so newest first and no more than
    needed."""

    backend: str = ""
    """The back end of this start, as ``--checkpoint.backend`` names it."""

    others: Mapping[int, str] = field(default_factory=dict)
    """The back end of each step that is not of this one."""

    unfinished: Mapping[str, int] = field(default_factory=dict)
    """Names of directories of ours without a marker, or still under a staging name, and their steps:
    saves that died."""

    half_deleted: Mapping[str, int] = field(default_factory=dict)
    """The same of directories whose deletion has begun and not ended."""

    foreign: tuple[str, ...] = ()
    """Names that are not ours; they never count, and nothing touches them."""

    damaged: Mapping[int, str] = field(default_factory=dict)
    """What is wrong with the steps that this start has tried to load in vain."""

    def own_steps(self) -> set[int]:
        """The complete steps of this back end."""
        return self.step_paths.keys() - self.others.keys()

    def resume_path(self) -> str | None:
        """The newest full checkpoint, as a restart goes on from it; None when there is none.

        None as well when it is of another back end, because a restart stops at it.
        """
        newest, _ = self.newest_full()
        return None if newest is None or newest in self.others else self.step_paths[newest]

    def export_step(self) -> int:
        """The newest step if it holds only weights, as the last save of a run may; else -1.

        Step 0 does not count: it is a seed, whatever it holds.
        """
        newest = max(self.step_paths, default=-1)
        is_export = newest > 0 and self.kind_of(self.step_paths[newest]) is Kind.MODEL_ONLY
        return newest if is_export else -1

    def newest_full(self) -> tuple[int | None, dict[int, Kind]]:
        """The newest full step, and what the steps above it are instead, newest first.

        Step 0 does not count: it is a seed, whatever it holds. The step may be one of ``others``.
        """
        passed_over = {}
        for step in sorted(self.step_paths.keys() - {0}, reverse=True):
            is_damaged = step in self.damaged
            kind = Kind.DAMAGED if is_damaged else self.kind_of(self.step_paths[step])
            if kind is Kind.FULL:
                return step, passed_over
            passed_over[step] = kind
        return None, passed_over

    def full_steps(self, *, but: int | None) -> Iterator[int]:
        """The full steps of this back end that may be loaded, newest first; ``but`` this one."""
        for step in sorted(self.own_steps() - {0, but} - self.damaged.keys(), reverse=True):
            if self.kind_of(self.step_paths[step]) is Kind.FULL:
                yield step


def _backend_in(storage: MovingStorage, path: str) -> str:
    try:
        manifest = read_manifest(storage, path)
    except CheckpointError:
        return ""  # what is wrong with it is told when it is to be loaded
    return "" if manifest is None else manifest.head.backend


def _claims_full(storage: MovingStorage, path: str) -> bool:
    """Whether the manifest says that ``path`` is full, or is none of this step."""
    try:
        manifest = read_manifest(storage, path)
    except CheckpointError:
        return False  # as above
    if manifest is None:
        return False
    step = parse_step(path.rstrip("/").rpartition("/")[2])
    return manifest.head.kind == "full" or step not in (None, manifest.head.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finder:
    """How the checkpoints of one back end are found."""

    storage: MovingStorage
    parse: Callable[[str], tuple[int, bool] | None]
    """The step that a name stands for and whether it is a staging name."""

    is_complete: Callable[[str], bool]
    """Whether the directory holds the marker that its writer puts there last."""

    kind_by_index: Callable[[str], Kind]
    """What a complete checkpoint holds, as its index or the names of its files tell."""

    backend: str = ""
    """The name of the back end, as it is typed after ``--checkpoint.backend``."""

    others: tuple["Finder", ...] = ()
    """How those of other back ends are found, which may lie in the same folder."""

    def owner_of(self, path: str) -> "Finder | None":
        """Whose complete checkpoint ``path`` is; None when it is nobody's. Its own come first."""
        if self.is_half_deleted(path):
            return None
        finders = (self, *self.others)
        found = next((each for each in finders if each.is_complete(path)), None)
        if found is not None or not self.storage.isfile(filesystem.join(path, MANIFEST)):
            return found
        # Whatever deletes or writes anew takes the manifest away first. So this one was complete and
        # has lost its marker since: it is damaged, and no save that did not finish.
        backend = _backend_in(self.storage, path)
        return next((each for each in finders if each.backend == backend), self)

    def kind_of(self, path: str) -> Kind:
        """What the complete checkpoint ``path`` of this back end holds, or held when it was saved."""
        # An index that is another checkpoint's, or files that are gone, must not make weights out of a
        # full one, which would be passed over in silence. As a full one it is loaded, and found damaged.
        return Kind.FULL if _claims_full(self.storage, path) else self.kind_by_index(path)

    def is_staging(self, path: str) -> bool:
        """Whether ``path`` has the name of a save that has not been finished by any back end."""
        name = path.rstrip("/").rpartition("/")[2]
        parsed = [each.parse(name) for each in (self, *self.others)]
        return any(found is not None and found[1] for found in parsed)

    def is_half_deleted(self, path: str) -> bool:
        """Whether the deletion of ``path`` has begun, so that some of it may be gone."""
        return self.storage.isfile(filesystem.join(path, DELETED))

    def is_complete_for_any(self, path: str) -> bool:
        """Whether ``path`` is a complete checkpoint of any back end: no leftover, never cleared."""
        return self.owner_of(path) is not None

    def complete_steps(
        self, folder: str, damaged: Mapping[str, str] = MappingProxyType({})
    ) -> dict[int, str]:
        """Paths of the complete checkpoints in ``folder`` by step, of every back end."""
        return self.look_into(folder, damaged).step_paths

    def replaced_steps(self, folder: str) -> dict[int, str]:
        """Paths of what is complete in ``replaced/`` by step, whatever has become of the save after it."""
        aside = filesystem.join(folder, REPLACED)
        if not self.storage.isdir(aside):
            return {}
        found = find_steps(self.storage, aside, parse=self.parse)
        return {
            step: path for step, path, is_staging in found if not is_staging and self.owner_of(path)
        }

    def look_into(
        self, folder: str, damaged: Mapping[str, str] = MappingProxyType({})
    ) -> OwnFolder:
        """What lies in ``folder``; nothing when it does not exist.

        Args:
            damaged: what is wrong with the paths in it that were loaded in vain. Another checkpoint of
                the same step, saved before or after it, is taken instead.
        """
        if not self.storage.isdir(folder):
            return OwnFolder(path=folder, step_paths={}, kind_of=self.kind_of, backend=self.backend)
        left = superseded_names(self.storage, folder)
        ours = find_steps(self.storage, folder, parse=self.parse)
        names = {path: path.rpartition("/")[2] for _, path, _ in ours}
        ours = [entry for entry in ours if names[entry[1]] not in left]
        candidates = {step: [path] for step, path, is_staging in ours if not is_staging}
        for step, path in self.replaced_steps(folder).items():
            there = [each for each in candidates.get(step, []) if self.owner_of(each)]
            is_replaced = any(is_replacing(self.storage, each) for each in there)
            candidates[step] = [*there, path] if is_replaced else [path, *there]
        found = {
            step: next((each for each in paths if each not in damaged), paths[0])
            for step, paths in candidates.items()
        }
        owners = {path: owner for path in found.values() if (owner := self.owner_of(path))}
        complete = {step: path for step, path in found.items() if path in owners}
        others = {
            path: step for step, path, _ in ours if path not in owners and path not in damaged
        }
        half_deleted = {names[it]: at for it, at in others.items() if self.is_half_deleted(it)}
        known = {*names.values(), *left, SUPERSEDED, SUPERSEDED_RECORD, REPLACED}
        foreign = set(self.storage.listdir(folder)) - known
        return OwnFolder(
            path=folder,
            step_paths=complete,
            kind_of=lambda path: owners[path].kind_of(path),
            backend=self.backend,
            others={
                step: owners[path].backend
                for step, path in complete.items()
                if owners[path] is not self
            },
            unfinished={
                names[it]: at for it, at in others.items() if names[it] not in half_deleted
            },
            half_deleted=half_deleted,
            # Hidden entries belong to the file system (.snapshot, .nfs...) or to editors.
            foreign=tuple(sorted(name for name in foreign if not name.startswith("."))),
            damaged={
                step: "; ".join(damaged[each].rstrip(".") for each in candidates[step])
                for step, path in complete.items()
                if path in damaged
            },
        )
