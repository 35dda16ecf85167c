"""The flat optimizer state: names, exactness, and what happens to what is missing."""

from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer.utils import (
    flat_optim_state_later,
    get_flat_optim_state_dict,
    init_optim_state,
    load_flat_optim_state_dict,
)

from tests.unit_tests.components.optimizer.small import (
    bits,
    bits_of,
    config_of,
    small_model,
    train,
    wrapped_model,
)


def adamw(model: nn.Module, **kwargs) -> torch.optim.AdamW:
    names, params = zip(*model.named_parameters(), strict=True)
    group = {"params": list(params), "param_names": [canonical_fqn(name) for name in names]}
    return torch.optim.AdamW([{**group, "lr": 0.1, **kwargs}])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0._checkpoint_wrapped_module.wo.weight", "layers.0.wo.weight"),
        ("_checkpoint_wrapped_module.a._checkpoint_wrapped_module.b", "a.b"),
        ("a._checkpoint_wrapped_modules.b", "a._checkpoint_wrapped_modules.b"),
        ("weight", "weight"),
    ],
)
def test_a_name_loses_wrapper_segments_and_nothing_else(name: str, expected: str) -> None:
    assert canonical_fqn(name) == expected


def test_other_segments_are_dropped_on_request() -> None:
    assert canonical_fqn("_orig_mod.a.b", prefixes=("_orig_mod", "a")) == "b"


