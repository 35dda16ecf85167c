"""Find the entries of a model for a save, in one walk where no code but torch's own would make them.

Training waits for that walk. ``state_dict`` detaches each tensor, which takes a sharded one long, and asks
each module a second time for what changes in a forward pass; nearly all of it is known from the last save.

    state.ModelWrapper -> look_into (each part): look_past_state_dict, or else ask
                       -> entries, parameters, buffers
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(slots=True)
class Found:
    """What a part of a model holds now."""

    entries: dict[str, Any] = field(default_factory=dict)
    """As in its state dict, by name."""
    own: set[str] = field(default_factory=set)
    """The entries that are the part's own tensors, with their history."""
    parameters: list[torch.Tensor] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    """Also those that are not saved."""
    asked: set[int] = field(default_factory=set)
    """The hooks that were called, by their address."""


def look_past_state_dict(part: nn.Module) -> Found | None:
    """All of ``part``, whose entries are its own tensors; None if other code than torch's has a say in it."""
    found = Found()
    if not _walk(part, "", found):
        return None
    found.own = set(found.entries)
    return found


def look_into(part: nn.Module) -> Found:
    """All of ``part``; other code than torch's is asked, as nearly everybody asks it without a history."""
    own = look_past_state_dict(part)
    return ask(part) if own is None else own


def ask(part: nn.Module) -> Found:
    """What ``state_dict`` of ``part`` gives, which may be a collective."""
    entries = part.state_dict()
    found = Found(entries=entries)
    for module in part.modules():
        found.parameters += [each for each in module._parameters.values() if each is not None]
        found.buffers += [each for each in module._buffers.values() if each is not None]
    return found


def _walk(module: nn.Module, prefix: str, found: Found) -> bool:
    """Add what ``state_dict`` of torch would, in its order; False if other code has a say in it."""
    own = module.__dict__
    if own["_state_dict_hooks"] or not _is_of_torch(module):
        return False
    # Most modules have none of what follows, or not much of it, and a model has hundreds of them.
    for hook in own["_state_dict_pre_hooks"].values():
        if id(hook) in found.asked:
            continue
        # Of sharding, and looks at no entry: what a forward pass has left whole is in shards again. One hook
        # does so for all modules that it was given to.
        if not _is_of_sharding(hook):
            return False
        hook(module, prefix, True)
        found.asked.add(id(hook))
    entries = found.entries
    for name, parameter in own["_parameters"].items():
        if parameter is not None:
            entries[prefix + name] = parameter
            found.parameters.append(parameter)
    for name, buffer in own["_buffers"].items():
        if buffer is not None:
            found.buffers.append(buffer)
            if name not in own["_non_persistent_buffers_set"]:
                entries[prefix + name] = buffer
    for name, child in own["_modules"].items():
        if child is not None and not _walk(child, f"{prefix}{name}.", found):
            return False
    return True


def _is_of_torch(module: nn.Module) -> bool:
    """Whether the entries of a module are its parameters and buffers, and torch's own code takes them."""
    kind, own = type(module), module.__dict__
    # The object itself may have been given another one than its class has.
    return (
        kind.state_dict is _STATE_DICT
        and kind._save_to_state_dict is _SAVE_TO_STATE_DICT
        and kind.get_extra_state is _GET_EXTRA_STATE
        and "state_dict" not in own
        and "_save_to_state_dict" not in own
        and "get_extra_state" not in own
    )


_STATE_DICT = nn.Module.state_dict
_SAVE_TO_STATE_DICT = nn.Module._save_to_state_dict
_GET_EXTRA_STATE = nn.Module.get_extra_state


def _is_of_sharding(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp._fully_shard.")
