"""Decide how the state of an optimizer looks in a checkpoint: flat, and keyed by parameter names.

torch numbers parameters by their place in the optimizer. A number means another parameter as soon
as a group, a pipeline stage or a frozen layer changes, so checkpoints hold names instead:

    state.<fqn>.<state name>        exp_avg, exp_avg_sq, step, ... (nested dicts add more dots)
    param_groups.<fqn>.<key>        lr, betas, ..., repeated for every parameter of the group

One such dict can therefore serve several optimizers and model parts: each takes what it owns. The one
fact to know: an optimizer that has not stepped yet has no state at all, and a template taken from it
would load nothing without an error. ``init_optim_state`` comes first, always. A parameter that never
had a gradient has no state beside others that have, and must have none again after a load: with
invented state its first step would count as its second.

    save   init_optim_state -> get_flat_optim_state_dict -> writer
                            -> flat_optim_state_later: the same, put together by another thread
    load   init_optim_state -> flat_optim_template -> filled in place -> load_flat_optim_state_dict
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

__all__ = [
    "flat_optim_state_later",
    "flat_optim_template",
    "get_flat_optim_state_dict",
    "init_optim_state",
    "load_flat_optim_state_dict",
    "reset_step_counts",
]

# Group entries that say which parameters a group has, not how it treats them.
_IDENTITY_KEYS = frozenset({"params", "param_names"})


class SavedEntry(Protocol):
    """One entry of a checkpoint; no tensor where ``shape`` and ``dtype`` are None."""

    @property
    def shape(self) -> tuple[int, ...] | None: ...

    @property
    def dtype(self) -> torch.dtype | None: ...


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


def reset_step_counts(optim: Optimizer) -> None:
    """Let the state that ``init_optim_state`` has just created count no step."""
    for param_state in optim.state.values():
        if isinstance(param_state.get("step"), torch.Tensor):
            param_state["step"].zero_()


def get_flat_optim_state_dict(optim: Optimizer) -> dict[str, Any]:
    """The flat dict of ``optim``; tensors are the live ones, not copies.

    Raises ``ValueError`` for a group without ``param_names``, ``KeyError`` for state that belongs to
    no parameter of any group.
    """
    fqns = _fqns_in_order(optim)
    numbered = optim.state_dict()
    groups = [
        ([fqns[param_id] for param_id in group["params"]], _settings_of(group))
        for group in numbered["param_groups"]
    ]
    return _flat(numbered["state"].items(), dict(enumerate(fqns)), groups)


def flat_optim_state_later(optim: Optimizer) -> Callable[[], dict[str, Any]]:
    """Take what ``get_flat_optim_state_dict`` would give now; what is returned puts it together.

    That may be called by another thread, before the next step of ``optim``. Errors come from either.
    """
    if type(optim).state_dict is not Optimizer.state_dict or _has_state_dict_hooks(optim):
        # Other code than torch's need not bear another thread.
        flat = get_flat_optim_state_dict(optim)
        flat |= {key: _kept(value) for key, value in flat.items() if not key.startswith("state.")}
        return lambda: flat
    fqns = _fqns_in_order(optim)
    names = dict(zip(map(id, _params_in_order(optim)), fqns, strict=True))
    state = list(optim.state.items())
    groups = [
        (
            list(group["param_names"]),
            {key: _kept(value) for key, value in _settings_of(group).items()},
        )
        for group in optim.param_groups
    ]
    return lambda: _flat([(id(param), values) for param, values in state], names, groups)


def _flat(
    state: Iterable[tuple[Any, Mapping[str, Any]]],
    names: Mapping[Any, str],
    groups: Iterable[tuple[Sequence[str], Mapping[str, Any]]],
) -> dict[str, Any]:
    """The flat dict of the ``state`` by parameter, the ``names`` of these, and (names, settings) by group."""
    flat: dict[str, Any] = {}
    for param_id, values in state:
        if param_id not in names:
            raise KeyError(
                f"the optimizer holds state for parameter id {param_id!r}, which is in none of its "
                f"groups ({len(names)} parameters). State can be saved by name only for parameters in "
                "a group: add the parameter to one, or remove its state."
            )
        flat.update(_flatten(f"state.{names[param_id]}", values))
    for fqns, settings in groups:
        entries = [(f".{key}", value) for key, value in settings.items()]
        for fqn in fqns:
            # More entries than all else in a checkpoint: training may wait for each of them.
            begin = f"param_groups.{fqn}"
            flat.update([(begin + end, value) for end, value in entries])
    return flat


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _IDENTITY_KEYS}


def _kept(value: Any) -> Any:
    """A setting as it is now, which a scheduler may change at any time."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _has_state_dict_hooks(optim: Optimizer) -> bool:
    return bool(optim._optimizer_state_dict_pre_hooks or optim._optimizer_state_dict_post_hooks)


