"""What each back end leaves on disk, for everything that looks into a folder of checkpoints.

A folder may hold checkpoints of several back ends: whoever typed another ``--checkpoint.backend``
must neither begin again beside them nor lose them. So every start and every save knows all formats,
and what is complete in one of them is nobody's leftover.

A manager says its own format with the class attribute ``FORMAT`` (None: it is known to nobody else)
and supplies ``_parse_step``, ``_is_valid_checkpoint`` and ``_kind_of``, which may follow its own
settings; the other formats are added to these hooks by ``folder_view.FolderView._finder``. Settings are checked
with the same facts before there is a manager: ``Config._owner.FORMAT``.

    Format -> finder, or hooks of a manager + other_finders -> discovery.Finder -> source, retention
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpointer import dcp_index
from torchtitan.components.checkpointer.discovery import Finder, HF_MARKER, Kind
from torchtitan.components.checkpointer.integrity.manifest import MANIFEST
from torchtitan.components.checkpointer.storage import (
    CheckpointStorage,
    FilesystemStorage,
    MovingStorage,
)
from torchtitan.components.checkpointer.tc import index as tc_index, metadata_file


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How the checkpoints of one back end are told from everything else."""

    backend: str
    """Its name, as it is typed after ``--checkpoint.backend``."""

    marker: str
    """The file that is written last."""

    parse: Callable[[str], tuple[int, bool] | None]
    """The step that a directory name stands for and whether it is a staging name."""

    is_complete: Callable[[CheckpointStorage, str], bool]
    """Whether the directory holds the marker, or that of a Hugging Face export."""

    kind_of: Callable[[CheckpointStorage, str, Set[str]], Kind]
    """What a complete checkpoint holds, given the state keys besides the model's."""

    read_index: Callable[[str], Any]
    """Reads the index of a checkpoint. Raises CheckpointReadError, or OSError when the disk does not
    let it be read now."""


_STAGED = tc_index.step_dir_pattern(tc_index.TEMP_DIR_PREFIX)

DCP = Format(
    backend="dcp",
    marker=dcp_index.MARKER,
    parse=dcp_index.parse_entry,
    is_complete=dcp_index.is_complete,
    kind_of=dcp_index.kind_of,
    read_index=dcp_index.read_index,
)

TORCH_CHECKPOINTING = Format(
    backend="torch_checkpointing",
    marker=tc_index.MARKER,
    parse=lambda name: tc_index.parse_entry(name, _STAGED),
    is_complete=tc_index.is_complete,
    kind_of=tc_index.kind_of,
    read_index=metadata_file.read_metadata,
)

FORMATS = (DCP, TORCH_CHECKPOINTING)

MARKERS = (MANIFEST, *(each.marker for each in FORMATS), HF_MARKER)
"""A deletion begins with these files: first the commit record, then what makes a directory complete."""


def marker_folders(storage: CheckpointStorage, path: str) -> list[str]:
    """The directories in ``path`` that have the name of a marker, so that it can get none."""
    return [name for name in MARKERS if storage.isdir(f"{path}/{name}")]


class CheckpointFiles(FilesystemStorage):
    """Files and folders, of which the markers go first when a checkpoint is deleted."""

    markers = MARKERS


def finder(own: Format, storage: MovingStorage, other_keys: Set[str]) -> Finder:
    """How a run of the back end ``own`` finds checkpoints; ``other_keys`` as for ``kind_of``."""
    return _finder(own, storage, other_keys, others=other_finders(own, storage, other_keys))


def other_finders(
    own: Format | None, storage: MovingStorage, other_keys: Set[str]
) -> tuple[Finder, ...]:
    """How a run of ``own`` finds the checkpoints of the other back ends."""
    return tuple(_finder(each, storage, other_keys) for each in FORMATS if each is not own)


def _finder(
    chosen: Format,
    storage: MovingStorage,
    other_keys: Set[str],
    others: tuple[Finder, ...] = (),
) -> Finder:
    return Finder(
        storage=storage,
        parse=chosen.parse,
        is_complete=lambda path: chosen.is_complete(storage, path),
        kind_by_index=lambda path: chosen.kind_of(storage, path, other_keys),
        backend=chosen.backend,
        others=others,
    )
