"""Which optimizer takes which parameter, and the container as one optimizer."""

import logging

import pytest
import torch
from torch import nn
from torchtitan.components.optimizer import default_adamw, OptimizersContainer, ParamGroupConfig

from tests.unit_tests.components.optimizer.small import (
    bits_of,
    config_of,
    small_model,
    wrapped_model,
)

IMPL = {"fused": False, "foreach": False}


def groups_of(*groups: tuple[str, str, dict], model: nn.Module | None = None):
    config = config_of(*groups)
    return OptimizersContainer._build_param_groups(
        small_model() if model is None else model, config.param_groups, IMPL
    )


def test_the_first_matching_group_takes_a_parameter() -> None:
    groups, patterns = groups_of(
        ("bias", "AdamW", {"weight_decay": 0.0}), ("^0", "Adam", {}), (".*", "AdamW", {"lr": 0.5})
    )
    names = {name: [group["param_names"] for group in found] for name, found in groups.items()}
    assert names == {
        "AdamW": [["0.bias", "1.bias", "2.bias"], ["1.weight", "2.weight"]],
        "Adam": [["0.weight"]],
    }
    assert patterns == {"AdamW": ["bias", ".*"], "Adam": ["^0"]}


def test_a_group_holds_aligned_canonical_names_and_its_settings_win() -> None:
    model = wrapped_model()
    groups, _ = groups_of((".*", "AdamW", {"fused": True, "lr": 0.5}), model=model)
    (group,) = groups["AdamW"]
    assert list(group) == ["params", "param_names", "fused", "foreach", "lr"]
    assert group["fused"] is True and group["foreach"] is False
    assert group["param_names"][0] == "0.weight"
    assert group["params"][0] is model[0].weight


def test_patterns_see_raw_names_and_skip_frozen_parameters() -> None:
    model = wrapped_model()
    model[2].weight.requires_grad_(False)
    groups, _ = groups_of(
        ("_checkpoint_wrapped_module", "AdamW", {}), (".*", "AdamW", {}), model=model
    )
    assert [group["param_names"] for group in groups["AdamW"]] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias", "2.bias"],
    ]


def test_a_group_that_takes_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="'nothing like it' takes no parameter"):
        groups_of(("nothing like it", "AdamW", {}), (".*", "AdamW", {}))
    with pytest.raises(ValueError, match="0 trainable parameters were left"):
        groups_of((".*", "AdamW", {}), ("bias", "AdamW", {}))


def test_a_pattern_that_is_no_regular_expression_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'\*bias' is not a regular expression"):
        ParamGroupConfig(pattern="*bias", optimizer_name="AdamW")


def test_an_unknown_optimizer_or_implementation_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="Optimizer Lion not added"):
        config_of((".*", "Lion", {})).build(model_parts=[small_model()])
    with pytest.raises(AssertionError, match="sideways"):
        OptimizersContainer._build_impl_kwargs(config_of(implementation="sideways"))


@pytest.mark.parametrize(
    ("implementation", "fused", "foreach"),
    [
        ("for-loop", False, False),
        ("foreach", False, True),
        ("fused", True, False),
        ("fused_opt_states_bf16", True, False),
    ],
)
def test_the_implementation_becomes_torchs_flags(implementation, fused, foreach) -> None:
    config = config_of(implementation=implementation)
    flags = OptimizersContainer._build_impl_kwargs(config)
    assert flags == {"fused": fused, "foreach": foreach}


def test_every_trainable_parameter_needs_exactly_one_optimizer() -> None:
    with pytest.raises(AssertionError, match=r"in none: \['1.bias', '1.weight'"):
        config_of(("^[02]", "AdamW", {})).build(model_parts=[small_model()])
    model = small_model()
    with pytest.raises(AssertionError, match="in several: .*part 0: 0.bias.*part 1: 0.bias"):
        config_of((".*", "AdamW", {})).build(model_parts=[model, model])


def test_one_optimizer_per_name_and_part_in_order() -> None:
    parts = [small_model(), small_model(1)]
    container = config_of(("bias", "AdamW", {}), ("^0", "Adam", {}), (".*", "AdamW", {})).build(
        model_parts=parts
    )
    assert [type(optimizer).__name__ for optimizer in container] == ["AdamW", "Adam"] * 2
    assert len(container) == 4 and container.model_parts == parts


def test_factory_settings_reach_their_optimizer_and_must_be_used() -> None:
    config = config_of(
        (".*", "AdamW", {}), optimizer_factory_kwargs_by_name={"AdamW": {"amsgrad": True}}
    )
    (optimizer,) = config.build(model_parts=[small_model()])
    assert optimizer.param_groups[0]["amsgrad"] is True
    config.optimizer_factory_kwargs_by_name = {"Muon": {}}
    with pytest.raises(ValueError, match=r"settings for \['Muon'\]"):
        config.build(model_parts=[small_model()])


