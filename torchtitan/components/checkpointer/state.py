"""Which objects make up a checkpoint, and how their tensors are laid out in it.

Model entries lie at the top level under their own names, without a ``model.`` prefix; everything
else lies under its state key. That layout is what makes a checkpoint readable by other programs.

    ModelWrapper.state_dict (model_entries.py) -> flatten_states -> the dict that a backend writes or fills
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.components.checkpointer.model_entries import (
    ask,
    Found,
    look_into,
    look_past_state_dict,
)
from torchtitan.components.checkpointer.tensor_memory import (
    alike,
    copies_of,
    copy_of,
    inside,
    layout_of,
    local_part,
    memories_of,
    place_of,
    same_view,
    sights_of,
    tensors_in,
)

MODEL = "model"
OPTIMIZER = "optimizer"
LR_SCHEDULER = "lr_scheduler"
DATALOADER = "dataloader"
TRAIN_STATE = "train_state"
RANK_STATE = "rank_state"

COPIED_AT_ONCE_BYTES = 1 << 20
"""More than that training does not copy a second time, where only a copy would let it go on."""


class ModelWrapper(Stateful):
    """One state dict over all parts of a model, with storage that moves only where the model's does.

    Staging buffers are found by the storage they were copied from. Entries that a model computes
    on the fly (a fused weight that is saved in parts) get new storage on every call, so from the second
    one on their values are copied into tensors of this object. Nothing else is ever written: what the model
    has shown before it may need again (weights that an average stands in for while it is saved).
    """

    def __init__(self, model: nn.Module | list[nn.Module]) -> None:
        self.model: list[nn.Module] = model if isinstance(model, list) else [model]
        self.cached_state_dict: dict[str, Any] = {}
        self.parameters: list[torch.Tensor] = []
        self.buffers: list[torch.Tensor] = []
        """All of the model's as they were when its entries were last taken, saved or not."""
        self._computed: dict[str, torch.Tensor] = {}
        """Of the cached entries those in memory of this object, for what is computed anew each time."""
        self._copies: dict[str, torch.Tensor] = {}
        """Of the entries that change in a forward pass, as they were at the last save that took them."""
        # What the model's tensors looked like, and which they were, when every cached entry was a view of one.
        # As long as that is so, nothing has to be compared or copied. Empty if nobody knows.
        self._sights: dict[str, tuple[Any, ...]] = {}
        self._seen: list[torch.Tensor] = []
        self._refresh()

    def _get_state_dict(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for part in self.model:
            merged.update(part.state_dict())
        return merged

    def _look(self) -> tuple[dict[str, Any], set[str]]:
        """The entries as they are now; and the names of those which are the model's own tensors."""
        return self._merged([look_into(part) for part in self.model])

    def _merged(self, parts: Iterable[Found]) -> tuple[dict[str, Any], set[str]]:
        merged: dict[str, Any] = {}
        own: set[str] = set()
        self.parameters, self.buffers = [], []
        for found in parts:
            own = (own - found.entries.keys()) | found.own
            merged.update(found.entries)
            self.parameters += found.parameters
            self.buffers += found.buffers
        return merged, own

    def _refresh(self) -> None:
        self._take_over(*self._look())

    def _take_over(self, fresh: Mapping[str, Any], own: Set[str]) -> bool:
        """Let the cached entries be the ``fresh`` ones, of which ``own`` are the model's own tensors.

        Returns whether each is a view of the fresh one now; of another one the values were copied.
        """
        self._sights, self._seen = {}, []
        cached = self.cached_state_dict
        for gone in cached.keys() - fresh.keys():
            del cached[gone]
            self._computed.pop(gone, None)
        changed = {
            name: value for name, value in fresh.items() if not same_view(cached.get(name), value)
        }
        if not changed:
            return True
        others = {name for name in changed.keys() - own if alike(cached.get(name), changed[name])}
        memories = memories_of((*self.parameters, *self.buffers)) if others else set()
        computed: dict[str, torch.Tensor] = {}
        for name, value in changed.items():
            if name in others and place_of(value)[0] not in memories:
                computed[name] = value
            else:
                cached[name] = value.detach() if name in own else value
                self._computed.pop(name, None)
        self._computed |= copies_of(computed, self._computed)
        cached |= {name: self._computed[name] for name in computed}
        return not computed

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The merged entries; the same dict and the same storages on every call."""
        self._refresh()
        return self.cached_state_dict

    def can_be_taken_later(self) -> bool:
        """Whether ``state_dict_later`` would do, going by how the model was last; asks no other rank."""
        entries = tensors_in(self.cached_state_dict)
        return self._changing(entries, sights_of(entries)) is not None

    @torch.no_grad()
    def state_dict_later(self) -> Callable[[], dict[str, Any]] | None:
        """What ``state_dict`` would give now, whatever becomes of the model's buffers before the next update.

        None where only asking the model at once would do, because much of it changes in a forward pass.
        Where other code than torch's makes entries, that is asked at once, which may be a collective. The
        other ranks count on it, so None comes before that or not at all.
        """
        parts = [look_past_state_dict(part) for part in self.model]
        is_asked = None in parts
        if is_asked and not self.can_be_taken_later():
            return None
        fresh, own = self._merged(
            ask(part) if found is None else found
            for part, found in zip(self.model, parts, strict=True)
        )
        tensors = tensors_in(fresh) if is_asked else fresh
        sights = sights_of(tensors)
        names = self._changing(
            tensors, sights, limit_bytes=None if is_asked else COPIED_AT_ONCE_BYTES
        )
        if names is None:
            return None
        # Now, and not by that thread: the memory of a parameter may be exchanged for a while meanwhile.
        values = list(fresh.values())
        if is_asked:
            self._take_over(fresh, own)
        elif sights != self._sights or not all(map(operator.is_, values, self._seen)):
            if self._take_over(fresh, own):
                self._sights, self._seen = sights, values
        if is_asked:
            names += self._unknown(tensors, names)
        self._copies = copies_of({name: fresh[name] for name in names}, self._copies)
        entries = {**self.cached_state_dict, **self._copies}
        if is_asked:
            others = fresh.keys() - tensors.keys()
            entries |= {name: copy_of(fresh[name]) for name in others}
        return lambda: entries

    def _changing(
        self,
        entries: Mapping[str, torch.Tensor],
        sights: Mapping[str, tuple[Any, ...]],
        *,
        limit_bytes: int | None = COPIED_AT_ONCE_BYTES,
    ) -> list[str] | None:
        """The names of those that change in a forward pass; None if they are larger than the limit."""
        names = inside(sights, self.buffers)
        size_bytes = sum(local_part(entries[name]).nbytes for name in names)
        return None if limit_bytes is not None and size_bytes > limit_bytes else names

    def _unknown(self, entries: Mapping[str, torch.Tensor], known: list[str]) -> list[str]:
        """The names of those in memory that anybody may write to: neither a parameter's nor this object's."""
        memories = memories_of(self.parameters)
        cached = self.cached_state_dict
        return [
            name
            for name, value in entries.items()
            if place_of(value)[0] not in memories
            and place_of(value)[0] == place_of(cached[name])[0]
            and name not in known
        ]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give every part its entries; names that belong to no part are passed over."""
        for part in self.model:
            part.load_state_dict(state_dict, strict=False)
        self._refresh()


def changed_by_updates_only(states: Mapping[str, Any]) -> Callable[[str, torch.Tensor], bool]:
    """Tells whether nothing but the optimizer's step changes a tensor below a key of a checkpoint.

    A copy of such a tensor may be made during the next forward and backward pass. Buffers change in
    there, and of other objects, the extra state of a module among them, nobody knows. Ask once the
    entries of the model have been taken for the save.
    """
    still = memories_of(states[MODEL].parameters) - memories_of(states[MODEL].buffers)

    def is_model(key: str) -> bool:
        # One entry of the model at the top level of a checkpoint, or all of them under one key.
        return key == MODEL or key not in states

    def is_still(key: str, tensor: torch.Tensor) -> bool:
        return key == OPTIMIZER or (is_model(key) and place_of(tensor)[0] in still)

    return is_still


def flatten_states(
    states: Mapping[str, Any], *, model: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The top level of a checkpoint: model entries by name, everything else by state key.

    Args:
        states: the objects to save by state key; ``MODEL`` may be missing.
        model: the model's entries if they were taken already.

    Raises:
        ValueError: a model entry would hide, or hide inside, another state key.
    """
    flat = {key: value for key, value in states.items() if key != MODEL}
    if model is None:
        model = states[MODEL].state_dict() if MODEL in states else {}
    clashes = sorted(name for name in model if name.partition(".")[0] in flat)
    if clashes:
        raise ValueError(
            f"Model entries {clashes} carry the name of another checkpoint entry "
            f"({sorted(flat)}); rename these submodules."
        )
    flat.update(model)
    return flat


def cast_for_export(state_dict: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A copy of ``state_dict`` whose floating-point tensors have ``dtype``; others untouched.

    Tied entries are still tied.
    """
    made: dict[tuple[Any, ...], torch.Tensor] = {}

    def cast(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if value.dtype == dtype:
            return value
        # Two that share a place without being tied have no elements, and so nothing to mix up.
        view = (place_of(value), layout_of(value), value.stride())
        if view not in made:
            made[view] = value.to(dtype)
        return made[view]

    return {name: cast(value) for name, value in state_dict.items()}


def require_known(excluded: Iterable[str], known: Iterable[str]) -> None:
    """Check that every excluded key exists.

    Raises:
        ValueError: names all keys that do not, and those that do.
    """
    unknown = sorted(set(excluded) - set(known))
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} not found in state_dict. --checkpoint.exclude_from_loading "
            f"takes names out of {sorted(set(known) - {MODEL})}."
        )
