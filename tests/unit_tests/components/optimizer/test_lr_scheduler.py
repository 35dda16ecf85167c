"""The learning rate of every step, and its continuation after a resume."""

import logging
import warnings
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torchtitan.components.optimizer import (
    default_adamw,
    LRSchedulersContainer,
    OptimizersContainer,
)

from tests.unit_tests.components.optimizer.small import config_of, small_model, train


def schedulers_of(steps: int, *, lr: float = 1.0, **settings) -> LRSchedulersContainer:
    """Schedulers over a stand-in that has what they need of a container."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    container = MagicMock(spec=OptimizersContainer)
    container.__iter__.return_value = iter([optimizer])
    container.__len__.return_value = 1
    config = LRSchedulersContainer.Config(**settings)
    return config.build(optimizers=container, training_steps=steps)


def rates(steps: int, *, count: int | None = None, **settings) -> list[float]:
    schedulers = schedulers_of(steps, **settings)
    found = []
    for _ in range(steps if count is None else count):
        (scheduler,) = schedulers
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        schedulers.step()
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup_steps": 2}, [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ({"warmup_steps": 2, "decay_ratio": 0.0}, [0.5] + [1] * 9),
        ({"warmup_steps": 0, "decay_ratio": 0.2}, [1] * 9 + [0.5]),
        ({"warmup_steps": 0, "decay_ratio": 0.2, "min_lr_factor": 0.5}, [1] * 9 + [0.75]),
        (
            {"warmup_steps": 0, "decay_ratio": 0.4, "decay_type": "sqrt"},
            [1] * 7 + [1 - 0.25**0.5, 1 - 0.5**0.5, 1 - 0.75**0.5],
        ),
        (
            {"warmup_steps": 0, "decay_ratio": 0.2, "decay_type": "cosine"},
            [1] * 9 + [0.5],
        ),
    ],
)
def test_the_rate_of_each_of_ten_steps(settings: dict, expected: list[float]) -> None:
    assert rates(10, **settings) == pytest.approx(expected)


def test_a_warm_up_longer_than_the_schedule_is_cut_with_a_warning(caplog) -> None:
    assert rates(5, warmup_steps=9) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert "warmup_steps is 9, but the schedule has 5 steps" in caplog.text


def test_a_decay_that_does_not_fit_is_cut_with_a_warning(caplog) -> None:
    found = rates(10, warmup_steps=5, decay_ratio=0.8)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert "exceed the 10 steps" in caplog.text


def test_total_steps_wins_and_later_steps_keep_the_last_rate() -> None:
    settings = {"warmup_steps": 0, "total_steps": 4, "min_lr_factor": 0.25}
    for decay_type in ("linear", "sqrt", "cosine"):
        found = rates(10, decay_type=decay_type, **settings)
        assert found[4:] == pytest.approx([0.25] * 6)
        assert found[3] > 0.25


@pytest.mark.parametrize(
    "settings",
    [
        {"decay_type": "stairs"},
        {"warmup_steps": -1},
        {"total_steps": 0},
        {"decay_ratio": 1.5},
        {"min_lr_factor": -0.1},
    ],
)
def test_an_impossible_setting_is_named(settings: dict) -> None:
    with pytest.raises(ValueError, match=f"lr_scheduler.{next(iter(settings))}"):
        LRSchedulersContainer.Config(**settings)


def test_no_optimizer_is_an_error() -> None:
    container = MagicMock(spec=OptimizersContainer)
    container.__len__.return_value = 0
    with pytest.raises(AssertionError):
        LRSchedulersContainer.Config().build(optimizers=container, training_steps=5)


def test_metrics_name_optimizers_and_number_groups() -> None:
    config = config_of(
        ("bias", "AdamW", {"lr": 0.5}), ("^0", "Adam", {"lr": 4.0}), (".*", "AdamW", {"lr": 0.25})
    )
    optimizers = config.build(model_parts=[small_model()])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=optimizers, training_steps=10
    )
    metrics = schedulers.get_metrics()
    assert metrics == {"lr/AdamW/0": 0.25, "lr/AdamW/1": 0.125, "lr/Adam": 2.0}
    assert all(type(value) is float for value in metrics.values())
    assert len(schedulers) == 2


def test_a_resumed_schedule_gives_the_rates_of_the_uninterrupted_one() -> None:
    def build():
        model = small_model()
        optimizers = default_adamw(lr=0.1).build(model_parts=[model])
        settings = LRSchedulersContainer.Config(warmup_steps=3, decay_type="cosine")
        return model, optimizers, settings.build(optimizers=optimizers, training_steps=12)

    def run(model, optimizers, schedulers, steps: range) -> list[float]:
        found = []
        for step in steps:
            found.append(optimizers.optimizers[0].param_groups[0]["lr"])
            train(model, optimizers, range(step, step + 1))
            schedulers.step()
        return found

    whole = build()
    expected = run(*whole, range(12))
    first = build()
    run(*first, range(7))
    state, optimizer_state = first[2].state_dict(), first[1].state_dict()
    assert state == {"last_epoch": 7}

    model, optimizers, schedulers = build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # In this order checkpoints restore: the scheduler first, then the optimizer's rates.
        schedulers.load_state_dict(state)
        assert optimizers.optimizers[0].param_groups[0]["lr"] == expected[0]
        optimizers.load_state_dict(optimizer_state)
        assert schedulers.get_metrics() == {"lr/AdamW": expected[7]}
        assert run(model, optimizers, schedulers, range(7, 12)) == expected[7:]
    assert schedulers.state_dict() == whole[2].state_dict()


def test_a_schedule_that_fits_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        rates(10, warmup_steps=2, decay_ratio=0.8)
    assert not caplog.records


def test_a_schedule_that_ends_at_zero_before_the_training_does_is_found() -> None:
    config = LRSchedulersContainer.Config(total_steps=10)
    assert config.check(training_steps=10) == []
    assert (
        "steps 11 to 20 (training.steps) would learn nothing" in config.check(training_steps=20)[0]
    )
    kept: dict[str, Any]
    for kept in ({"min_lr_factor": 0.1}, {"decay_ratio": 0.0}, {"total_steps": None}):
        assert replace(config, **kept).check(training_steps=20) == []
