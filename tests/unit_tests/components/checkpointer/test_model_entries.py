"""What one walk through a model finds is what torch would have given."""

from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.components.checkpointer.model_entries import look_into


class Sharing(nn.Module):
    """Has one submodule under two names, tied weights, places that are empty, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(2, 2, bias=False)
        self.first = nn.Sequential(self.again, nn.BatchNorm1d(2))
        self.register_module("nobody", None)
        self.register_parameter("none", None)
        self.register_buffer("nothing", None)
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.register_buffer("count", torch.zeros(1))
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.again.weight


class Named(nn.Module):
    """Names its entries by itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"all": self.inner.state_dict()}


def test_the_entries_are_those_of_torch_in_its_order_and_the_very_tensors_of_the_model() -> None:
    model = Sharing()
    found, wanted = look_into(model), model.state_dict(keep_vars=True)
    assert list(found.entries) == list(wanted) and found.own == set(wanted)
    assert all(found.entries[name] is value for name, value in wanted.items())


@pytest.mark.parametrize("model", [Sharing(), Named(Sharing())], ids=["walked", "asked"])
def test_parameters_and_buffers_are_told_apart_whoever_names_the_entries(model: nn.Module) -> None:
    found = look_into(model)
    for seen, wanted in (
        (found.parameters, model.parameters()),
        (found.buffers, model.buffers()),
    ):
        assert {id(each) for each in seen} == {id(each) for each in wanted}


def test_of_a_part_in_which_some_module_names_its_entries_nothing_is_taken_past_it() -> None:
    model = nn.ModuleDict({"plain": nn.Linear(1, 1), "named": Named(nn.Linear(1, 1))})
    found = look_into(model)
    assert not found.own and list(found.entries) == list(model.state_dict())
    assert not found.entries["plain.weight"].requires_grad


@pytest.mark.parametrize("name", ["state_dict", "_save_to_state_dict", "get_extra_state"])
def test_a_method_that_a_module_was_given_is_asked(name: str) -> None:
    model = nn.ModuleDict({"plain": nn.Linear(1, 1), "own": nn.Linear(1, 1)})
    method = getattr(model["own"], name)
    model["own"].__dict__[name] = lambda *args, **kwargs: method(*args, **kwargs)
    assert not look_into(model).own


def test_each_hook_of_sharding_is_called_once_whatever_number_of_modules_it_was_given_to() -> None:
    calls: list[str] = []

    def to_shards(*arguments: Any) -> None:
        calls.append("in shards again")

    to_shards.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for module in model:
        module.register_state_dict_pre_hook(to_shards)
    for _ in range(2):
        assert look_into(model).own
    assert len(calls) == 2
