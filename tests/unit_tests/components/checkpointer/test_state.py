"""Storage that never moves, and never a byte written over a parameter."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _patch_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.components.checkpointer.model_entries import look_into
from torchtitan.components.checkpointer.state import (
    cast_for_export,
    flatten_states,
    ModelWrapper,
    require_known,
)


class Fused(nn.Module):
    """Saves one weight as two entries that are computed on each call."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.arange(8.0).reshape(4, 2))
        self._register_state_dict_hook(self._split)

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        both = state.pop(f"{prefix}both")
        state[f"{prefix}first"], state[f"{prefix}second"] = both[:2].clone(), both[2:].clone()


class Changing(nn.Module):
    """A module whose state dict is what the test says."""

    def __init__(self, entries: dict[str, Any]) -> None:
        super().__init__()
        self.entries = entries

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(self.entries)


def addresses(state: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: value.untyped_storage().data_ptr() for name, value in state.items()}


def test_the_same_dict_and_storage_come_back_with_the_values_of_now() -> None:
    model = nn.Linear(3, 2)
    wrapper = ModelWrapper(model)
    first = wrapper.state_dict()
    before = addresses(first)
    with torch.no_grad():
        model.weight.fill_(7.0)
    assert wrapper.state_dict() is first and addresses(first) == before
    assert first["weight"].unique().tolist() == [7.0]
    assert before["weight"] == model.weight.untyped_storage().data_ptr()


def test_computed_entries_keep_the_storage_they_had_first() -> None:
    model = Fused()
    wrapper = ModelWrapper(model)
    before = addresses(wrapper.state_dict())
    for _ in range(3):
        with torch.no_grad():
            model.both.add_(1.0)
        state = wrapper.state_dict()
        assert addresses(state) == before
        assert torch.equal(torch.cat([state["first"], state["second"]]), model.both)


@pytest.mark.parametrize(
    "value", [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(1, 2), 4]
)
def test_another_shape_dtype_or_type_replaces_the_entry(value: Any) -> None:
    module = Changing({"x": torch.zeros(2)})
    wrapper = ModelWrapper(module)
    state = wrapper.state_dict()
    module.entries["x"] = value
    assert wrapper.state_dict() is state and state["x"] is value


def test_keys_come_and_go_with_the_model() -> None:
    module = Changing({"stays": torch.zeros(1), "goes": torch.zeros(1)})
    wrapper = ModelWrapper(module)
    module.entries = {"stays": module.entries["stays"], "comes": torch.ones(1)}
    assert sorted(wrapper.state_dict()) == ["comes", "stays"]


def test_another_view_of_the_same_memory_never_overwrites_the_parameter() -> None:
    memory = torch.arange(6.0)
    module = Changing({"x": memory[:3]})
    wrapper = ModelWrapper(module)
    module.entries["x"] = memory[3:]
    assert wrapper.state_dict()["x"].tolist() == [3.0, 4.0, 5.0]
    assert memory.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    module.entries["x"] = memory[3:].as_strided((3,), (1,), 1)
    assert wrapper.state_dict()["x"].tolist() == [1.0, 2.0, 3.0]
    assert memory.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.full((2,), 1.0)), nn.Parameter(torch.full((2,), 2.0))

    def values(self) -> list[float]:
        return [*self.a.tolist(), *self.b.tolist()]


def values_of(state: dict[str, Any]) -> list[float]:
    return [*state["a"].tolist(), *state["b"].tolist()]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["stride", "dtype", "shape", "placements"])
def test_what_begins_at_the_same_address_and_is_read_in_another_way_is_another_entry(
    kind: str,
) -> None:
    weight, mesh = torch.arange(4.0).view(2, 2), init_device_mesh("cpu", (1,))
    other = {
        "stride": weight.t(),
        "dtype": weight.view(torch.int32),
        "shape": weight[:1],
        "placements": DTensor.from_local(weight, mesh, [Replicate()]),
    }[kind]
    before = DTensor.from_local(weight, mesh, [Shard(0)]) if kind == "placements" else weight
    model = Changing({"w": before})
    wrapper = ModelWrapper(model)
    model.entries = {"w": other}
    found = wrapper.state_dict()["w"]
    assert found is other or (kind == "stride" and torch.equal(found, other))
    assert weight.tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_parameters_that_trade_places_keep_their_values() -> None:
    model = Pair()
    wrapper = ModelWrapper(model)
    model.a, model.b = model.b, model.a
    assert values_of(wrapper.state_dict()) == [2.0, 2.0, 1.0, 1.0]
    assert model.values() == [2.0, 2.0, 1.0, 1.0]


