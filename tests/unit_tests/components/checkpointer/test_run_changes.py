from typing import Any

import pytest
from torchtitan.components.checkpointer.integrity.manifest import head_of, RunDescription
from torchtitan.components.checkpointer.run_changes import changes, told

THEN: dict[str, Any] = {
    "dump_folder": "/a",
    "training": {"steps": 100, "gc_freq": 50, "dtype": "float32"},
    "optimizer": {
        "param_groups": [
            {
                "pattern": ".*",
                "optimizer_kwargs": {"lr": 8e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
            }
        ],
        "optimizer_factory_kwargs_by_name": {"AdamW": {"eps": 1e-8}},
    },
    "lr_scheduler": {"warmup_steps": 200, "decay_type": "linear"},
    "checkpoint": {"interval": 500, "load_step": -1},
    "metrics": {"log_freq": 10},
    "debug": {"seed": None, "print_config": False},
}


def now(**changed: Any) -> dict[str, Any]:
    """The settings with some changed, by their dotted names with "__" for each dot."""

    def copy(value: Any, prefix: str) -> Any:
        if isinstance(value, dict):
            return {key: copy(part, f"{prefix}{key}__") for key, part in value.items()}
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return [copy(part, f"{prefix}{index}__") for index, part in enumerate(value)]
        return changed.get(prefix.removesuffix("__"), value)

    return copy(THEN, "")


GROUP = "optimizer__param_groups__0__"


def test_equal_settings_are_no_change_whatever_their_type_in_memory() -> None:
    same = now(**{f"{GROUP}optimizer_kwargs__betas": (0.9, 0.95)})
    assert changes(THEN, same) == []


def test_a_function_is_the_same_wherever_it_lies_in_memory() -> None:
    def settings(std: float, address: str) -> dict[str, Any]:
        init = f"functools.partial(<function normal_ at {address}>, std={std})"
        return THEN | {"model": {"init": init}}

    then = settings(0.5, "0x7fcf05b685e0")
    assert changes(then, settings(0.5, "0x7f06e05705e0")) == []
    assert len(changes(then, settings(0.25, "0x7fcf05b685e0"))) == 1
    head = head_of(1, "full", "dcp", 1, RunDescription(then))
    assert head.config is not None and "0x" not in head.config["model"]["init"]


@pytest.mark.parametrize(
    "noise",
    [
        {"dump_folder": "/b"},
        {"checkpoint__interval": 5, "checkpoint__load_step": 10},
        {"metrics__log_freq": 1},
        {"training__gc_freq": 1, "debug__print_config": True},
    ],
)
def test_what_cannot_change_the_training_is_not_compared(noise: dict[str, Any]) -> None:
    assert changes(THEN, now(**noise)) == []


def test_a_change_is_told_with_its_name_both_values_and_who_wins() -> None:
    after = now(
        **{
            "training__steps": 200,
            f"{GROUP}optimizer_kwargs__lr": 1e-4,
            f"{GROUP}optimizer_kwargs__weight_decay": 0.0,
            "lr_scheduler__warmup_steps": 10,
            "debug__seed": 3,
        }
    )
    rate = "the rate in the checkpoint holds for the first step, then the new one"
    optimizer = (
        "the value in the checkpoint holds; to take the new one leave out the optimizer's state once, "
        "with --checkpoint.exclude_from_loading optimizer,lr_scheduler"
    )
    assert told(changes(THEN, after), "/run/step-5").splitlines() == [
        "Settings that differ from those of /run/step-5 (then -> now):",
        "    training.steps: 100 -> 200",
        f"    optimizer.param_groups.0.optimizer_kwargs.lr: 0.0008 -> 0.0001  ({rate})",
        f"    optimizer.param_groups.0.optimizer_kwargs.weight_decay: 0.1 -> 0.0  ({optimizer})",
        f"    lr_scheduler.warmup_steps: 200 -> 10  ({rate})",
        "    debug.seed: null -> 3  (the random number generators in the checkpoint go on)",
    ]


def test_what_is_left_out_of_the_load_does_not_win() -> None:
    after = now(**{f"{GROUP}optimizer_kwargs__lr": 1e-4, "debug__seed": 3})
    left_out = ["optimizer", "lr_scheduler", "rank_state"]
    assert [change.holds for change in changes(THEN, after, excluded=left_out)] == ["", ""]


def test_a_setting_that_only_one_of_them_has_is_told_and_a_long_value_is_cut() -> None:
    before = {"old": 1, "same": "x"}
    found = changes(before, {"same": "x", "new": "y" * 500})
    assert [(change.name, change.then, change.now[:5]) for change in found] == [
        ("new", "not there", '"yyyy'),
        ("old", "1", "not t"),
    ]
    assert max(map(len, told(found, "/p").splitlines())) < 120
