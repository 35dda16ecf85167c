"""Take the state for a save as it is now, in little time; another thread puts it together beside training.

Up to the next update nothing changes the parameters and what the optimizer has computed, so those are taken
by reference. Everything else is copied at once: a few values and small tensors. Where that does not suffice,
the save is made by the thread that trains.

    could_capture (all ranks tell each other) ... capture (trains) -> Captured
        -> items (another thread, before the next update)

A model may have to ask the other ranks for parts of what it saves, and they ask it, whether or not they save
in this way. So each rank does so just once for a save: ``could_capture`` does not, and ``capture`` comes
to it last, when nothing makes it give up any more.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from torchtitan.components.checkpointer.pinned.stager import Moment, SharedMemoryStager
from torchtitan.components.checkpointer.state import (
    COPIED_AT_ONCE_BYTES,
    MODEL,
    ModelWrapper,
    OPTIMIZER,
)
from torchtitan.components.checkpointer.tc.leaves import leaves, Nested
from torchtitan.components.checkpointer.tc.payload import Items, items_from, value_of
from torchtitan.components.checkpointer.tensor_memory import copies_of


class Captured(NamedTuple):
    """The state of this rank at one moment."""

    items: Callable[[], Items]
    """As ``payload.items_of``, errors too. For another thread, before the next update."""

    taken_at: Moment

    must_be_waited_for: bool
    """Other ranks may still ask this one for its part of the model, which has failed here. What training sends
    next they would take for that."""


def could_capture(states: Mapping[str, Any]) -> bool:
    """Whether ``capture`` would give something, as far as that can be told without other ranks."""
    return all(_could(key, state) for key, state in states.items())


def capture(states: Mapping[str, Any], stager: SharedMemoryStager) -> Captured | None:
    """Take ``states`` as they are now, or None where only saving them at once would do.

    A collective where asking the model for its entries is one.
    """
    found: dict[str, Callable[[], Any]] = {}
    has_failed: set[str] = set()
    for key in sorted(states, key=lambda key: key == MODEL):
        # What an object fails with is told to all ranks, as the others wait.
        try:
            find = _later(key, states[key])
        except Exception as error:
            find = partial(_raise, error)
            has_failed.add(key)
        if find is None:
            return None
        found[key] = find
    moment = stager.moment()

    def items() -> Items:
        moment.wait()  # digests are computed of tensors that are on a device, and not in its stream
        return items_from({key: found[key] for key in states})

    return Captured(items, moment, MODEL in has_failed)


def _could(key: str, state: Any) -> bool:
    if isinstance(state, ModelWrapper) and _knows_of_later(state):
        return state.can_be_taken_later()
    try:
        return _later(key, state) is not None
    except Exception:  # is told by the save
        return True


def _later(key: str, state: Any) -> Callable[[], Any] | None:
    """What gives ``value_of`` the state as it is now; None where only asking at once would do."""
    if (put_together := _put_together_later(state)) is not None:
        return partial(_value_later, key, put_together)
    if key in (MODEL, OPTIMIZER):
        return None
    value = value_of(key, state)
    tensors = {at: leaf for at, leaf in leaves(value) if isinstance(leaf, torch.Tensor)}
    if not tensors:
        return partial(_itself, value)
    if not all(
        type(one) is torch.Tensor and one.layout is torch.strided for one in tensors.values()
    ):
        return None
    if sum(each.nbytes for each in tensors.values()) > COPIED_AT_ONCE_BYTES:
        return None
    return partial(_itself, _with(copies_of(tensors, {}), value, ()))


def _put_together_later(state: Any) -> Callable[[], Any] | None:
    """What ``state_dict_later`` of the state gives, if whoever has made its ``state_dict`` knows of that."""
    return state.state_dict_later() if _knows_of_later(state) else None


def _knows_of_later(state: Any) -> bool:
    if "state_dict" in getattr(state, "__dict__", {}):
        return False
    for kind in type(state).__mro__:
        if "state_dict" in vars(kind) or "state_dict_later" in vars(kind):
            return {"state_dict", "state_dict_later"} <= vars(kind).keys()
    return False


def _value_later(key: str, put_together: Callable[[], Any]) -> Any:
    return value_of(key, put_together())


def _with(copies: Mapping[Nested, torch.Tensor], value: Any, at: Nested) -> Any:
    """What ``encode`` has given, with the ``copies`` in the places of its tensors."""
    if isinstance(value, torch.Tensor):
        return copies[at]
    if type(value) is dict:
        return {key: _with(copies, each, (*at, key)) for key, each in value.items()}
    if type(value) is list:
        return [_with(copies, each, (*at, number)) for number, each in enumerate(value)]
    return value


def _itself(value: Any) -> Any:
    return value


def _raise(error: Exception) -> Any:
    raise error
