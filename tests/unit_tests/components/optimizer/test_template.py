"""What an optimizer asks of a checkpoint: state for what had some, and none for what had none."""

import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer

from tests.unit_tests.components.optimizer.small import bits_of, config_of, small_model, train


@dataclass
class Entry:
    """One entry of an index."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None


def index_of(state: dict[str, Any]) -> dict[str, Entry]:
    return {
        key: (
            Entry(tuple(value.shape), value.dtype)
            if isinstance(value, torch.Tensor)
            else Entry(None, None)
        )
        for key, value in state.items()
    }


def adamw(model: nn.Module, **settings: Any) -> OptimizersContainer:
    return config_of((".*", "AdamW", {"lr": 0.1, **settings})).build(model_parts=[model])


def resumed(saved: dict[str, Any], container: OptimizersContainer) -> None:
    """Load as a checkpoint is: the template is filled in place, then handed back."""
    template = container.load_template(index_of(saved))
    for key, value in template.items():
        if isinstance(value, torch.Tensor):
            value.copy_(saved[key])
        else:
            template[key] = saved[key]
    container.load_state_dict(template)


def names_with_state(container: OptimizersContainer) -> list[str]:
    keys = container.state_dict()
    return sorted({key[6:].rpartition(".")[0] for key in keys if key.startswith("state.")})


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_looking_at_the_state_before_the_first_step_changes_no_bit(implementation: str) -> None:
    config = config_of((".*", "AdamW", {"lr": 0.1}), implementation=implementation)
    model, untouched = small_model(), small_model()
    container, other = (config.build(model_parts=[m]) for m in (model, untouched))
    state = container.state_dict()
    assert {float(value) for key, value in state.items() if key.endswith(".step")} == {0.0}
    train(model, container, range(2))
    train(untouched, other, range(2))
    assert bits_of(model.state_dict()) == bits_of(untouched.state_dict())
    assert bits_of(container.state_dict()) == bits_of(other.state_dict())


def test_a_run_saved_before_its_first_step_starts_from_the_same_bits() -> None:
    model, other = small_model(), small_model()
    container, second = adamw(model), adamw(other)
    resumed(container.state_dict(), second)
    train(model, container, range(2))
    train(other, second, range(2))
    assert bits_of(second.state_dict()) == bits_of(container.state_dict())


def test_what_was_frozen_while_saving_keeps_its_moments_if_it_is_frozen_again() -> None:
    model, other = small_model(), small_model(seed=3)
    container = adamw(model)
    train(model, container, range(2))
    saved = dict(container.state_dict())
    second, third = adamw(other), adamw(other)
    other.get_parameter("0.weight").requires_grad_(False)
    resumed(saved, second)
    assert bits_of(second.state_dict()) == bits_of(saved)
    third.load_template(index_of(saved))
    third.load_state_dict(saved)
    train(model, container, range(2, 3))
    assert bits_of(third.state_dict()) == bits_of(second.state_dict()), "no memory is shared"


def test_a_parameter_that_was_no_part_of_the_optimizer_follows_its_group(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, other = small_model(), small_model()
    model.get_parameter("0.weight").requires_grad_(False)
    container = adamw(model, weight_decay=0.25)
    train(model, container, range(2))
    saved = dict(container.state_dict())
    second = adamw(other, weight_decay=0.75)
    resumed(saved, second)
    assert "0.weight" not in names_with_state(second)
    (group,) = second.optimizers[0].param_groups
    assert group["weight_decay"] == 0.25 and group["param_names"][0] == "0.weight"
    train(other, second, range(2, 3))
    assert second.state_dict()["state.0.weight.step"] == 1
    assert second.state_dict()["state.0.bias.step"] == 3

    # The other way round its state has no place, and one line says so.
    third = adamw(model)
    with caplog.at_level(logging.WARNING):
        resumed(dict(second.state_dict()), third)
    assert "0.weight" not in names_with_state(third)
    (line,) = [r.getMessage() for r in caplog.records if "frozen" in r.getMessage()]
    assert "optimizer state of 1 parameters that are frozen in this run (0.weight" in line


def test_state_that_the_optimizer_needs_and_a_group_without_settings_are_asked_for() -> None:
    model, other = small_model(), small_model()
    container = adamw(model)
    train(model, container, range(1))
    index = index_of(container.state_dict())
    with_more = adamw(other, amsgrad=True).load_template(index)
    assert sorted(with_more.keys() - index.keys()) == [
        f"state.{name}.max_exp_avg_sq" for name in sorted(dict(model.named_parameters()))
    ]
    of_others = {key: entry for key, entry in index.items() if ".2." not in key}
    groups = config_of((r"^2\.", "AdamW", {"lr": 0.5}), (".*", "AdamW", {"lr": 0.1}))
    template = groups.build(model_parts=[other]).load_template(of_others)
    missing = {key.split(".")[1] for key in template.keys() - of_others.keys()}
    assert missing == {"2"} and "param_groups.2.bias.lr" in template
    assert not any(key.startswith("state.2.") for key in template)