def test_each_group_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config_of(("bias", "AdamW", {}), (".*", "Adam", {})).build(model_parts=[small_model()])
    lines = [record.getMessage() for record in caplog.records if record.name == "root"]
    assert len(lines) == 2
    assert "pattern 'bias': 3 tensors, 18 parameters" in lines[0]


def test_hooks_of_the_container_fire_once_around_all_optimizers() -> None:
    model = small_model()
    container = config_of(("bias", "AdamW", {}), (".*", "Adam", {})).build(model_parts=[model])
    events: list[str] = []
    container.register_step_pre_hook(lambda *_: events.append("before"))
    container.register_step_post_hook(lambda *_: events.append("after"))
    for optimizer in container:
        optimizer.register_step_pre_hook(lambda opt, *_: events.append(type(opt).__name__))
    container.state_dict()
    assert events == ["AdamW", "Adam"]  # creating state steps the optimizers, not the container
    events.clear()
    model(torch.ones(1, 4)).sum().backward()
    container.step()
    assert events == ["before", "AdamW", "Adam", "after"]


def test_zero_grad_drops_or_zeroes() -> None:
    model = small_model()
    container = default_adamw().build(model_parts=[model])
    model(torch.ones(1, 4)).sum().backward()
    container.zero_grad(set_to_none=False)
    gradient = model.get_parameter("0.weight").grad
    assert gradient is not None and not gradient.any()
    container.zero_grad()
    assert model[0].weight.grad is None


def test_the_state_of_all_parts_is_one_dict_that_loads_back() -> None:
    parts = [nn.ModuleDict({"a": nn.Linear(4, 4)}), nn.ModuleDict({"b": nn.Linear(4, 4)})]
    config = default_adamw(lr=0.1)
    container = config.build(model_parts=parts)
    parts[1]["b"](parts[0]["a"](torch.ones(1, 4))).sum().backward()
    container.step()
    container.zero_grad()
    saved = container.state_dict()
    assert {"state.a.weight.exp_avg", "state.b.weight.exp_avg"} <= set(saved)
    assert not [key for key in saved if key.endswith(".pattern")]

    fresh = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    merged = config.build(model_parts=[fresh])
    merged.load_state_dict(saved)
    assert bits_of(merged.state_dict()) == bits_of(saved)


def test_parts_that_share_names_cannot_be_saved() -> None:
    container = default_adamw().build(model_parts=[small_model(), small_model(1)])
    with pytest.raises(ValueError, match="several model parts have .*param_groups.0.bias.amsgrad"):
        container.state_dict()


def test_a_template_taken_before_any_step_has_the_moments() -> None:
    container = default_adamw().build(model_parts=[small_model()])
    assert "state.2.bias.exp_avg_sq" in container.state_dict()
    assert container.init_cache_state_dict() is None


def test_the_default_is_one_adamw_group_that_can_be_overridden() -> None:
    (group,) = default_adamw(weight_decay=0.0, eps=1e-6).param_groups
    assert (group.pattern, group.optimizer_name) == (".*", "AdamW")
    assert group.optimizer_kwargs == {
        "lr": 8e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-6,
        "weight_decay": 0.0,
    }


def test_bfloat16_moments_are_created_saved_and_loaded_as_such() -> None:
    config = default_adamw(lr=0.1, amsgrad=True)
    config.implementation = "fused_opt_states_bf16"
    # float32 parameters need an accelerator for it; see the refusal below.
    model = small_model().bfloat16()
    container = config.build(model_parts=[model])
    assert container.state_dict()["state.0.weight.step"].dtype == torch.float32
    moments = ("exp_avg", "exp_avg_sq")
    saved = {key: value for key, value in container.state_dict().items() if key.endswith(moments)}
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}


def test_loading_keeps_moments_in_the_dtype_they_have() -> None:
    def with_bfloat16_moments() -> OptimizersContainer:
        container = default_adamw().build(model_parts=[small_model()])
        container.state_dict()
        for state in container.optimizers[0].state.values():
            state["exp_avg"] = torch.randn_like(state["exp_avg"]).bfloat16()
        return container

    source, target = with_bfloat16_moments(), with_bfloat16_moments()
    target.load_state_dict(source.state_dict())
    assert bits_of(target.state_dict()) == bits_of(source.state_dict())


def test_bfloat16_moments_of_float32_parameters_are_refused_on_the_cpu() -> None:
    config = default_adamw()
    config.implementation = "fused_opt_states_bf16"
    with pytest.raises(ValueError, match="fused_opt_states_bf16.*CPU.*0.bias"):
        config.build(model_parts=[small_model()])