@pytest.mark.parametrize("implementation", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_creating_state_keeps_parameters_and_rates(implementation: dict) -> None:
    model = small_model()
    with torch.no_grad():
        model.get_parameter("0.bias").copy_(
            torch.tensor([-0.0, 0.0, 1e-45, -3e38, 1.0, 2.0, 3.0, 4.0])
        )
    before = {name: bits(param) for name, param in model.named_parameters()}
    optimizer = adamw(model, weight_decay=0.5, **implementation)
    init_optim_state(optimizer)
    assert {name: bits(param) for name, param in model.named_parameters()} == before
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(param.grad is None for param in model.parameters())
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    assert not any(state["exp_avg"].any() for state in optimizer.state.values())


def test_creating_state_keeps_a_tensor_rate_a_tensor() -> None:
    rate = torch.tensor(0.25)
    optimizer = adamw(small_model(), lr=rate, capturable=False, foreach=False)
    seen = []
    optimizer.register_step_pre_hook(lambda opt, *_: seen.append(opt.param_groups[0]["lr"].clone()))
    init_optim_state(optimizer)
    assert seen == [torch.tensor(0.0)]
    assert optimizer.param_groups[0]["lr"] is rate


def test_creating_state_leaves_existing_state_and_gradients_alone() -> None:
    model = small_model()
    optimizer = adamw(model)
    step(model, optimizer)
    before = bits_of(get_flat_optim_state_dict(optimizer))
    init_optim_state(optimizer)
    assert bits_of(get_flat_optim_state_dict(optimizer)) == before

    fresh_model = small_model()
    fresh = adamw(fresh_model)
    fresh_model(torch.randn(3, 4)).sum().backward()
    gradient = fresh_model[0].weight.grad
    init_optim_state(fresh)
    assert not fresh.state and fresh_model[0].weight.grad is gradient


def test_keys_name_every_parameter_without_wrappers() -> None:
    model = wrapped_model()
    optimizer = adamw(model)
    init_optim_state(optimizer)
    flat = get_flat_optim_state_dict(optimizer)
    fqns = [canonical_fqn(name) for name, _ in model.named_parameters()]
    assert fqns[0] == "0.weight"
    states = {key for key in flat if key.startswith("state.")}
    assert states == {f"state.{f}.{n}" for f in fqns for n in ("step", "exp_avg", "exp_avg_sq")}
    group_keys = set(optimizer.param_groups[0]) - {"params", "param_names"}
    groups = {key for key in flat if key.startswith("param_groups.")}
    assert groups == {f"param_groups.{f}.{key}" for f in fqns for key in group_keys}
    assert flat["param_groups.2.bias.betas"] == (0.9, 0.999)


def test_flat_state_holds_the_live_tensors() -> None:
    optimizer = adamw(small_model())
    init_optim_state(optimizer)
    flat = get_flat_optim_state_dict(optimizer)
    live = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert flat["state.0.weight.exp_avg"] is live["exp_avg"]


def test_state_moves_bit_for_bit_into_a_second_model_and_shares_nothing() -> None:
    model, second_model = small_model(), wrapped_model(seed=1)
    optimizer, second = adamw(model, amsgrad=True), adamw(second_model, lr=0.7, amsgrad=True)
    for _ in range(3):
        step(model, optimizer)
    saved = bits_of(get_flat_optim_state_dict(optimizer))
    init_optim_state(second)
    load_flat_optim_state_dict(second, get_flat_optim_state_dict(optimizer))
    assert bits_of(get_flat_optim_state_dict(second)) == saved
    assert second.param_groups[0]["param_names"] == optimizer.param_groups[0]["param_names"]
    step(model, optimizer)
    assert bits_of(get_flat_optim_state_dict(second)) == saved


def test_loading_in_place_keeps_the_tensors_of_the_template() -> None:
    model = small_model()
    optimizer = adamw(model)
    init_optim_state(optimizer)
    template = get_flat_optim_state_dict(optimizer)
    for value in template.values():
        if isinstance(value, torch.Tensor):
            value.fill_(7.0)
    load_flat_optim_state_dict(optimizer, template)
    reread = get_flat_optim_state_dict(optimizer)
    assert all(reread[key] is template[key] for key in template if key.startswith("state."))


def test_nested_state_is_flattened_and_put_back() -> None:
    def nested() -> torch.optim.Optimizer:
        model = nn.Linear(2, 2, bias=False)
        optimizer = torch.optim.SGD([{"params": [model.weight], "param_names": ["weight"]}])
        optimizer.state[model.weight] = {"outer": {"inner": torch.ones(2, 2)}, "count": 3}
        return optimizer

    flat = get_flat_optim_state_dict(nested())
    assert {key for key in flat if key.startswith("state.")} == {
        "state.weight.outer.inner",
        "state.weight.count",
    }
    flat |= {"state.weight.outer.inner": torch.full((2, 2), 5.0), "state.weight.count": 9}
    target = nested()
    load_flat_optim_state_dict(target, flat)
    (state,) = target.state.values()
    assert state["count"] == 9 and state["outer"]["inner"].eq(5).all()


def test_absent_state_is_skipped_and_foreign_keys_are_ignored() -> None:
    optimizer = adamw(small_model())
    init_optim_state(optimizer)
    flat = dict(get_flat_optim_state_dict(optimizer))
    flat["state.elsewhere.exp_avg"] = torch.ones(1)
    for name in ("step", "exp_avg", "exp_avg_sq"):
        del flat[f"state.0.bias.{name}"]
    load_flat_optim_state_dict(optimizer, flat)
    names = optimizer.param_groups[0]["param_names"]
    params = optimizer.param_groups[0]["params"]
    without = [n for n, p in zip(names, params, strict=True) if not optimizer.state.get(p)]
    assert without == ["0.bias"]


def test_a_missing_group_entry_is_an_error_that_names_all_of_them() -> None:
    optimizer = adamw(small_model())
    init_optim_state(optimizer)
    flat = dict(get_flat_optim_state_dict(optimizer))
    # Group entries are read from the first parameter of the group, so this one is not missed ...
    del flat["param_groups.0.bias.lr"]
    load_flat_optim_state_dict(optimizer, flat)
    # ... but these are.
    del flat["param_groups.0.weight.lr"], flat["param_groups.0.weight.betas"]
    with pytest.raises(KeyError, match="Optimizer param group key.*weight.betas.*weight.lr"):
        load_flat_optim_state_dict(optimizer, flat)


def test_state_of_another_shape_is_refused_before_anything_is_loaded() -> None:
    optimizer = adamw(small_model())
    init_optim_state(optimizer)
    before = bits_of(get_flat_optim_state_dict(optimizer))
    flat = dict(get_flat_optim_state_dict(optimizer))
    flat["state.0.weight.exp_avg"] = torch.ones(9, 4)
    flat["state.2.bias.exp_avg_sq"] = torch.ones(1)
    with pytest.raises(
        ValueError, match=r"0.weight.exp_avg.*\(9, 4\).*\(8, 4\).*2.bias.exp_avg_sq"
    ):
        load_flat_optim_state_dict(optimizer, flat)
    assert bits_of(get_flat_optim_state_dict(optimizer)) == before


def test_a_group_without_names_and_state_without_a_parameter_are_errors() -> None:
    nameless = torch.optim.AdamW(small_model().parameters())
    with pytest.raises(ValueError, match="param_names"):
        get_flat_optim_state_dict(nameless)
    optimizer = adamw(small_model())
    state: dict[Any, Any] = optimizer.state
    state["stray"] = {"step": 1}
    with pytest.raises(KeyError, match="stray"):
        get_flat_optim_state_dict(optimizer)


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(implementation: str) -> None:
    config = config_of((".*", "AdamW", {"lr": 0.1}), implementation=implementation)
    model, resumed_model = small_model(), small_model(seed=5)
    container = config.build(model_parts=[model])
    train(model, container, range(3))
    saved = {key: _copied(value) for key, value in container.state_dict().items()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, container, range(3, 6))

    resumed = config.build(model_parts=[resumed_model])
    resumed_model.load_state_dict(weights)
    resumed.load_state_dict(saved)
    assert {float(v) for k, v in resumed.state_dict().items() if k.endswith(".step")} == {3.0}
    train(resumed_model, resumed, range(3, 6))
    assert bits_of(resumed_model.state_dict()) == bits_of(model.state_dict())
    assert bits_of(resumed.state_dict()) == bits_of(container.state_dict())


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value


class SumUp(torch.optim.SGD):
    """Has other state to save than torch knows of."""

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        found["param_groups"][0]["extra"] = [1]
        return found


@pytest.mark.parametrize("kind", ["plain", "hooked", "own"])
def test_what_is_put_together_later_has_the_settings_of_now_and_the_live_tensors(kind: str) -> None:
    model = small_model()
    optimizer: torch.optim.Optimizer = adamw(model)
    if kind == "own":
        optimizer = SumUp([{**adamw(model).param_groups[0], "momentum": 0.9}])
    asked: list[str] = []
    if kind == "hooked":
        optimizer.register_state_dict_pre_hook(lambda _: asked.append("now"))
    step(model, optimizer)
    wanted = get_flat_optim_state_dict(optimizer)
    asked.clear()
    put_together = flat_optim_state_later(optimizer)
    assert asked == (["now"] if kind == "hooked" else [])
    optimizer.param_groups[0]["lr"] = 5.0
    found = put_together()
    assert list(found) == list(wanted) and found["param_groups.0.weight.lr"] == 0.1
    for name, value in wanted.items():
        same = found[name] is value if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name
    assert ("param_groups.0.weight.extra" in found) == (kind == "own")


def test_what_is_put_together_later_has_a_rate_in_a_tensor_as_it_is_now() -> None:
    model = small_model()
    optimizer = adamw(model)
    step(model, optimizer)
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    put_together = flat_optim_state_later(optimizer)
    rate.fill_(5.0)
    assert put_together()["param_groups.0.weight.lr"].item() == 0.25
