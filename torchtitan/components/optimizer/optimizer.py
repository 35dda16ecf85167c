"""Decide which optimizer updates which parameter, and make many optimizers look like one.

Parameters go to groups by regular expressions on their names, first match wins; each optimizer name
gets one torch optimizer per model part, with all of its groups. Nothing may be left over: a
parameter that no optimizer updates would be a silent hole in the training.

    model parts -> param groups (patterns) -> one optimizer per name and part
                                                      |
    trainer: zero_grad, step     checkpointer: state_dict, load_state_dict (flat, by name, merged)
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Adam, AdamW, Optimizer

from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer.checks import (
    assign,
    coverage_problems,
    learning_rate_problem,
    no_bfloat16_moments,
    settings_problem,
    takes_nothing,
    unused_names,
)
from torchtitan.components.optimizer.utils import (
    flat_optim_state_later,
    flat_optim_template,
    get_flat_optim_state_dict,
    init_optim_state,
    load_flat_optim_state_dict,
    reset_step_counts,
    SavedEntry,
)
from torchtitan.config import Configurable
from torchtitan.config.violations import reject
from torchtitan.tools.logging import logger

__all__ = ["OptimizersContainer", "ParamGroupConfig", "default_adamw"]

T = TypeVar("T", bound=Optimizer)

_FACTORIES: dict[str, type[Optimizer]] = {"Adam": Adam, "AdamW": AdamW}

_ImplKwargs = dict[str, bool]
_GroupsByName = dict[str, list[dict[str, Any]]]
_PatternsByName = dict[str, list[str]]


@dataclass(kw_only=True, slots=True)
class ParamGroupConfig:
    """Parameters that share an optimizer and its settings."""

    pattern: str
    """Regular expression, searched anywhere in a parameter's name; of several groups the first that
    matches takes the parameter."""

    optimizer_name: str
    """Which optimizer updates the group: "Adam" or "AdamW"."""

    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword settings of the group as torch's optimizer names them (lr, betas, ...); empty keeps
    torch's defaults."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            reject(
                f"optimizer.param_groups: the pattern {self.pattern!r} is not a regular expression "
                f"({error}). Escape special characters, or use '.*' for every parameter."
            )
        if problem := learning_rate_problem(self.optimizer_kwargs):
            reject(f"optimizer.param_groups: in the group with pattern {self.pattern!r} {problem}.")


class OptimizersContainer(Optimizer, Stateful, Configurable, Generic[T]):
    """All optimizers of all model parts behind the interface of one.

    It is a torch ``Optimizer`` itself, so that hooks registered on it run once around the ``step``
    of them all. ``optimizers`` holds the inner ones, in model part order.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        param_groups: list[ParamGroupConfig] = field(default_factory=list)
        """Groups in order of precedence; together they must take every trainable parameter."""

        implementation: Literal["for-loop", "foreach", "fused", "fused_opt_states_bf16"] = "fused"
        """How torch runs the update: one fused kernel, batched operations (foreach) or one parameter
        after the other (for-loop). fused_opt_states_bf16 is fused with both moments kept in bfloat16,
        in memory and in checkpoints; float32 parameters need an accelerator for it."""

        optimizer_factory_kwargs_by_name: dict[str, dict[str, Any]] = field(default_factory=dict)
        """Extra keyword arguments for the constructor of each optimizer, by its name; they hold for
        the optimizer as a whole, not for one group."""

        def check(self, *, model: nn.Module, device_type: str) -> list[str]:
            """What keeps these optimizers from updating ``model``, one message each.

            ``model`` may be on the meta device; ``device_type`` is where its parameters will be.
            """
            owner: Any = self._owner
            names_used = {group.optimizer_name for group in self.param_groups}
            trainable = [item for item in model.named_parameters() if item[1].requires_grad]
            found = [
                problem
                for index, group in enumerate(self.param_groups)
                if (problem := self._group_problem(owner, index, group))
            ]
            if unused := unused_names(self.optimizer_factory_kwargs_by_name, names_used):
                found.append(unused)
            try:
                patterns = [group.pattern for group in self.param_groups]
                found += coverage_problems([name for name, _ in trainable], patterns)
            except re.error:
                pass  # rejected by the group itself
            if self.implementation == "fused_opt_states_bf16" and device_type == "cpu":
                others = [fqn for fqn, param in trainable if param.dtype != torch.bfloat16]
                if others:
                    found.append(no_bfloat16_moments(others))
            return found

        def _group_problem(self, owner: Any, index: int, group: ParamGroupConfig) -> str | None:
            name = group.optimizer_name
            settings = {
                **self.optimizer_factory_kwargs_by_name.get(name, {}),
                **group.optimizer_kwargs,
            }
            if learning_rate_problem(group.optimizer_kwargs):
                return None  # rejected by the group itself
            try:
                factory = owner._resolve_optimizer_factory(name)
            except NotImplementedError as error:
                problem: str | None = str(error).removesuffix(".")
            else:
                problem = learning_rate_problem(settings) or settings_problem(
                    factory, settings, owner._build_impl_kwargs(self)
                )
            if problem is None:
                return None
            return f"optimizer.param_groups.{index} ({name}, pattern {group.pattern!r}): {problem}."

    optimizers: list[T]
    model_parts: list[nn.Module]

    def __init__(self, config: Config, *, model_parts: Sequence[nn.Module]) -> None:
        self.optimizers = []
        self.model_parts = list(model_parts)
        impl_kwargs = self._build_impl_kwargs(config)
        names_used: set[str] = set()
        for part_index, model in enumerate(self.model_parts):
            groups_by_name, patterns_by_name = self._build_param_groups(
                model, config.param_groups, impl_kwargs
            )
            for name, groups in groups_by_name.items():
                _log_groups(part_index, name, groups, patterns_by_name[name])
                factory = self._resolve_optimizer_factory(name)
                kwargs = config.optimizer_factory_kwargs_by_name.get(name, {})
                self.optimizers.append(factory(groups, **kwargs))
                names_used.add(name)
        if unused := unused_names(config.optimizer_factory_kwargs_by_name, names_used):
            raise ValueError(unused)
        if config.implementation == "fused_opt_states_bf16":
            for optimizer in self.optimizers:
                _keep_moments_in_bfloat16(optimizer)
        self._validate_coverage()
        self._post_init([p for o in self.optimizers for g in o.param_groups for p in g["params"]])

    @staticmethod
    def _build_impl_kwargs(config: Config) -> _ImplKwargs:
        """The group entries by which torch chooses its implementation."""
        known = ("for-loop", "foreach", "fused", "fused_opt_states_bf16")
        if config.implementation not in known:
            raise AssertionError(
                f"optimizer.implementation is {config.implementation!r}; choose one of {list(known)}."
            )
        return {
            "fused": config.implementation.startswith("fused"),
            "foreach": config.implementation == "foreach",
        }

    @staticmethod
    def _build_param_groups(
        model: nn.Module, param_group_configs: Sequence[ParamGroupConfig], impl_kwargs: _ImplKwargs
    ) -> tuple[_GroupsByName, _PatternsByName]:
        """Torch param groups by optimizer name, and beside them the pattern behind each group.

        Raises ``ValueError`` for a group that takes no parameter.
        """
        unclaimed = {name: p for name, p in model.named_parameters() if p.requires_grad}
        groups_by_name: _GroupsByName = {}
        # Patterns are kept apart: every entry of a group would end up in checkpoints.
        patterns_by_name: _PatternsByName = {}
        taken, _ = assign(list(unclaimed), [config.pattern for config in param_group_configs])
        for config, names in zip(param_group_configs, taken, strict=True):
            if not names:
                raise ValueError(takes_nothing(config.pattern, list(unclaimed)))
            group = {
                "params": [unclaimed.pop(name) for name in names],
                "param_names": [canonical_fqn(name) for name in names],
                **impl_kwargs,
                **config.optimizer_kwargs,
            }
            groups_by_name.setdefault(config.optimizer_name, []).append(group)
            patterns_by_name.setdefault(config.optimizer_name, []).append(config.pattern)
        return groups_by_name, patterns_by_name

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> type[Any]:
        if name not in _FACTORIES:
            raise NotImplementedError(
                f"Optimizer {name} not added. Set optimizer_name to one of {sorted(_FACTORIES)}."
            )
        return _FACTORIES[name]

    def _validate_coverage(self) -> None:
        taken = Counter(p for o in self.optimizers for g in o.param_groups for p in g["params"])
        trainable = {
            name if len(self.model_parts) == 1 else f"part {index}: {name}": param
            for index, model in enumerate(self.model_parts)
            for name, param in model.named_parameters()
            if param.requires_grad
        }
        without = sorted(name for name, param in trainable.items() if taken[param] == 0)
        doubled = sorted(name for name, param in trainable.items() if taken[param] > 1)
        if without or doubled:
            raise AssertionError(
                "every trainable parameter must be in exactly one optimizer; in none: "
                f"{without or 'no parameter'}; in several: {doubled or 'no parameter'}. Add a last "
                "param group with the pattern '.*', and give each model part its own parameters."
            )

    def _post_init(self, all_params: list[nn.Parameter]) -> None:
        # Last, and with all parameters: from here on step hooks can be registered on the container.
        Optimizer.__init__(self, all_params, {})

    def __len__(self) -> int:
        return len(self.optimizers)

    def __iter__(self) -> Iterator[T]:
        yield from self.optimizers

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient, or fill it with zeros when ``set_to_none`` is False."""
        for inner in self:
            inner.zero_grad(set_to_none=set_to_none)

    # Narrower than torch on purpose: a loss cannot come from several optimizers.
    def step(self, closure: None = None) -> None:  # pyrefly: ignore[bad-override]
        """Update every parameter once."""
        assert closure is None, "the container steps several optimizers: a closure cannot serve all"
        for inner in self:
            inner.step()

    def state_dict(self) -> dict[str, Any]:
        """The flat state of all optimizers, tensors by reference.

        An optimizer that has not stepped yet is given the state from which its first step starts.
        Raises ``ValueError`` when parameters of two model parts have one name.
        """
        return self._merged(get_flat_optim_state_dict(inner) for inner in self._initialized())

    def state_dict_later(self) -> Callable[[], dict[str, Any]]:
        """What ``state_dict`` would give now, to be put together by another thread before the next step."""
        taken = [flat_optim_state_later(inner) for inner in self._initialized()]
        return lambda: self._merged(put_together() for put_together in taken)

    def load_template(self, saved: Mapping[str, SavedEntry]) -> dict[str, Any]:
        """The flat dict to fill from a checkpoint that holds ``saved``; errors as ``state_dict``."""
        _log_frozen(self.model_parts, self.optimizers, saved)
        return self._merged(flat_optim_template(inner, saved) for inner in self._initialized())

    def _initialized(self) -> Iterator[T]:
        for inner in self:
            is_new = not inner.state
            init_optim_state(inner)
            if is_new:
                reset_step_counts(inner)
            yield inner

    @staticmethod
    def _merged(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for flat in parts:
            shared = sorted(merged.keys() & flat.keys())
            if shared:
                raise ValueError(
                    f"optimizer state is saved by parameter name, but several model parts have {shared}. "
                    "Give each parameter a name of its own."
                )
            merged.update(flat)
        return merged

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each optimizer its part of ``state_dict``; errors as ``load_flat_optim_state_dict``."""
        for inner in self:
            init_optim_state(inner)
            load_flat_optim_state_dict(inner, state_dict)

    def init_cache_state_dict(self) -> None:
        """Nothing here: for containers that keep their state dict between saves."""


