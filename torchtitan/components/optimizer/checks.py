"""Find optimizer settings that torch would refuse late or pass over in silence.

torch checks what is given to the constructor of an optimizer, but takes any entry of a param group
as it is: a misspelt setting of a group would never be read, a negative rate would be used. So the
settings of each group are tried on a constructor first, with one small parameter.

    settings -> assign (which group takes which parameter) -> group and coverage problems -> preflight
                  |-> optimizer.py builds the groups
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_NUM_EXAMPLES = 3


def assign(names: Sequence[str], patterns: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """The ``names`` that each of ``patterns`` takes, first match wins, and those that none takes."""
    left = list(names)
    taken = []
    for pattern in patterns:
        taken.append([name for name in left if re.search(pattern, name)])
        left = [name for name in left if name not in set(taken[-1])]
    return taken, left


def takes_nothing(pattern: str, left: Sequence[str]) -> str:
    """What to say of a group whose pattern matches none of the parameters ``left`` for it."""
    return (
        f"the param group with pattern {pattern!r} takes no parameter: {len(left)} trainable "
        f"parameters were left when its turn came{_examples(left)}. Correct the pattern, move the "
        "group before the one that takes its parameters, or remove it."
    )


def unused_names(kwargs_by_name: Mapping[str, Any], names_used: set[str]) -> str | None:
    """What to say of constructor settings for optimizers that no group uses; None if there are none."""
    unknown = sorted(kwargs_by_name.keys() - names_used)
    if not unknown:
        return None
    return (
        f"optimizer.optimizer_factory_kwargs_by_name has settings for {unknown}, but the param "
        f"groups use {sorted(names_used)}. Remove them, or give a group that optimizer_name."
    )


def no_bfloat16_moments(unsupported: Sequence[str]) -> str:
    """What to say of parameters that the CPU cannot update with bfloat16 moments."""
    # torch 2.13: the CPU kernel wants state and parameter in one dtype.
    return (
        "optimizer.implementation fused_opt_states_bf16 was asked for, but on the CPU torch updates "
        f"only bfloat16 parameters with bfloat16 moments; found {len(unsupported)} others, such as "
        f"{unsupported[0]}. Use implementation fused, or train on an accelerator."
    )


def learning_rate_problem(settings: Mapping[str, Any]) -> str | None:
    """What is wrong with the ``lr`` of one group; None if it has none or a usable one."""
    lr = settings.get("lr", 1.0)
    if isinstance(lr, torch.Tensor) and lr.numel() == 1:
        lr = lr.item()
    is_number = isinstance(lr, (int, float)) and not isinstance(lr, bool)
    if is_number and 0 < lr < math.inf:
        return None
    return f"lr is {lr!r}; the learning rate must be a number greater than 0"


def coverage_problems(names: Sequence[str], patterns: Sequence[str]) -> Iterator[str]:
    """Groups that take no parameter, and parameters that no group takes."""
    taken, uncovered = assign(names, patterns)
    for index, pattern in enumerate(patterns):
        if not taken[index]:
            earlier = {name for group in taken[:index] for name in group}
            yield takes_nothing(pattern, [name for name in names if name not in earlier])
    if uncovered:
        yield (
            f"no param group takes {len(uncovered)} of {len(names)} trainable parameters"
            f"{_examples(uncovered)}, which would never be updated. Add a last param group with "
            "the pattern '.*'."
        )


def settings_problem(
    factory: Callable[..., Any], settings: Mapping[str, Any], hints: Mapping[str, Any]
) -> str | None:
    """Why ``factory`` cannot make an optimizer with ``settings``.

    ``hints`` (the implementation) are tried as well where the factory has such parameters.
    """
    parameters = inspect.signature(factory).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    known = [name for name in parameters if name not in ("self", "params")]
    unknown = sorted(settings.keys() - set(known))
    if unknown and not takes_any:
        return f"unknown settings {', '.join(unknown)}; it takes {', '.join(sorted(known))}"
    tried = {name: value for name, value in hints.items() if name in known}
    try:
        factory([nn.Parameter(torch.zeros(1))], **{**tried, **settings})
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{error}; correct its settings"
    return None


def _examples(names: Sequence[str]) -> str:
    shown = sorted(names)[:_NUM_EXAMPLES]
    return f" (for example {', '.join(shown)})" if shown else ""
