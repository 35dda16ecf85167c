"""What the ranks hand to torch_checkpointing: {state key: state dict}.

The model's tensors and the optimizer's stay where they are, to be staged; of everything else this
is a copy, as the state is now. What is the same on all ranks is written by the lowest of them alone, so
that a thousand ranks do not write a thousand equal files.
"""

import copy
import hashlib
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpointer.nesting import encode
from torchtitan.components.checkpointer.screening import require_plain
from torchtitan.components.checkpointer.state import flatten_states, MODEL, OPTIMIZER
from torchtitan.components.checkpointer.tc.leaves import Nested, require_distinct_names


class Items(NamedTuple):
    """The state of this rank, by state key."""

    values: dict[str, Any]
    digests: dict[str, bytes | None]
    """Of what may be equal on all ranks."""
    tensors: dict[Nested, torch.Tensor] | None = None
    """All that there are, by state key and the keys that lead to them; None if nobody has looked."""


def items_of(states: Mapping[str, Any]) -> Items:
    """What this rank has to save.

    Raises:
        RuntimeError: it cannot be had, or not be saved.
        ValueError: names hide each other.
    """
    return items_from({key: partial(value_of, key, state) for key, state in states.items()})


def value_of(key: str, state: Any) -> Any:
    """What is saved of the ``state`` of that key."""
    value = state.state_dict() if isinstance(state, Stateful) else state
    return value if key in (MODEL, OPTIMIZER) else encode(value)


def items_from(found: Mapping[str, Callable[[], Any]]) -> Items:
    """As ``items_of``, of what ``value_of`` gives, or a function in its place."""
    values: dict[str, Any] = {}
    digests: dict[str, bytes | None] = {}
    tensors: dict[Nested, torch.Tensor] = {}
    for key, find in found.items():
        values[key], digests[key] = _item(key, find, tensors)
    flatten_states(values, model=values.get(MODEL))
    return Items(values, digests, tensors)


def repeated(digests: Sequence[Mapping[str, bytes | None]], rank: int) -> set[str]:
    """The keys of what ``rank`` has as a lower one has it, by the ``digests`` of all ranks."""
    return {
        key
        for key, digest in digests[rank].items()
        if digest is not None and any(others.get(key) == digest for others in digests[:rank])
    }


def _item(
    key: str, find: Callable[[], Any], tensors: dict[Nested, torch.Tensor]
) -> tuple[Any, bytes | None]:
    """What is saved of a state, whose ``tensors`` are noted; and its digest, if it may be equal on all ranks."""
    try:
        value = find()
        if key in (MODEL, OPTIMIZER):
            _look_through(value, (key,), tensors)
            return value, None
        own: dict[Nested, torch.Tensor] = {}
        _look_through(value, (key,), own)
        tensors.update(own)
        require_distinct_names(key, value)
        if not any(isinstance(tensor, DTensor) for tensor in own.values()):
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


def _look_through(tree: Any, nested: Nested, tensors: dict[Nested, torch.Tensor]) -> None:
    """Note the tensors, and refuse what no load would take or what cannot be written at all.

    Once, and before a save has begun: an optimizer has thousands of entries, and training waits.
    """
    if isinstance(tree, torch.Tensor):
        _require_readable(tree, nested)
        tensors[nested] = tree
        return
    if not isinstance(tree, (Mapping, list)):
        require_plain(tree, _name(nested))
        return
    if type(tree) not in (dict, list):
        require_plain(_emptied(tree), _name(nested))
    entries = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    plain: tuple[Any, ...] = ()
    for key, value in entries:
        kind = type(key)
        if kind is not str and kind is not int:
            require_plain(key, f"a key of {_name(nested)}")
        kind = type(value)
        # All parameters of a group share its settings, so that each of them is one and the same tuple.
        if kind in _SURELY_PLAIN or (kind is tuple and value is plain):
            continue
        inner = (*nested, key)
        if kind in _SURELY_TENSORS:
            _require_readable(value, inner)
            tensors[inner] = value
            continue
        _look_through(value, inner, tensors)
        if kind is tuple:
            plain = value


_SURELY_PLAIN = frozenset((float, bool, str, type(None)))
_SURELY_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, DTensor))


def _require_readable(tensor: torch.Tensor, nested: Nested) -> None:
    """Refuse a tensor that the library writes, but reads back wrong or not at all."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local) not in _KINDS or local.layout is not torch.strided or local.is_quantized:
        raise TypeError(
            f"{_name(nested[1:])} is a tensor of type {type(local).__name__} ({local.layout}, {local.dtype}), "
            "which torch_checkpointing cannot read back; save it as a plain tensor"
        )
    # What somebody has noted on a tensor goes into the file with it.
    if noted := getattr(tensor, "__dict__", None):
        require_plain(dict(noted), _name(nested))


def _name(nested: Nested) -> str:
    return ".".join(map(str, nested))


def _emptied(container: Any) -> Any:
    """A container of the same kind with nothing in it; ``container`` itself if that cannot be had."""
    try:
        other = copy.copy(container)
        other.clear()
    except Exception:  # of any class that somebody has made
        return container
    return other


_KINDS = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