def default_adamw(lr: float = 8e-4, **kwargs: Any) -> OptimizersContainer.Config:
    """One AdamW group for every parameter; ``kwargs`` override its settings."""
    settings = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **kwargs}
    everything = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=settings)
    return OptimizersContainer.Config(param_groups=[everything])


def _log_groups(
    part_index: int, name: str, groups: list[dict[str, Any]], patterns: list[str]
) -> None:
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    for group, pattern in zip(groups, patterns, strict=True):
        size = sum(param.numel() for param in group["params"])
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        logger.info(
            f"{name} for model part {part_index}, pattern {pattern!r}: "
            f"{len(group['params'])} tensors, {size:,} parameters, {settings}"
        )


def _log_frozen(
    model_parts: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    saved: Mapping[str, SavedEntry],
) -> None:
    """Say which saved state has no place here, because its parameters are frozen now."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    trained = {fqn for o in optimizers for group in o.param_groups for fqn in group["param_names"]}
    names = {canonical_fqn(name) for part in model_parts for name, _ in part.named_parameters()}
    kept = {key.removeprefix("state.").rpartition(".")[0] for key in saved if key[:6] == "state."}
    frozen = sorted((names - trained) & kept)
    if frozen:
        logger.warning(
            f"The checkpoint holds optimizer state of {len(frozen)} parameters that are frozen in "
            f"this run ({frozen[0]}, ...). It is not taken over, and later checkpoints lack it."
        )


def _keep_moments_in_bfloat16(optimizer: Optimizer) -> None:
    """Make ``optimizer`` create its moments in bfloat16 instead of the dtype of the parameters."""
    if not isinstance(optimizer, (Adam, AdamW)):
        return
    unsupported = sorted(
        fqn
        for group in optimizer.param_groups
        for fqn, param in zip(group["param_names"], group["params"], strict=True)
        if param.device.type == "cpu" and param.dtype != torch.bfloat16
    )
    if unsupported:
        raise ValueError(no_bfloat16_moments(unsupported))
    optimizer.register_step_pre_hook(_create_bfloat16_moments)


def _create_bfloat16_moments(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Step pre-hook: fill in the state before torch would create it in the parameters' dtype."""
    for group in optimizer.param_groups:
        # Where the step counter lives decides whether a step waits for the device: torch reads it
        # on the device only in these two modes.
        on_device = group["capturable"] or group["fused"]
        names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
        for param in group["params"]:
            state = optimizer.state[param] if param.grad is not None else None
            if state is None or state:
                continue
            device = param.device if on_device else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in names:
                state[name] = torch.zeros_like(
                    param, dtype=torch.bfloat16, memory_format=torch.preserve_format
                )