def flat_optim_template(optim: Optimizer, saved: Mapping[str, SavedEntry]) -> dict[str, Any]:
    """The flat dict to fill from a checkpoint that holds ``saved``; ``init_optim_state`` comes first.

    It has state only for parameters of which there is state in ``saved``; there it asks for all
    that the optimizer uses. Parameters that are not in ``saved`` at all, because they were frozen
    then, follow the settings of their group.
    """
    fqns = _fqns_in_order(optim)
    saved_keys = _state_keys_by_fqn(saved, fqns)
    template: dict[str, Any] = {}
    for fqn, param in zip(fqns, _params_in_order(optim), strict=True):
        if fqn not in saved_keys:
            continue
        live = dict(_flatten(f"state.{fqn}", optim.state.get(param, {})))
        # Frozen since the optimizer was built, so that nothing has created state for it here.
        template |= live or {key: _room_for(saved[key], param) for key in saved_keys[fqn]}
    for group in optim.param_groups:
        settings = _settings_of(group)
        for fqn in _with_settings(group, saved) or group["param_names"]:
            template |= {f"param_groups.{fqn}.{key}": value for key, value in settings.items()}
    return template


def load_flat_optim_state_dict(optim: Optimizer, flat: Mapping[str, Any]) -> None:
    """Load into ``optim`` what ``flat`` holds for its parameters.

    Which state to look for is read from the live state, so ``init_optim_state`` must have run; a
    parameter without live state takes all there is. Where ``flat`` has no state there is none
    afterwards. Entries of other optimizers are ignored. State keeps the dtype it has now. Raises
    ``KeyError`` for a missing group entry and ``ValueError`` for tensors of another shape.
    """
    fqns = _fqns_in_order(optim)
    params = _params_in_order(optim)
    keys_by_fqn = _state_keys_by_fqn(flat, fqns)
    numbered_state: dict[int, dict[str, Any]] = {}
    mismatches: list[str] = []
    for param_id, (fqn, param) in enumerate(zip(fqns, params, strict=True)):
        live = optim.state.get(param, {})
        if live:
            found = _collect(f"state.{fqn}", live, flat, mismatches)
        else:
            found = _nested({key: flat[key] for key in keys_by_fqn.get(fqn, ())}, f"state.{fqn}.")
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


def _params_in_order(optim: Optimizer) -> list[torch.Tensor]:
    return [param for group in optim.param_groups for param in group["params"]]


def _state_keys_by_fqn(keys: Iterable[str], fqns: Iterable[str]) -> dict[str, list[str]]:
    """The ``state.*`` keys of each parameter that has any."""
    known = set(fqns)
    found: dict[str, list[str]] = {}
    for key in keys:
        kind, *parts = key.split(".")
        if kind != "state":
            continue
        # The longest name wins, because names of nested state follow that of the parameter.
        for end in range(len(parts) - 1, 0, -1):
            fqn = ".".join(parts[:end])
            if fqn in known:
                found.setdefault(fqn, []).append(key)
                break
    return found


def _with_settings(group: Mapping[str, Any], flat: Mapping[str, Any]) -> list[str]:
    """The parameters of ``group`` for which ``flat`` holds settings."""
    keys = [key for key in group if key not in _IDENTITY_KEYS]
    return [
        fqn
        for fqn in group["param_names"]
        if any(f"param_groups.{fqn}.{key}" in flat for key in keys)
    ]


def _room_for(entry: SavedEntry, param: torch.Tensor) -> Any:
    if entry.shape is None or entry.dtype is None:
        return None
    if entry.shape == tuple(param.shape):
        return torch.zeros_like(param, dtype=entry.dtype, requires_grad=False)
    return torch.zeros(entry.shape, dtype=entry.dtype)


def _nested(flat: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The state of one parameter, whose keys in ``flat`` all begin with ``prefix``."""
    state: dict[str, Any] = {}
    for key, value in flat.items():
        *outer, name = key.removeprefix(prefix).split(".")
        place = state
        for part in outer:
            place = place.setdefault(part, {})
        place[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return state


def _flatten(prefix: str, nested: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in nested.items():
        key = f"{prefix}.{name}"
        if not isinstance(value, torch.Tensor) and isinstance(value, Mapping):
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
        # All parameters of a group share its entries, so the first one speaks for all; one that
        # was frozen when the state was saved has none.
        speaker = (_with_settings(group, flat) or fqns[first : first + 1])[0]
        entries = {
            key: f"param_groups.{speaker}.{key}" for key in group if key not in _IDENTITY_KEYS
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
