"""Compare what a run needs with the outline of a checkpoint, whatever back end wrote it.

Before a tensor is read. Back ends name one missing key at a time, and a user who points at the
wrong checkpoint should hear everything at once. Names are flat: entries of the model by their own
names, everything else as ``<state key>.<path>``, on whatever files a back end spreads them.

    outline of the checkpoint + the states to fill -> require_match -> one error, or the read
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.components.checkpointer.agreement import gather, rank_zero_decides
from torchtitan.components.checkpointer.errors import CheckpointMismatchError
from torchtitan.components.checkpointer.state import RANK_STATE
from torchtitan.components.checkpointer.templates import Outline
from torchtitan.tools.logging import logger


class Leaf(NamedTuple):
    """One entry of a run or of a checkpoint, as far as the two are compared."""

    shape: tuple[int, ...] | None
    """None for what is no tensor."""

    dtype: torch.dtype | None
    """None for what is no tensor."""


_PLAIN = frozenset((type(None), bool, int, float, str, bytes, dict, list, tuple))


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """(flat key, shape and dtype) of every entry.

    Lists are passed over: DCP flattens them by contents, which may differ between runs.
    """
    for name, value in tree.items():
        # Tensors first: whether something is stateful is a slow question.
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", Leaf(tuple(value.shape), value.dtype)
            continue
        if type(value) not in _PLAIN and isinstance(value, Stateful):
            value = value.state_dict()
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", Leaf(tuple(value.shape), value.dtype)
        elif isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        elif not isinstance(value, (list, tuple)):
            yield f"{prefix}{name}", Leaf(None, None)


def require_match(
    path: str,
    states: Mapping[str, Any],
    *,
    other_keys: Set[str],
    outline: Outline,
    group: "dist.ProcessGroup | None" = None,
) -> None:
    """Check that the checkpoint can fill ``states``; a collective.

    Args:
        states: what to fill, as it lies in the checkpoint.
        other_keys: state keys besides the model's; their surplus entries are fine, because a
            checkpoint may hold more than a run restores.
        outline: what the checkpoint holds, as its back end reads it; that of rank 0 counts.

    Raises:
        CheckpointMismatchError: names every missing, unexpected and mis-shaped key, on all ranks.
    """
    # What each rank keeps for itself would make every rank's listing another one, which would then
    # have to be sent around; and it is asked for only as far as it was saved.
    shared = {key: value for key, value in states.items() if key != RANK_STATE}
    wanted = _union(dict(leaves(shared)), group)
    rank_zero_decides(lambda: _compare(path, wanted, outline, other_keys), group)


def _union(own: dict[str, Leaf], group: "dist.ProcessGroup | None") -> dict[str, Leaf]:
    """The entries of all ranks; sent around only where they differ (pipeline stages)."""
    listing = repr([(name, *own[name]) for name in sorted(own)]).encode()
    if len(set(gather(hashlib.sha256(listing).hexdigest(), group))) == 1:
        return own
    return {name: leaf for part in gather(own, group) for name, leaf in part.items()}


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
