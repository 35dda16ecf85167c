"""How a Module is built and who fills its parameters and buffers."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtitan.protocols import BaseModel, Module
from torchtitan.protocols.module import ModuleDict, ModuleList, ParamInit, Sequential


class Scale(Module):
    """One weight, one bias, and nothing that says how to fill them but param_init."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        size: int = 3

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.size))
        self.bias = nn.Parameter(torch.empty(config.size))


class Record(Module):
    """Notes when it is filled, and where its buffer is to be."""

    def __init__(self, name: str, log: list[str], *children: nn.Module) -> None:
        super().__init__()
        self.name, self.log = name, log
        for i, child in enumerate(children):
            self.add_module(str(i), child)

    def _init_self_parameters(self) -> None:
        assert not torch.is_grad_enabled()
        self.log.append(self.name)

    def _init_self_buffers(self, *, buffer_device=None) -> None:
        self.log.append(f"{self.name} on {buffer_device}")


class Wrapped(nn.Embedding, Module):
    pass


class Model(BaseModel):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        def update_from_config(self, *, config, **kwargs) -> None:
            pass

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            return 0, 0

    def __init__(self, config: Config) -> None:
        super().__init__()


def test_module_adds_no_constructor_and_torch_classes_construct_as_ever() -> None:
    assert "__init__" not in Module.__dict__
    wrapped = Wrapped(4, 2)
    assert list(wrapped.state_dict()) == ["weight"]
    assert wrapped.weight.shape == (4, 2)


def test_build_hands_over_the_same_param_init() -> None:
    init: ParamInit = {"weight": nn.init.ones_, "bias": nn.init.zeros_}
    assert Scale.Config(param_init=init).build()._param_init is init
    assert Scale.Config().build()._param_init is None
    assert Wrapped(4, 2)._param_init is None


def test_param_init_fills_each_parameter_by_name() -> None:
    module = Scale.Config(param_init={"weight": nn.init.ones_, "bias": nn.init.zeros_}).build()
    module.init_states()
    assert module.weight.tolist() == [1, 1, 1] and module.bias.tolist() == [0, 0, 0]
    assert module.weight.requires_grad


def test_a_parameter_that_param_init_does_not_know_is_refused_by_name() -> None:
    module = Scale.Config(param_init={"weight": nn.init.ones_}).build()
    with pytest.raises(ValueError, match=r"Scale: its parameters \['bias'\]"):
        module.init_states()


def test_without_param_init_reset_parameters_is_used() -> None:
    module = Wrapped(4, 2)
    torch.manual_seed(0)
    module.init_states()
    torch.manual_seed(0)
    assert torch.equal(module.weight, nn.Embedding(4, 2).weight)


def test_parameters_that_nothing_fills_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Scale.*\['bias', 'weight'\].*neither param_init nor reset"
    ):
        Scale.Config().build().init_states()


def test_children_come_before_their_parent_through_any_wrapper() -> None:
    log: list[str] = []
    inner = Record("inner", log)
    model = Record("root", log, nn.Sequential(checkpoint_wrapper(Record("block", log, inner))))
    model.init_states(buffer_device="cpu")
    assert log == ["inner", "inner on cpu", "block", "block on cpu", "root", "root on cpu"]


def test_containers_are_modules_with_the_keys_of_torchs() -> None:
    layer = {"0": Wrapped(2, 2)}
    for container in (ModuleDict(layer), ModuleList(layer.values()), Sequential(layer["0"])):
        assert isinstance(container, Module)
        assert list(container.state_dict()) == ["0.weight"]


def test_init_weights_is_init_states() -> None:
    log: list[str] = []
    model = Model.Config().build()
    model.part = Record("part", log)
    model.init_weights(buffer_device="meta")
    assert log == ["part", "part on meta"]


def test_a_model_of_foreign_modules_is_refused_with_their_names() -> None:
    model = Model.Config().build()
    model.fine = Wrapped(2, 2)
    model.verify_module_protocol()
    model.second = nn.Linear(2, 2)
    model.first = nn.Dropout()
    with pytest.raises(RuntimeError, match=r"first \(Dropout\), second \(Linear\)") as error:
        model.verify_module_protocol()
    assert "fine" not in str(error.value)


def test_a_model_config_must_answer_the_trainers_questions() -> None:
    config_class: Any = BaseModel.Config
    with pytest.raises(TypeError, match="abstract"):
        config_class()
