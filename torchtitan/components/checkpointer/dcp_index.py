"""Read the index of a DCP checkpoint and compare it with what a run needs.

All of this happens before a tensor is read. DCP itself names one missing key at a time, and a user
who points at the wrong checkpoint should hear everything at once.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.components.checkpointer.agreement import gather, rank_zero_decides
from torchtitan.components.checkpointer.discovery import Finder, Kind, parse_step
from torchtitan.components.checkpointer.errors import CheckpointMismatchError, CheckpointReadError
from torchtitan.components.checkpointer.state import RANK_STATE
from torchtitan.components.checkpointer.storage import CheckpointStorage, FilesystemStorage
from torchtitan.components.checkpointer.templates import Outline, SavedEntry
from torchtitan.tools.logging import logger


class Leaf(NamedTuple):
    """One entry of a checkpoint, as far as the index knows it."""

    shape: tuple[int, ...] | None
    """None for what is no tensor."""

    dtype: torch.dtype | None
    """None for what is no tensor."""


MARKER = ".metadata"
"""The index, which DCP writes last: a directory that has it is complete."""

HF_MARKER = "model.safetensors.index.json"
"""Index of an export in Hugging Face format."""


class DcpStorage(FilesystemStorage):
    """Files and folders, of which the index goes first when a checkpoint is deleted."""

    markers = (MARKER, HF_MARKER)


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


def finder(storage: CheckpointStorage, other_keys: Set[str]) -> Finder:
    """How checkpoints of DCP are found; ``other_keys`` as for ``kind_of``."""
    return Finder(
        storage=storage,
        parse=parse_entry,
        is_complete=lambda checkpoint_id: is_complete(storage, checkpoint_id),
        kind_of=lambda checkpoint_id: kind_of(storage, checkpoint_id, other_keys),
    )


def parse_entry(name: str) -> tuple[int, bool] | None:
    """(step, is a staging name) of a directory name; DCP writes in place, so never staging."""
    step = parse_step(name)
    return None if step is None else (step, False)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """(flat key, shape and dtype) of every entry.

    Lists are passed over: DCP flattens them by contents, which may differ between runs.
    """
    for name, value in tree.items():
        if isinstance(value, Stateful):
            value = value.state_dict()
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", Leaf(tuple(value.shape), value.dtype)
        elif isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        elif not isinstance(value, (list, tuple)):
            yield f"{prefix}{name}", Leaf(None, None)


def outline_of(index: Metadata) -> dict[str, SavedEntry]:
    """Every entry of a checkpoint: where it belongs, and what kind of value it is."""
    paths: Mapping[str, Any] = index.planner_data or {}
    found = {}
    for name, entry in index.state_dict_metadata.items():
        key, _, rest = name.partition(".")
        leaf = _leaf(entry)
        # Another planner may have written no paths.
        path = paths.get(name, (key, rest) if rest else (key,))
        found[name] = SavedEntry(path=path, shape=leaf.shape, dtype=leaf.dtype)
    return found


def read_outline(path: str, group: "dist.ProcessGroup | None" = None) -> dict[str, SavedEntry]:
    """The outline of the checkpoint at ``path``, on every rank; a collective.

    Raises:
        CheckpointReadError: the index cannot be read, on all ranks.
    """
    # Rank 0 alone reads: a rank that failed to, by itself, would leave the others waiting.
    return rank_zero_decides(lambda: outline_of(read_index(path)), group)


def require_match(
    path: str,
    states: Mapping[str, Any],
    *,
    other_keys: Set[str],
    group: "dist.ProcessGroup | None" = None,
    outline: Outline | None = None,
) -> None:
    """Check that the checkpoint can fill ``states``; a collective.

    Args:
        states: what to fill, as it lies in the checkpoint.
        outline: what ``read_outline`` gave, or None to read it here.
        other_keys: state keys besides the model's; their surplus entries are fine, because a
            checkpoint may hold more than a run restores.

    Raises:
        CheckpointMismatchError: names every missing, unexpected and mis-shaped key, on all ranks.
        CheckpointReadError: the index cannot be read, on all ranks.
    """
    saved = read_outline(path, group) if outline is None else outline
    # What each rank keeps for itself would make every rank's listing another one, which would then
    # have to be sent around; and it is asked for only as far as it was saved.
    shared = {key: value for key, value in states.items() if key != RANK_STATE}
    wanted = _union(dict(leaves(shared)), group)
    rank_zero_decides(lambda: _compare(path, wanted, saved, other_keys), group)


def _union(own: dict[str, Leaf], group: "dist.ProcessGroup | None") -> dict[str, Leaf]:
    """The entries of all ranks; sent around only where they differ (pipeline stages)."""
    listing = repr(sorted(own.items())).encode()
    if len(set(gather(hashlib.sha256(listing).hexdigest(), group))) == 1:
        return own
    return {name: leaf for part in gather(own, group) for name, leaf in part.items()}


def _leaf(entry: Any) -> Leaf:
    if not isinstance(entry, TensorStorageMetadata):
        return Leaf(None, None)
    return Leaf(tuple(entry.size), entry.properties.dtype)


def _compare(path: str, wanted: Mapping[str, Leaf], outline: Outline, other_keys: Set[str]) -> None:
    saved = {name: Leaf(entry.shape, entry.dtype) for name, entry in outline.items()}
    missing = sorted(wanted.keys() - saved.keys())
    unexpected = sorted(
        name for name in saved.keys() - wanted.keys() if name.partition(".")[0] not in other_keys
    )
    misshaped = sorted(
        f"{name} (here {_shape(wanted[name])}, there {_shape(saved[name])})"
        for name in wanted.keys() & saved.keys()
        if wanted[name].shape != saved[name].shape
    )
    if not (missing or unexpected or misshaped):
        if warning := narrowing(path, wanted, saved):
            logger.warning(warning)
        return
    lists = (("missing", missing), ("unexpected", unexpected), ("of another shape", misshaped))
    findings = "; ".join(
        f"{len(names)} {title}: {', '.join(names)}" for title, names in lists if names
    )
    raise CheckpointMismatchError(
        f"The checkpoint {path} does not fit this run: {findings}. Check --module, --config and "
        "the sizes set on the command line, or choose another --checkpoint.folder."
    )


def narrowing(path: str, wanted: Mapping[str, Leaf], saved: Mapping[str, Leaf]) -> str | None:
    """What to say when tensors lose bits on their way into the run; None when none does.

    A dtype that holds every value of the saved one (bfloat16 read as float32) loses nothing.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for name in wanted.keys() & saved.keys():
        here, there = wanted[name].dtype, saved[name].dtype
        if here is None or there is None or torch.promote_types(here, there) == here:
            continue
        counts[str(there).removeprefix("torch."), str(here).removeprefix("torch.")] += 1
    if not counts:
        return None
    tensors = ", ".join(
        f"{count} tensor{'s' * (count > 1)} of {there} into {here}"
        for (there, here), count in sorted(counts.items())
    )
    return (
        f"Loading {path} loses precision: {tensors}. The run keeps its parameters in "
        "--training.dtype; set that to the dtype of the checkpoint to keep every bit."
    )


def _shape(leaf: Leaf) -> str:
    return "no tensor" if leaf.shape is None else str(list(leaf.shape))
