"""A state that is taken in little time is the state as it was, whatever training does up to the next update."""

import random
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torchtitan.components.checkpointer import TRAIN_STATE
from torchtitan.components.checkpointer.pinned.stager import SharedMemoryStager
from torchtitan.components.checkpointer.rank_state import RankState
from torchtitan.components.checkpointer.state import (
    COPIED_AT_ONCE_BYTES,
    MODEL,
    ModelWrapper,
    OPTIMIZER,
    RANK_STATE,
)
from torchtitan.components.checkpointer.tc.capture import capture, could_capture
from torchtitan.components.checkpointer.tc.payload import Items, items_of
from torchtitan.components.optimizer import OptimizersContainer

from tests.unit_tests.components.checkpointer.runs import build_run, Counter, Run

LARGE = COPIED_AT_ONCE_BYTES // 4 + 1
"""Elements that are more than training copies a second time."""


class Moment:
    """What the stager of a CPU says of now."""

    def wait(self) -> None:
        pass


class Stager:
    def moment(self) -> Moment:
        return Moment()


def captured(states: dict[str, Any]) -> Any:
    return capture(states, cast(SharedMemoryStager, Stager()))


def rank_state() -> RankState:
    return RankState(rank=0, world_size=1, layout="fsdp=1", device=torch.device("cpu"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = build_run(tmp_path)
    found.train(2, save=False)
    return found


def states_of(run: Run, **others: Any) -> dict[str, Any]:
    states = {MODEL: ModelWrapper(run.model), OPTIMIZER: run.optimizers}
    states |= {"lr_scheduler": run.lr_schedulers, "dataloader": run.dataloader}
    return states | {TRAIN_STATE: run.progress, RANK_STATE: rank_state(), **others}


def values(items: Items) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list):
            return [plain(each) for each in value]
        return value.tolist() if isinstance(value, torch.Tensor) else value

    return {"values": plain(items.values), "digests": items.digests}


def go_on(run: Run) -> None:
    """All that may happen before the parameters are updated."""
    run.model(torch.arange(10)).backward()
    run.lr_schedulers.step()
    run.dataloader.values["row"] += 5
    run.progress.values["step"] += 1
    random.random()
    np.random.random()
    torch.rand(1)


def test_it_is_what_a_save_at_once_would_have_found(run: Run) -> None:
    states = states_of(run, extra=Counter(table=torch.ones(3), nested=[{"a": torch.ones(2)}, 1]))
    wanted = values(items_of(states))
    taken = captured(states)
    go_on(run)
    states["extra"].values["table"].zero_()
    states["extra"].values["nested"][0]["a"].zero_()
    found = taken.items()
    assert values(found) == wanted and list(found.values) == list(states)
    assert values(items_of(states)) != wanted
    at_once = items_of(states).tensors
    assert found.tensors is not None and at_once is not None
    assert found.tensors.keys() == at_once.keys()


def test_weights_and_moments_are_the_very_tensors_of_each_save(run: Run) -> None:
    states = states_of(run)
    first, second = captured(states).items(), captured(states).items()
    assert first.tensors is not None and second.tensors is not None
    assert first.tensors.keys() == second.tensors.keys()
    for name, tensor in first.tensors.items():
        # To be laid out as before is seen by that; a copy lies where that of the last save lay.
        assert second.tensors[name] is tensor
    live = run.optimizers.state_dict()
    for name, tensor in live.items():
        assert first.values[OPTIMIZER][name] is tensor
    assert first.values[MODEL]["seen"].data_ptr() != run.model.seen.data_ptr()


class Aliased(nn.Module):
    """Trains what it also keeps as a buffer; has a buffer under two names, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.arange(8.0)
        self.weight = nn.Parameter(memory[2:4])
        self.other = nn.Parameter(torch.ones(2))
        self.register_buffer("table", memory, persistent=False)
        self.register_buffer("one", torch.ones(2))
        self.register_buffer("two", self.one)


def test_a_weight_in_the_memory_of_a_buffer_changes_with_it_and_is_copied() -> None:
    model = Aliased()
    wrapper = ModelWrapper(model)
    put_together = wrapper.state_dict_later()
    assert put_together is not None
    model.table.zero_()
    model.one.zero_()
    found = put_together()
    assert list(found) == list(model.state_dict())
    assert found["weight"].tolist() == [2.0, 3.0] and found["one"].tolist() == [1.0, 1.0]
    assert found["one"] is found["two"] and found["other"].data_ptr() == model.other.data_ptr()
    # Where the two are one no more, neither is written into the copy of the other.
    model.two = torch.full((2,), 5.0)
    again = wrapper.state_dict_later()
    assert again is not None and again()["one"].tolist() == [0.0, 0.0]
    assert again()["two"].tolist() == [5.0, 5.0]


def test_weights_in_other_memory_than_at_the_last_save_are_those_of_now_at_every_later_one() -> (
    None
):
    model = nn.Linear(2, 2, bias=False)
    wrapper = ModelWrapper(model)
    for number in range(3):
        if number == 1:
            model.weight = nn.Parameter(torch.empty(2, 2))
        with torch.no_grad():
            model.weight.fill_(number)
        put_together = wrapper.state_dict_later()
        assert put_together is not None
        assert put_together()["weight"].unique().tolist() == [number]


class Computed(nn.Module):
    """Saves one weight in two parts, its own count, and a tensor that nobody knows of."""

    def __init__(self, asked: list[str] | None = None) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.arange(4.0))
        self.register_buffer("seen", torch.zeros(1))
        self.count = [0]
        self.hidden = torch.zeros(2)
        self.loss = self.both.sum() * 0
        self.asked = [] if asked is None else asked
        self.register_state_dict_post_hook(self._split)

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "loss": self.loss}

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        assert isinstance(module, Computed)
        module.asked.append("model")
        both = state.pop(f"{prefix}both")
        state |= {f"{prefix}first": both[:2].clone(), f"{prefix}second": both[2:]}
        state[f"{prefix}hidden"] = module.hidden

    def forward(self) -> None:
        self.seen += 1
        self.hidden += 1
        self.count[0] += 1


def test_what_a_model_computes_is_as_it_was_whatever_a_forward_pass_changes() -> None:
    model = Computed()
    wrapper, one_by_one = ModelWrapper(model), []
    for number in range(3):
        wanted = {
            "seen": [number],
            "first": [number, number + 1],
            "second": [number + 2, number + 3],
            "hidden": [number, number],
            "_extra_state": {"count": [number], "loss": torch.tensor(0.0)},
        }
        put_together = wrapper.state_dict_later()
        assert put_together is not None
        model()
        found = put_together()
        one_by_one.append(found)
        assert found["second"].data_ptr() == model.both[2:].data_ptr()
        assert found["first"] is wrapper.cached_state_dict["first"]  # and no second copy
        assert {
            key: value.tolist() if isinstance(value, torch.Tensor) else value
            for key, value in found.items()
        } == wanted
        with torch.no_grad():
            model.both.add_(1)
    # By the memory that was copied from, what was staged is found again.
    for name in ("first", "hidden", "seen"):
        assert one_by_one[1][name] is one_by_one[2][name], name


class Noting(nn.Module):
    """Saves nothing but what a hook adds, if it does."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = {"note": "text"}
        self.register_state_dict_post_hook(self._add)

    @staticmethod
    def _add(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        assert isinstance(module, Noting)
        state |= module.notes


def test_an_entry_that_is_no_tensor_goes_when_the_model_has_it_no_more() -> None:
    model = Noting()
    wrapper = ModelWrapper([nn.Linear(1, 1), model])
    for notes in ({"note": "text"}, {"note": "text"}, {}, {"other": "text"}):
        model.notes = notes
        put_together = wrapper.state_dict_later()
        assert put_together is not None
        assert put_together().keys() == {"weight", "bias"} | notes.keys()


@pytest.mark.parametrize("key", [MODEL, "extra"])
def test_training_waits_where_others_may_still_ask_this_rank_for_a_model_that_failed(
    key: str,
) -> None:
    states = {MODEL: ModelWrapper(Computed()), "extra": Counter(it=torch.zeros(1))}
    assert not captured(states).must_be_waited_for
    failing = {MODEL: (ModelWrapper, "state_dict_later"), "extra": (Counter, "state_dict")}[key]
    with patch.object(*failing, side_effect=OSError("gone")):
        taken = captured(states)
    assert taken.must_be_waited_for is (key == MODEL)
    with pytest.raises(RuntimeError, match=f"the state {key} cannot be saved: OSError: gone"):
        taken.items()


def test_a_model_is_asked_once_for_a_save_and_after_all_else_that_could_give_it_up() -> None:
    asked: list[str] = []
    model = ModelWrapper([nn.Linear(1, 1), Computed(asked)])
    asked.clear()
    states = {MODEL: model, "extra": Counter(it=torch.zeros(1))}
    assert could_capture(states) and asked == []
    assert captured(states) is not None and asked == ["model"]
    asked.clear()
    states["extra"] = Counter(it=torch.zeros(LARGE))
    assert not could_capture(states) and captured(states) is None and asked == []


class BigBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_buffer("table", torch.zeros(LARGE))


class BigBufferBesideComputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.computed, self.big = Computed(), BigBuffer()


@pytest.mark.parametrize("kind", [BigBuffer, BigBufferBesideComputed])
def test_a_model_of_which_much_changes_in_a_forward_pass_is_left_to_training(
    kind: type[nn.Module],
) -> None:
    wrapper = ModelWrapper([nn.Linear(1, 1), kind()])
    assert wrapper.state_dict_later() is None
    assert captured({MODEL: wrapper}) is None and not could_capture({MODEL: wrapper})


@pytest.mark.parametrize(
    "state", [torch.zeros(LARGE), nn.Parameter(torch.ones(1)), torch.ones(2).to_sparse()]
)
def test_large_and_strange_tensors_of_other_objects_are_left_to_training(
    run: Run, state: Any
) -> None:
    for it, is_taken in ((state, False), (torch.zeros(1), True)):
        states = states_of(run, extra=Counter(it=it))
        assert could_capture(states) is is_taken
        assert (captured(states) is not None) is is_taken


def test_an_optimizer_of_another_class_is_asked_by_training(run: Run) -> None:
    class Mine(OptimizersContainer):
        def state_dict(self) -> dict[str, Any]:
            return {"mine": torch.ones(1)}

    with patch.object(run.optimizers, "state_dict", lambda: {"mine": torch.ones(1)}):
        assert captured(states_of(run)) is None
    assert captured(states_of(run)) is not None
    run.optimizers.__class__ = Mine
    assert captured(states_of(run)) is None


def test_what_is_registered_on_a_rank_is_asked_at_once(run: Run) -> None:
    state, own = rank_state(), Counter(count=1)
    state.register("own", own)
    states = states_of(run) | {RANK_STATE: state}
    wanted = values(items_of(states))
    taken = captured(states)
    own.values["count"] = 2
    assert values(taken.items()) == wanted


def test_a_state_that_cannot_be_had_is_told_later_as_the_other_ranks_wait(run: Run) -> None:
    states = states_of(run)
    with patch.object(run.dataloader, "state_dict", side_effect=OSError("gone")):
        taken = captured(states)
    with pytest.raises(RuntimeError, match="the state dataloader cannot be saved: OSError: gone"):
        taken.items()
