"""What the ranks hand to torch_checkpointing: {state key: state dict}.

The model's tensors and the optimizer's stay where they are, to be staged; of everything else this
is a copy, as the state is now. What is the same on all ranks is written by the lowest of them alone, so
that a thousand ranks do not write a thousand equal files.
"""

import copy
import hashlib
import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpointer.nesting import encode
from torchtitan.components.checkpointer.screening import require_plain
from torchtitan.components.checkpointer.state import flatten_states, MODEL, OPTIMIZER
from torchtitan.components.checkpointer.tc.leaves import leaves, require_distinct_names


class Items(NamedTuple):
    """The state of this rank, by state key."""

    values: dict[str, Any]
    digests: dict[str, bytes | None]
    """Of what may be equal on all ranks."""


def items_of(states: Mapping[str, Any]) -> Items:
    """What this rank has to save.

    Raises:
        RuntimeError: it cannot be had, or not be saved.
        ValueError: names hide each other.
    """
    items = Items({}, {})
    for key, state in states.items():
        items.values[key], items.digests[key] = _item(key, state)
    flatten_states(items.values, model=items.values.get(MODEL))
    return items


def repeated(digests: Sequence[Mapping[str, bytes | None]], rank: int) -> set[str]:
    """The keys of what ``rank`` has as a lower one has it, by the ``digests`` of all ranks."""
    return {
        key
        for key, digest in digests[rank].items()
        if digest is not None and any(others.get(key) == digest for others in digests[:rank])
    }


def _item(key: str, state: Any) -> tuple[Any, bytes | None]:
    """What is saved of a state; and its digest, if it may be equal on all ranks."""
    try:
        value = state.state_dict() if isinstance(state, Stateful) else state
        _require_readable(value)
        if key in (MODEL, OPTIMIZER):
            _require_plain(value, key)
            return value, None
        value = encode(value)
        _require_plain(value, key)
        require_distinct_names(key, value)
        if not _has_shards(value):
            return value, _digest(value)
        return value, None
    except Exception as error:
        raise RuntimeError(
            f"the state {key} cannot be saved: {type(error).__name__}: {str(error).rstrip('.')}"
        ) from error


def _digest(value: Any) -> bytes:
    stream = io.BytesIO()
    _ByContents(stream).dump(value)
    return hashlib.sha256(stream.getbuffer()).digest()


class _ByContents(pickle.Pickler):
    """Writes equal tensors alike, which torch does not: it writes where in memory they lie."""

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        plain = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
        contents = plain.reshape(-1).view(torch.uint8).numpy()
        return str(obj.dtype), tuple(obj.shape), hashlib.sha256(contents.data).digest()


def _require_readable(tree: Any) -> None:
    """Refuse tensors that the library writes, but reads back wrong or not at all."""
    for nested, leaf in leaves(tree):
        if not isinstance(leaf, torch.Tensor):
            continue
        local = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
        if type(local) not in _KINDS or local.layout is not torch.strided or local.is_quantized:
            name = ".".join(map(str, nested))
            raise TypeError(
                f"{name} is a tensor of type {type(local).__name__} ({local.layout}, {local.dtype}), which "
                "torch_checkpointing cannot read back; save it as a plain tensor"
            )


def _require_plain(tree: Any, name: str) -> None:
    """Refuse what no load would take, and what cannot be written at all, before a save has begun."""
    if isinstance(tree, torch.Tensor):
        # What somebody has noted on a tensor goes into the file with it.
        if noted := getattr(tree, "__dict__", None):
            require_plain(dict(noted), name)
        return
    if not isinstance(tree, (Mapping, list)):
        require_plain(tree, name)
        return
    if type(tree) not in (dict, list):
        require_plain(_emptied(tree), name)
    entries = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for key, value in entries:
        if type(key) not in (str, int):
            require_plain(key, f"a key of {name}")
        # An optimizer has thousands of these, and training waits.
        if type(value) not in _SURELY_PLAIN:
            _require_plain(value, f"{name}.{key}")


_SURELY_PLAIN = (float, bool, str, type(None))


def _emptied(container: Any) -> Any:
    """A container of the same kind with nothing in it; ``container`` itself if that cannot be had."""
    try:
        other = copy.copy(container)
        other.clear()
    except Exception:  # of any class that somebody has made
        return container
    return other


_KINDS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _has_shards(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return any(map(_has_shards, tree.values()))
    return any(map(_has_shards, tree)) if isinstance(tree, list) else isinstance(tree, DTensor)
