"""What a load asks of a checkpoint: exactly what was saved, in a form that DCP can fill.

DCP fills the dict that it is given and nothing else. A dict taken from a freshly built object has
the shape of a fresh state: of a list that has grown since, or of a key that has appeared, DCP would
restore nothing, without a word. So the dict is made from the index of the checkpoint, and the object
gets to see all that was saved under its key, as it was when it was saved.

    save:  object.state_dict -> Snapshot (nesting.encode) -> DCP
    load:  index -> Template (live tensors where they fit, else new ones) -> DCP fills it
                 -> nesting.decode -> object.load_state_dict

The model is not part of this: its entries are fixed, and a mismatch there is an error.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, empty

from torchtitan.components.checkpointer.errors import CheckpointMismatchError
from torchtitan.components.checkpointer.nesting import decode, encode
from torchtitan.components.checkpointer.state import OPTIMIZER

Path = tuple[str | int, ...]

# Under which each data-parallel rank keeps what is its own, by the custom of data loaders. Other names
# with numbers in them may be the keys of a dict that has grown.
_OF_ONE_RANK = re.compile(r"dp_rank_\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedEntry:
    """One entry of a checkpoint, as its index describes it."""

    path: Path
    """The keys that lead to it; a number is a place in a list."""

    shape: tuple[int, ...] | None
    """None for what is no tensor."""

    dtype: torch.dtype | None
    """None for what is no tensor."""


Outline = Mapping[str, SavedEntry]
"""The entries of a checkpoint by their flat names."""


@runtime_checkable
class ShapesItsLoad(Protocol):
    """State that knows better than its index what to take from a checkpoint."""

    def load_template(self, saved: Outline) -> dict[str, Any]:
        """The dict to fill, given what is saved under the key of this state, named without it.

        What it asks for and ``saved`` lacks is reported as missing. What it leaves out is not read.
        """
        ...


class Snapshot(Stateful):
    """A state in the form in which it is saved."""

    def __init__(self, source: Stateful) -> None:
        self._source = source

    def state_dict(self) -> dict[str, Any]:
        """The encoded state; its tensors are those of the source, everything else is copied."""
        return encode(self._source.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._source.load_state_dict(decode(state_dict))


class Template(Stateful):
    """A state in the form in which a certain checkpoint holds it."""

    def __init__(self, key: str, target: Stateful, outline: Outline) -> None:
        self._key = key
        self._target = target
        self._shapes_itself = isinstance(target, ShapesItsLoad)
        self._to_fill: Any
        saved = _under(key, outline)
        if isinstance(target, ShapesItsLoad):
            self._to_fill = target.load_template(saved)
        elif key in outline and outline[key].path == (key,):
            self._to_fill = None  # one value stands for all of it, such as None for a loader
        else:
            live = encode(target.state_dict())
            # Nothing saved at all: what the object has now is what will be reported as missing.
            is_missing = not saved and live != encode({})
            self._to_fill = live if is_missing else template_of(_without_others(saved, live), live)

    def state_dict(self) -> Any:
        """The dict to fill, the same one on every call; or a place for the one value."""
        return self._to_fill

    def load_state_dict(self, state_dict: Any) -> None:
        """Hand over what was filled.

        Raises:
            CheckpointMismatchError: the object misses something in it.
        """
        if self._shapes_itself:
            self._target.load_state_dict(state_dict)
            return
        plain = decode(state_dict)
        try:
            self._target.load_state_dict(plain)
        except KeyError as error:
            raise CheckpointMismatchError(
                f"{self._key} cannot be restored: it asks for the entry {error}, and the checkpoint "
                f"has {sorted(map(str, plain or ()))} under that key. Another version of the code saved "
                f"it; leave it out with --checkpoint.exclude_from_loading {self._key}."
            ) from error


class _PlainDict(Stateful):
    """A dict that stands for an object; restoring it changes it in place."""

    def __init__(self, entries: dict[Any, Any]) -> None:
        self._entries = entries

    def state_dict(self) -> dict[Any, Any]:
        return self._entries

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        restored = dict(state_dict)
        self._entries.clear()
        self._entries.update(restored)


def snapshots(states: Mapping[str, Any], keys: frozenset[str]) -> dict[str, Any]:
    """``states`` to be saved, with the states under ``keys`` as snapshots.

    The optimizer's stays as it is: its dict is flat already.
    """
    wrapped = dict(states)
    for key, state in _nested_states(states, keys):
        if key != OPTIMIZER:
            wrapped[key] = Snapshot(state)
    return wrapped


def templates(states: Mapping[str, Any], keys: frozenset[str], outline: Outline) -> dict[str, Any]:
    """``states`` to be filled from the checkpoint that ``outline`` describes."""
    wrapped = dict(states)
    for key, state in _nested_states(states, keys):
        wrapped[key] = Template(key, state, outline)
    return wrapped


def _nested_states(
    states: Mapping[str, Any], keys: frozenset[str]
) -> Iterator[tuple[str, Stateful]]:
    for key, value in states.items():
        if key in keys and isinstance(value, (Stateful, dict)):
            yield key, _PlainDict(value) if isinstance(value, dict) else value


def _under(key: str, outline: Outline) -> dict[str, SavedEntry]:
    return {
        name.removeprefix(f"{key}."): SavedEntry(
            path=entry.path[1:], shape=entry.shape, dtype=entry.dtype
        )
        for name, entry in outline.items()
        if entry.path[0] == key and len(entry.path) > 1
    }


def template_of(saved: Outline, live: Mapping[str, Any]) -> dict[str, Any]:
    """A dict with a place for every entry of ``saved``.

    ``live`` lends its tensors where they fit, so that what is sharded stays sharded.
    """
    template: dict[str, Any] = {}
    for entry in saved.values():
        set_element(template, entry.path, _place_for(entry, _at(live, entry.path)))
    return template


def _without_others(saved: Outline, live: Mapping[str, Any]) -> Outline:
    """``saved`` without what other ranks keep for themselves, if ``live`` says which rank this is."""
    own = {name for name in live if _OF_ONE_RANK.fullmatch(name)}
    return {
        name: entry
        for name, entry in saved.items()
        if not own or entry.path[0] in own or not _OF_ONE_RANK.fullmatch(str(entry.path[0]))
    }


def _at(tree: Any, path: Path) -> Any:
    """What lies at ``path``, or None."""
    for part in path:
        if isinstance(tree, Mapping) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return None
    return tree


def _place_for(entry: SavedEntry, live: Any) -> Any:
    if entry.shape is None or entry.dtype is None:
        return None  # any value may take this place
    if not isinstance(live, torch.Tensor):
        return torch.empty(entry.shape, dtype=entry.dtype)
    if tuple(live.shape) == entry.shape and live.dtype == entry.dtype and not _is_expanded(live):
        return live
    if isinstance(live, DTensor):
        return empty(
            entry.shape,
            dtype=entry.dtype,
            device_mesh=live.device_mesh,
            placements=live.placements,
        )
    return torch.empty(entry.shape, dtype=entry.dtype, device=live.device)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether one element in memory stands for several, which nothing can be copied into."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return any(
        size > 1 and not step for size, step in zip(local.shape, local.stride(), strict=True)
    )