def test_untying_a_weight_leaves_the_other_end_alone() -> None:
    model = Pair()
    model.b = model.a
    wrapper = ModelWrapper(model)
    assert len(set(addresses(wrapper.state_dict()).values())) == 1
    model.b = nn.Parameter(torch.full((2,), 9.0))
    assert values_of(wrapper.state_dict()) == [1.0, 1.0, 9.0, 9.0]
    assert model.values() == [1.0, 1.0, 9.0, 9.0]


def test_weights_that_moved_together_and_were_untied_later_are_kept_apart() -> None:
    model = Pair()
    model.b = model.a
    wrapper = ModelWrapper(model)
    model.a, model.b = nn.Parameter(torch.full((2,), 5.0)), nn.Parameter(torch.full((2,), 6.0))
    assert values_of(wrapper.state_dict()) == [5.0, 5.0, 6.0, 6.0]
    assert values_of(wrapper.state_dict()) == [5.0, 5.0, 6.0, 6.0]


def test_several_parts_are_one_dict_and_each_takes_back_its_own() -> None:
    parts: list[nn.Module] = [
        nn.ModuleDict({"0": nn.Linear(2, 2)}),
        nn.ModuleDict({"1": nn.Linear(3, 3)}),
    ]
    wrapper = ModelWrapper(parts)
    assert wrapper.model is parts
    assert sorted(wrapper.state_dict()) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    wrapper.load_state_dict({"1.bias": torch.full((3,), 4.0), "foreign.weight": torch.ones(1)})
    assert parts[1].get_parameter("1.bias").tolist() == [4.0, 4.0, 4.0]
    assert wrapper.state_dict()["1.bias"].tolist() == [4.0, 4.0, 4.0]


def test_loading_into_the_cached_tensors_reaches_the_model() -> None:
    model = Changing({"x": torch.zeros(2)})
    linear = nn.Linear(2, 1)
    wrapper = ModelWrapper([model, linear])
    state = wrapper.state_dict()
    state["weight"].fill_(3.0)
    wrapper.load_state_dict(state)
    assert linear.weight.tolist() == [[3.0, 3.0]]


class Mixed(nn.Module):
    """Has a weight that is trained, one that is not, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("seen", torch.ones(2))


def test_entries_are_plain_tensors_that_do_not_follow_what_the_model_is_given_instead() -> None:
    model = Mixed()
    taken = dict(ModelWrapper(model).state_dict())
    assert sorted(taken) == ["frozen", "seen", "trained"]
    for name, value in taken.items():
        live = getattr(model, name)
        assert type(value) is torch.Tensor and not value.requires_grad
        assert value is not live and value.data_ptr() == live.data_ptr()
        live.data = torch.zeros(3)
        assert value.tolist() == [1.0, 1.0]


class Hooked(nn.Module):
    """Saves its weight as numbers that another library computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_state_dict_post_hook(self._doubled)

    @staticmethod
    def _doubled(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}weight"] = torch.from_numpy(state[f"{prefix}weight"].numpy() * 2)


