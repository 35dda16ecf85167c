"""Decide how the state of an optimizer looks in a checkpoint: flat, and keyed by parameter names.

torch numbers parameters by their place in the optimizer. A number means another parameter as soon
as a group, a pipeline stage or a frozen layer changes, so checkpoints hold names instead:

    state.<fqn>.<state name>        exp_avg, exp_avg_sq, step, ... (nested dicts add more dots)
    param_groups.<fqn>.<key>        lr, betas, ..., repeated for every parameter of the group

One such dict can therefore serve several optimizers and model parts: each takes what it owns. The one
fact to know: an optimizer that has not stepped yet has no state at all, and a template taken from it
would load nothing without an error. ``init_optim_state`` comes first, always.

    save   init_optim_state -> get_flat_optim_state_dict -> writer
    load   init_optim_state -> get_flat_optim_state_dict -> filled in place -> load_flat_optim_state_dict
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["init_optim_state", "get_flat_optim_state_dict", "load_flat_optim_state_dict"]

# Group entries that say which parameters a group has, not how it treats them.
_IDENTITY_KEYS = frozenset({"params", "param_names"})


def init_optim_state(optim: Optimizer) -> None:
    """Give ``optim`` the state its first step would create; parameters keep every bit.

    It takes a real step with zero gradients and a learning rate of zero, so Adam's ``step`` reads 1
    afterwards. Nothing happens when there is state already, or when a parameter holds a gradient: a
    training step is then under way and must not be disturbed.
    """
    params = [param for group in optim.param_groups for param in group["params"]]
    if optim.state or any(param.grad is not None for param in params):
        return
    for param in params:
        if param.requires_grad:
            param.grad = torch.zeros_like(param)
    learning_rates = [group["lr"] for group in optim.param_groups]
    for group, lr in zip(optim.param_groups, learning_rates, strict=True):
        # A capturable optimizer reads its rate from a tensor and would refuse a float here.
        group["lr"] = torch.zeros_like(lr) if isinstance(lr, torch.Tensor) else 0.0
    try:
        optim.step(closure=None)
    finally:
        for group, lr in zip(optim.param_groups, learning_rates, strict=True):
            group["lr"] = lr
        optim.zero_grad(set_to_none=True)


def get_flat_optim_state_dict(optim: Optimizer) -> dict[str, Any]:
    """The flat dict of ``optim``; tensors are the live ones, not copies.

    Raises ``ValueError`` for a group without ``param_names``, ``KeyError`` for state that belongs to
    no parameter of any group.
    """
    fqns = _fqns_in_order(optim)
    numbered = optim.state_dict()
    flat: dict[str, Any] = {}
    for param_id, param_state in numbered["state"].items():
        if not isinstance(param_id, int) or param_id >= len(fqns):
            raise KeyError(
                f"the optimizer holds state for parameter id {param_id!r}, which is in none of its "
                f"groups ({len(fqns)} parameters). State can be saved by name only for parameters in "
                "a group: add the parameter to one, or remove its state."
            )
        flat.update(_flatten(f"state.{fqns[param_id]}", param_state))
    for group in numbered["param_groups"]:
        for param_id in group["params"]:
            for key, value in group.items():
                if key not in _IDENTITY_KEYS:
                    flat[f"param_groups.{fqns[param_id]}.{key}"] = value
    return flat


def load_flat_optim_state_dict(optim: Optimizer, flat: Mapping[str, Any]) -> None:
    """Load into ``optim`` what ``flat`` holds for its parameters.

    Which state to look for is read from the live state, so ``init_optim_state`` must have run.
    Absent ``state.*`` entries are skipped and entries of other optimizers ignored. State keeps the
    dtype it has now. Raises ``KeyError`` for a missing group entry and ``ValueError`` for tensors of
    another shape.
    """
    fqns = _fqns_in_order(optim)
    params = [param for group in optim.param_groups for param in group["params"]]
    numbered_state: dict[int, dict[str, Any]] = {}
    mismatches: list[str] = []
    for param_id, (fqn, param) in enumerate(zip(fqns, params, strict=True)):
        live = optim.state.get(param, {})
        found = _collect(f"state.{fqn}", live, flat, mismatches)
        if found:
            numbered_state[param_id] = found
    if mismatches:
        raise ValueError(
            "the optimizer state does not fit this model: " + "; ".join(sorted(mismatches)) + ". "
            "Load a checkpoint of the same model, or exclude the optimizer from loading."
        )
    numbered = {"state": numbered_state, "param_groups": _numbered_groups(optim, fqns, flat)}
    # torch casts state to the dtype of its parameter. State kept in another dtype on purpose
    # (bfloat16 moments of float32 parameters) is taken out first and put back as it was.
    other_dtypes = {
        param_id: _take_other_dtypes(param_state, params[param_id].dtype)
        for param_id, param_state in numbered_state.items()
    }
    optim.load_state_dict(numbered)
    for param_id, taken in other_dtypes.items():
        if taken:
            _merge(optim.state[params[param_id]], taken)


def _fqns_in_order(optim: Optimizer) -> list[str]:
    """Names of all parameters, in the order in which torch numbers them."""
    fqns: list[str] = []
    for index, group in enumerate(optim.param_groups):
        names = group.get("param_names")
        if names is None:
            raise ValueError(
                f"optimizer state is saved by parameter name, but param group {index} of "
                f"{type(optim).__name__} has no 'param_names'. Build the group with the names of its "
                "parameters, in the same order."
            )
        fqns.extend(names)
    return fqns


def _flatten(prefix: str, nested: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in nested.items():
        key = f"{prefix}.{name}"
        if isinstance(value, Mapping):
            yield from _flatten(key, value)
        else:
            yield key, value


def _collect(
    prefix: str, live: Mapping[str, Any], flat: Mapping[str, Any], mismatches: list[str]
) -> dict[str, Any]:
    """The part of ``flat`` that has the structure of ``live``; wrong shapes go to ``mismatches``."""
    found: dict[str, Any] = {}
    for name, live_value in live.items():
        key = f"{prefix}.{name}"
        if isinstance(live_value, Mapping):
            nested = _collect(key, live_value, flat, mismatches)
            if nested:
                found[name] = nested
        elif key in flat:
            value = flat[key]
            if isinstance(live_value, torch.Tensor) and isinstance(value, torch.Tensor):
                if value.shape != live_value.shape:
                    mismatches.append(
                        f"{key} has shape {tuple(value.shape)}, expected {tuple(live_value.shape)}"
                    )
                value = _owned(value, live_value)
            found[name] = value
    return found


def _owned(value: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """``value`` in the dtype of ``live``, in memory that no other optimizer shares."""
    if value is live:
        # Loading in place into a template of live tensors: a copy would double the peak memory.
        return value
    return value.detach().to(dtype=live.dtype, device=live.device, copy=True)


def _numbered_groups(
    optim: Optimizer, fqns: list[str], flat: Mapping[str, Any]
) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    missing: list[str] = []
    first = 0
    for group in optim.param_groups:
        size = len(group["params"])
        # All parameters of a group share its entries, so the first one speaks for all.
        entries = {
            key: f"param_groups.{fqns[first]}.{key}" for key in group if key not in _IDENTITY_KEYS
        }
        missing += [flat_key for flat_key in entries.values() if flat_key not in flat]
        values = {key: flat[flat_key] for key, flat_key in entries.items() if flat_key in flat}
        groups.append({"params": list(range(first, first + size)), **values})
        first += size
    if missing:
        raise KeyError(
            f"Optimizer param group key missing from the state to load: {sorted(missing)}. It was "
            "saved with other param groups or by another optimizer: use the same optimizer settings, "
            "or exclude the optimizer from loading."
        )
    return groups


def _take_other_dtypes(param_state: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Remove from ``param_state``, and return, the floating point tensors that torch would cast."""
    taken: dict[str, Any] = {}
    for name, value in list(param_state.items()):
        if isinstance(value, dict):
            nested = _take_other_dtypes(value, dtype)
            if nested:
                taken[name] = nested
        elif isinstance(value, torch.Tensor) and name != "step" and value.dtype != dtype:
            taken[name] = param_state.pop(name)
    return taken


def _merge(into: dict[str, Any], taken: dict[str, Any]) -> None:
    for name, value in taken.items():
        if isinstance(value, dict):
            _merge(into[name], value)
        else:
            into[name] = value
