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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, empty

from torchtitan.components.checkpointer.errors import CheckpointMismatchError
from torchtitan.components.checkpointer.nesting import decode, encode
from torchtitan.components.checkpointer.state import MODEL, OPTIMIZER

Path = tuple[str | int, ...]

# Keys like dp_rank_3, under which each rank keeps what is its own.
_OF_ONE_RANK = re.compile(r"(.*rank)_\d+")


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

    def __init__(self, key: str, target: Stateful, saved: Outline) -> None:
        self._key = key
        self._target = target
        self._shapes_itself = isinstance(target, ShapesItsLoad)
        if isinstance(target, ShapesItsLoad):
            self._to_fill = target.load_template(saved)
        else:
            live = encode(target.state_dict())
            # Nothing saved at all: what the object has now is what will be reported as missing.
            is_missing = not saved and live != encode({})
            self._to_fill = live if is_missing else template_of(_without_others(saved, live), live)

    def state_dict(self) -> dict[str, Any]:
        """The dict to fill; the same one on every call."""
        return self._to_fill

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand the filled dict over.

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
                f"has {sorted(map(str, plain))} under that key. Another version of the code saved "
                f"it; leave it out with --checkpoint.exclude_from_loading {self._key}."
            ) from error


def snapshots(states: Mapping[str, Any], keys: frozenset[str]) -> dict[str, Any]:
    """``states`` to be saved, with the states under ``keys`` as snapshots.

    The optimizer's stays as it is: its dict is flat already.
    """
    return {
        key: Snapshot(value) if _is_nested_state(key, value, keys) else value
        for key, value in states.items()
    }


def templates(states: Mapping[str, Any], keys: frozenset[str], outline: Outline) -> dict[str, Any]:
    """``states`` to be filled from the checkpoint that ``outline`` describes."""
    return {
        key: (
            Template(key, value, _under(key, outline))
            if key in keys and isinstance(value, Stateful)
            else value
        )
        for key, value in states.items()
    }


def _is_nested_state(key: str, value: Any, keys: frozenset[str]) -> bool:
    return key in keys and key not in (MODEL, OPTIMIZER) and isinstance(value, Stateful)


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
    """``saved`` without what other ranks keep under keys of which ``live`` has one of its own."""
    own = {match[1] for name in live if (match := _OF_ONE_RANK.fullmatch(name))}

    def is_foreign(key: str) -> bool:
        match = _OF_ONE_RANK.fullmatch(key)
        return match is not None and match[1] in own and key not in live

    return {name: entry for name, entry in saved.items() if not is_foreign(str(entry.path[0]))}


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
    if tuple(live.shape) == entry.shape and live.dtype == entry.dtype:
        return live
    if isinstance(live, DTensor):
        return empty(
            entry.shape,
            dtype=entry.dtype,
            device_mesh=live.device_mesh,
            placements=live.placements,
        )
    return torch.empty(entry.shape, dtype=entry.dtype, device=live.device)
