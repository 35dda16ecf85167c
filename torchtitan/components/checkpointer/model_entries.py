"""Find the entries of a model for a save, in one walk where no code but torch's own would make them.

Training waits for that walk. ``state_dict`` detaches each tensor, which takes a sharded one long, and asks
each module a second time for what changes in a forward pass; nearly all of it is known from the last save.

    state.ModelWrapper -> look_into (each part) -> entries, parameters, buffers
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


def look_into(part: nn.Module) -> Found:
    """All of ``part``; other code than torch's is asked as nearly everybody asks it, without a history."""
    found = Found()
    if _walk(part, "", found):
        found.own = set(found.entries)
        return found
    entries = part.state_dict()
    found = Found(entries=entries)
    for module in part.modules():
        found.parameters += [each for each in module._parameters.values() if each is not None]
        found.buffers += [each for each in module._buffers.values() if each is not None]
    return found


def _walk(module: nn.Module, prefix: str, found: Found) -> bool:
    """Add what ``state_dict`` of torch would, in its order; False if other code has a say in it."""
    if module._state_dict_hooks or not _is_of_torch(module):
        return False
    for hook in module._state_dict_pre_hooks.values():
        # Of sharding, and looks at no entry: what a forward pass has left whole is in shards again.
        if not _is_of_sharding(hook):
            return False
        hook(module, prefix, True)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            found.entries[prefix + name] = parameter
            found.parameters.append(parameter)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            found.buffers.append(buffer)
            if name not in module._non_persistent_buffers_set:
                found.entries[prefix + name] = buffer
    return all(
        child is None or _walk(child, f"{prefix}{name}.", found)
        for name, child in module._modules.items()
    )


def _is_of_torch(module: nn.Module) -> bool:
    """Whether the entries of a module are its parameters and buffers, and torch's own code takes them."""
    kind, own = type(module), module.__dict__
    # The object itself may have been given another one than its class has.
    return all(getattr(kind, name) is method and name not in own for name, method in _OF_TORCH)


_OF_TORCH = tuple(
    (name, getattr(nn.Module, name))
    for name in ("state_dict", "_save_to_state_dict", "get_extra_state")
)


def _is_of_sharding(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp._fully_shard.")
