"""A save takes a model as it is, wherever its tensors lie, and writes to nothing that the model has shown."""

from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.components.checkpointer.state import changed_by_updates_only, MODEL, ModelWrapper

from tests.unit_tests.components.checkpointer.test_state import Fused


def captured_of(wrapper: ModelWrapper) -> dict[str, Any]:
    take = wrapper.state_dict_later()
    assert take is not None
    return take()


class Swapping(nn.Module):
    """Has a weight, a buffer that is saved and one that is not, and a computed entry in one of two memories."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 1.0))
        self.register_buffer("saved", torch.full((2,), 2.0))
        self.register_buffer("unsaved", torch.full((2,), 3.0), persistent=False)
        self.by_turns = [torch.full((2,), 4.0), torch.full((2,), 5.0)]
        self.register_state_dict_post_hook(self._add)

    @staticmethod
    def _add(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        assert isinstance(module, Swapping)
        state[f"{prefix}shown"] = module.by_turns[0]


@pytest.mark.parametrize("later", [False, True])
def test_what_stood_in_for_something_else_for_a_while_is_never_written_to(later: bool) -> None:
    model, average = Swapping(), torch.full((2,), 9.0)
    wrapper = ModelWrapper([model, nn.ModuleDict({"other": nn.Linear(1, 1)})])

    def saved() -> dict[str, list[float]]:
        found = captured_of(wrapper) if later else wrapper.state_dict()
        return {name: found[name].tolist() for name in ("weight", "saved", "shown")}

    first = {"weight": [1.0] * 2, "saved": [2.0] * 2, "shown": [4.0] * 2}
    live, parameter = model.weight.data, model.weight
    for _ in range(2):
        assert saved() == first
        model.weight.data = average
        model.saved, model.unsaved = model.unsaved, model.saved
        model.by_turns.reverse()
        assert saved() == {"weight": [9.0] * 2, "saved": [3.0] * 2, "shown": [5.0] * 2}
        model.weight.data = live
        model.weight = nn.Parameter(average)
        assert saved()["weight"] == [9.0] * 2
        model.weight = parameter
        model.saved, model.unsaved = model.unsaved, model.saved
        model.by_turns.reverse()
    assert saved() == first
    assert model.unsaved.tolist() == [3.0] * 2 and average.tolist() == [9.0] * 2
    assert [each.tolist() for each in model.by_turns] == [[4.0] * 2, [5.0] * 2]


def test_a_buffer_without_a_memory_that_is_not_saved_is_no_obstacle() -> None:
    model = Fused()
    model.register_buffer("mask", torch.eye(2).to_sparse(), persistent=False)
    wrapper = ModelWrapper(model)
    with torch.no_grad():
        model.both.add_(1.0)
    for found in (wrapper.state_dict(), captured_of(wrapper)):
        assert found["first"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert changed_by_updates_only({MODEL: wrapper})(MODEL, model.both)


@pytest.mark.parametrize("has_hook", [False, True])
def test_a_parameter_that_moved_is_taken_where_it_is_and_the_old_memory_is_left_alone(
    has_hook: bool,
) -> None:
    model = nn.Linear(2, 2, bias=False)
    if has_hook:
        model.register_state_dict_post_hook(lambda *arguments: None)
    wrapper, old = ModelWrapper(model), model.weight.data
    before = old.tolist()
    model.weight.data = torch.full((2, 2), 5.0)
    for _ in range(2):
        assert wrapper.state_dict()["weight"].data_ptr() == model.weight.data_ptr()
    assert old.tolist() == before
