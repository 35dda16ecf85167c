"""Tell what lies on disk in the format of DCP, and read the index of such a checkpoint.

The index is one file that DCP writes last. It names every entry, so what a checkpoint holds is known
before a tensor is read.

    is_complete, kind_of (discovery) -> read_outline -> matching.require_match -> the read
"""

from collections.abc import Mapping, Set
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchtitan.components.checkpointer.agreement import rank_zero_decides
from torchtitan.components.checkpointer.discovery import HF_MARKER, Kind, parse_step
from torchtitan.components.checkpointer.errors import CheckpointDamagedError, CheckpointReadError
from torchtitan.components.checkpointer.integrity.verification import Verification
from torchtitan.components.checkpointer.screening import load_index
from torchtitan.components.checkpointer.storage import CheckpointStorage
from torchtitan.components.checkpointer.templates import SavedEntry
from torchtitan.tools.logging import logger

MARKER = ".metadata"
"""The index, which DCP writes last: a directory that has it is complete."""


def read_index(checkpoint_id: str, verification: Verification | None = None) -> Metadata:
    """The index of a checkpoint, of which nothing is run.

    Args:
        verification: checks it; None takes it as it is.

    Raises:
        CheckpointDamagedError: it is not there, not what was saved, or not what DCP writes.
        CheckpointReadError: it is what was saved, and this program does not take it.
        OSError: the disk does not let it be read now, which says nothing about the checkpoint.
    """
    path = f"{checkpoint_id}/{MARKER}"
    try:
        with open(path, "rb") as file:
            content = file.read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise CheckpointDamagedError(
            f"There is no index {path}. The path must be one checkpoint, a step-N directory."
        ) from error
    if verification is None:
        return load_index(content, path)
    verification.check(MARKER, content)
    return load_index(content, path, is_checked=verification.is_full)


def is_complete(storage: CheckpointStorage, checkpoint_id: str) -> bool:
    """Whether the index, or that of a Hugging Face export, is in the directory."""
    return any(storage.isfile(f"{checkpoint_id}/{marker}") for marker in (MARKER, HF_MARKER))


def kind_of(storage: CheckpointStorage, checkpoint_id: str, other_keys: Set[str]) -> Kind:
    """What a complete checkpoint holds, judged by its index.

    Args:
        other_keys: state keys besides the model's. With none of them everything is full.
    """
    if not storage.isfile(f"{checkpoint_id}/{MARKER}"):
        if storage.isfile(f"{checkpoint_id}/{HF_MARKER}"):
            return Kind.MODEL_ONLY
        logger.warning(f"The index {checkpoint_id}/{MARKER} is gone. The rest is left in place.")
        return Kind.UNREADABLE
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


def read_outline(
    path: str,
    group: "dist.ProcessGroup | None" = None,
    verification: Verification | None = None,
) -> dict[str, SavedEntry]:
    """The outline of the checkpoint at ``path``, on every rank; a collective.

    Raises:
        CheckpointReadError: the index cannot be read, on all ranks.
    """

    def read() -> dict[str, SavedEntry]:
        try:
            return outline_of(read_index(path, verification))
        except OSError as error:
            raise CheckpointReadError(
                f"The disk does not let the index {path}/{MARKER} be read: {error}. That says nothing "
                "about the checkpoint; see to the disk and start again."
            ) from error

    # Rank 0 alone reads: a rank that failed to, by itself, would leave the others waiting.
    return rank_zero_decides(read, group)
