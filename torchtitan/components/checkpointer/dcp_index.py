"""Tell what lies on disk in the format of DCP, and read the index of such a checkpoint.

The index is one file that DCP writes last. It names every entry, so what a checkpoint holds is known
before a tensor is read.

    is_complete, kind_of (discovery) -> read_outline -> matching.require_match -> the read
"""

from collections.abc import Mapping, Set
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchtitan.components.checkpointer.agreement import rank_zero_decides
from torchtitan.components.checkpointer.discovery import HF_MARKER, Kind, parse_step
from torchtitan.components.checkpointer.errors import CheckpointReadError
from torchtitan.components.checkpointer.storage import CheckpointStorage
from torchtitan.components.checkpointer.templates import SavedEntry
from torchtitan.tools.logging import logger

MARKER = ".metadata"
"""The index, which DCP writes last: a directory that has it is complete."""


def read_index(checkpoint_id: str) -> Metadata:
    """The index of a checkpoint.

    Raises:
        CheckpointReadError: it is not there or not what DCP writes.
        OSError: the disk does not let it be read now, which says nothing about the checkpoint.
    """
    try:
        index = FileSystemReader(checkpoint_id).read_metadata()
    except OSError as error:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise
        raise CheckpointReadError(
            f"There is no index {checkpoint_id}/{MARKER}. The path must be one checkpoint, a step-N "
            "directory."
        ) from error
    except Exception as error:
        # Damaged pickles raise whatever their bytes happen to spell: KeyError, ImportError, ...
        raise CheckpointReadError(
            f"The index {checkpoint_id}/{MARKER} cannot be read: {error!r}. The path must be one "
            "checkpoint, a step-N directory; if it is damaged, move it away."
        ) from error
    entries = getattr(index, "state_dict_metadata", None)
    if not isinstance(index, Metadata) or not isinstance(entries, dict):
        raise CheckpointReadError(
            f"The index {checkpoint_id}/{MARKER} is not one that DCP writes; if it is damaged, move "
            "the checkpoint away."
        )
    return index


def is_complete(storage: CheckpointStorage, checkpoint_id: str) -> bool:
    """Whether the index, or that of a Hugging Face export, is in the directory."""
    return any(storage.isfile(f"{checkpoint_id}/{marker}") for marker in (MARKER, HF_MARKER))


def kind_of(storage: CheckpointStorage, checkpoint_id: str, other_keys: Set[str]) -> Kind:
    """What a complete checkpoint holds, judged by its index.

    Args:
        other_keys: state keys besides the model's. With none of them everything is full.
    """
    if not storage.isfile(f"{checkpoint_id}/{MARKER}"):
        return Kind.MODEL_ONLY
    try:
        index = read_index(checkpoint_id)
    except CheckpointReadError as error:
        logger.warning(f"{error} It is left in place.")
        return Kind.UNREADABLE
    saved = {name.partition(".")[0] for name in index.state_dict_metadata}
    return Kind.FULL if not other_keys or other_keys & saved else Kind.MODEL_ONLY


def parse_entry(name: str) -> tuple[int, bool] | None:
    """(step, is a staging name) of a directory name; DCP writes in place, so never staging."""
    step = parse_step(name)
    return None if step is None else (step, False)


def outline_of(index: Metadata) -> dict[str, SavedEntry]:
    """Every entry of a checkpoint: where it belongs, and what kind of value it is."""
    paths: Mapping[str, Any] = index.planner_data or {}
    found = {}
    for name, entry in index.state_dict_metadata.items():
        key, _, rest = name.partition(".")
        is_tensor = isinstance(entry, TensorStorageMetadata)
        # Another planner may have written no paths.
        path = paths.get(name, (key, rest) if rest else (key,))
        found[name] = SavedEntry(
            path=path,
            shape=tuple(entry.size) if is_tensor else None,
            dtype=entry.properties.dtype if is_tensor else None,
        )
    return found


def read_outline(path: str, group: "dist.ProcessGroup | None" = None) -> dict[str, SavedEntry]:
    """The outline of the checkpoint at ``path``, on every rank; a collective.

    Raises:
        CheckpointReadError: the index cannot be read, on all ranks.
    """
    # Rank 0 alone reads: a rank that failed to, by itself, would leave the others waiting.
    return rank_zero_decides(lambda: outline_of(read_index(path)), group)