class Writing(nn.Module):
    """Writes its entries by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight if keep_vars else self.weight.detach() + 1


@pytest.mark.parametrize("kind", [Hooked, Writing])
def test_a_module_that_makes_its_entries_is_asked_for_them_without_a_history(
    kind: type[nn.Module],
) -> None:
    # Beside another part, which hands its own over.
    wrapper = ModelWrapper([nn.ModuleDict({"own": kind()}), nn.Linear(1, 1)])
    assert wrapper.state_dict()["own.weight"].tolist() == [2.0, 2.0]
    assert not any(value.requires_grad for value in wrapper.state_dict().values())


def test_a_model_that_was_given_another_state_dict_is_asked_as_nearly_everybody_asks() -> None:
    model = nn.Linear(2, 1)
    _patch_model_state_dict(model)
    state = ModelWrapper(model).state_dict()
    assert sorted(state) == ["bias", "weight"]
    assert not any(value.requires_grad for value in state.values())


def test_a_hook_before_the_entries_is_asked_for_them_without_a_history() -> None:
    model, kept = nn.ModuleDict({"own": nn.Linear(2, 1)}), []
    model["own"].register_state_dict_pre_hook(lambda module, prefix, keeps: kept.append(keeps))
    ModelWrapper(model).state_dict()
    assert kept and not any(kept)


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_model_gives_its_shards_and_is_not_asked_to_detach_each_of_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model(torch.ones(1, 2))
    # Whole until a backward pass, which a validation has none of; what torch hooked in changes that.
    assert not isinstance(model[0].weight, DTensor) and model[0]._state_dict_pre_hooks
    wrapper = ModelWrapper(model)
    own = look_into(model).own
    assert own == dict(model.named_parameters()).keys() == wrapper.state_dict().keys()
    for name, value in wrapper.state_dict().items():
        assert isinstance(value, DTensor) and not value.requires_grad
        live: Any = model.get_parameter(name)
        assert value is not live and value.to_local().data_ptr() == live.to_local().data_ptr()


class Remembering(nn.Module):
    """Saves something besides tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.notes = nn.Parameter(torch.ones(1)), {"seen": 3}

    def get_extra_state(self) -> dict[str, int]:
        return self.notes


def test_what_a_module_saves_besides_is_the_very_object() -> None:
    model = Remembering()
    assert ModelWrapper(model).state_dict()["_extra_state"] is model.notes


def test_buffers_that_do_not_persist_are_left_out() -> None:
    model = nn.Module()
    model.register_buffer("kept", torch.ones(1))
    model.register_buffer("dropped", torch.ones(1), persistent=False)
    assert list(ModelWrapper(model).state_dict()) == ["kept"]


def test_model_entries_lie_at_the_top_and_the_rest_under_its_key() -> None:
    model, optimizer = nn.Linear(1, 1), object()
    flat = flatten_states({"model": ModelWrapper(model), "optimizer": optimizer})
    assert set(flat) == {"weight", "bias", "optimizer"} and flat["optimizer"] is optimizer


def test_a_submodule_with_the_name_of_another_entry_is_refused_by_name() -> None:
    model = nn.ModuleDict({"optimizer": nn.Linear(1, 1), "fine": nn.Linear(1, 1)})
    with pytest.raises(ValueError, match=r"'optimizer.bias', 'optimizer.weight'.*rename"):
        flatten_states({"model": ModelWrapper(model), "optimizer": object()})


def test_an_export_casts_floating_point_entries_and_nothing_else() -> None:
    state = {
        "half": torch.ones(2, dtype=torch.float16),
        "same": torch.ones(2, dtype=torch.bfloat16),
        "count": torch.ones(2, dtype=torch.int64),
        "mask": torch.ones(2, dtype=torch.bool),
        "number": 3,
    }
    cast = cast_for_export(state, torch.bfloat16)
    assert cast["half"].dtype is torch.bfloat16 and state["half"].dtype is torch.float16
    assert all(cast[name] is state[name] for name in ("same", "count", "mask", "number"))


def test_tied_entries_are_still_tied_in_an_export() -> None:
    square = torch.arange(4.0).view(2, 2)
    state = {"head": square[:], "embedding": square[:], "turned": square.t(), "part": square[:1]}
    cast = cast_for_export(state, torch.bfloat16)
    assert cast["head"] is cast["embedding"] and cast["head"].tolist() == square.tolist()
    assert cast["turned"].tolist() == square.t().tolist() and cast["part"].tolist() == [[0.0, 1.0]]


def test_unknown_exclusions_are_all_named_beside_those_that_exist() -> None:
    known = ["model", "optimizer", "dataloader"]
    require_known(["optimizer"], known)
    with pytest.raises(ValueError, match=r"data_loader, rng not found in state_dict.*dataloader"):
        require_known(["rng", "optimizer", "data_loader"], known)
