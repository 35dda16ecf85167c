"""What a rank hands over: its tensors as they are, everything else as a copy of this moment."""

import threading
from collections import defaultdict, OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torchtitan.components.checkpointer.nesting import decode
from torchtitan.components.checkpointer.state import ModelWrapper
from torchtitan.components.checkpointer.tc.payload import _digest, items_of

from tests.unit_tests.components.checkpointer.runs import Counter


def payload(**states: Any) -> dict[str, Any]:
    return items_of(states).values


def test_objects_give_their_state_dicts_and_everything_else_is_itself() -> None:
    layer = nn.Linear(2, 1, bias=False)
    found = payload(
        model=ModelWrapper(layer), train_state=Counter(step=4), plain={"a": 1}, number=3, none=None
    )
    assert found["model"]["weight"].data_ptr() == layer.weight.data_ptr()
    assert {key: value for key, value in found.items() if key != "model"} == {
        "train_state": {"inner": {"step": 4}},
        "plain": {"a": 1},
        "number": 3,
        "none": None,
    }


def test_what_is_no_tensor_is_a_copy_down_to_the_last_list() -> None:
    rows: Any = {"list": [[1], {"deep": [2]}], "set": {3}, "pair": ([4],)}
    optimizer = {"state": {"w": torch.zeros(1)}}
    found = payload(dataloader=Counter(rows=rows), plain=rows, optimizer=optimizer)
    rows["list"][0].append("later")
    rows["list"][1]["deep"].append("later")
    rows["set"].add("later")
    rows["pair"][0].append("later")
    then = {"list": [[1], {"deep": [2]}], "set": {3}, "pair": ([4],)}
    assert decode(found["plain"]) == then
    assert decode(found["dataloader"])["inner"]["rows"] == then
    # The tensors are to be staged from where they are.
    assert found["optimizer"]["state"]["w"] is optimizer["state"]["w"]


TENSORS = [
    torch.zeros(()),
    torch.zeros(0, 3),
    torch.arange(6.0).view(2, 3).t(),
    torch.tensor([True, False]),
    torch.ones(3, dtype=torch.bfloat16),
    torch.ones(2).to(torch.float8_e4m3fn),
    torch.tensor([1 + 2j]).conj(),
    torch.tensor(7, dtype=torch.int64),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype} {[*tensor.shape]}")
def test_equal_tensors_are_told_to_be_so_wherever_they_lie(tensor: torch.Tensor) -> None:
    def digest(changed: torch.Tensor) -> bytes:
        return _digest({"t": changed, "n": 1})

    other = torch.empty_like(tensor).copy_(tensor)
    assert digest(other) == digest(tensor)
    wider = torch.complex128 if tensor.is_complex() else torch.float64
    different = [tensor.to(wider), tensor.reshape(1, *tensor.shape)]
    if tensor.numel() > 0:
        different.append(torch.zeros_like(tensor) if tensor.any() else torch.ones_like(tensor))
    assert digest(tensor) not in [digest(each) for each in different]


class Failing:
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("row")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    "state,said",
    [
        (Failing(), "the state odd cannot be saved: KeyError: 'row'"),
        ({"lock": threading.Lock()}, "the state odd cannot be saved: TypeError: cannot pickle"),
        ({"function": lambda: 1}, "the state odd cannot be saved: .*lambda"),
        ({"a.b": 1, "a": {"b": 2}}, "the state odd cannot be saved: ValueError: .*one name"),
        ({("a", object()): 1}, "the state odd cannot be saved: TypeError: .*has the key"),
        ({"s": torch.zeros(2).to_sparse()}, "the state odd cannot be saved: TypeError: s is"),
    ],
)
def test_a_state_that_cannot_be_saved_is_named_before_a_save_has_begun(
    state: Any, said: str
) -> None:
    with pytest.raises(RuntimeError, match=f"^{said}"):
        payload(fine=1, odd=state)


class Own:
    """Of the program that trains; a load would have to run it."""


class Noted(dict[str, Any]):
    """A dict with a name of its own."""


def noted_on(tensor: torch.Tensor, note: Any) -> torch.Tensor:
    tensor.note = note  # pyrefly: ignore[missing-attribute]  (what some libraries do)
    return tensor


@pytest.mark.parametrize(
    "key,state,said",
    [
        ("dataloader", {"a": {"b": Own()}}, "dataloader.a.b cannot be saved, .*asks for .*Own"),
        ("optimizer", {"state": {"w": Own()}}, "optimizer.state.w cannot be saved, .*Own"),
        ("model", {"extra": [1, Own()]}, r"model.extra.1 cannot be saved, .*Own"),
        ("model", {"extra": (1, Own())}, r"model.extra cannot be saved, .*Own"),
        ("optimizer", {"a": (1, 2), "b": (1, Own())}, "optimizer.b cannot be saved, .*Own"),
        ("optimizer", defaultdict(list, a=1), "optimizer cannot be saved, .*defaultdict"),
        ("optimizer", {"a": Noted(b=1)}, "optimizer.a cannot be saved, .*Noted"),
        ("model", {"w": noted_on(torch.zeros(1), Own())}, "model.w cannot be saved, .*Own"),
        ("optimizer", {"f": print}, "optimizer.f cannot be saved, .*print"),
        ("optimizer", {"lock": threading.Lock()}, "optimizer.lock cannot be saved: TypeError"),
        ("optimizer", {("a", Own): 1}, "a key of optimizer cannot be saved, .*Own"),
    ],
)
def test_what_no_load_would_take_is_named_with_its_key_before_a_save_has_begun(
    key: str, state: Any, said: str
) -> None:
    with pytest.raises(RuntimeError, match=f"^the state {key} cannot be .*{said}"):
        payload(**{key: state})


def test_what_a_load_takes_can_be_saved() -> None:
    odd = {
        "text": "a",
        "pair": (1, 2.5),
        "set": {1, 2},
        "bytes": b"ab",
        "complex": 1j,
        "dtype": torch.bfloat16,
        "size": torch.Size([2]),
        "ordered": OrderedDict(a=torch.zeros(1)),
        "noted": noted_on(torch.zeros(1), 3),
        "none": None,
    }
    found = payload(model=odd, optimizer={3: odd}, dataloader=odd)
    assert found["model"] is odd and found["optimizer"][3] is odd
    assert decode(found["dataloader"])["set"] == {1, 2}


def test_an_entry_of_the_model_that_hides_another_state_is_refused() -> None:
    model = ModelWrapper(nn.ModuleDict({"optimizer": nn.Linear(1, 1)}))
    with pytest.raises(ValueError, match="optimizer.weight"):
        payload(model=model, optimizer={"state": {}})


def test_a_state_that_holds_sharded_tensors_is_of_every_rank_and_still_a_copy(
    one_rank: None,
) -> None:
    sharded = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)))
    names = ["a"]
    found = payload(average={"weight": sharded, "names": names})
    names.append("later")
    assert found["average"]["weight"] is sharded and found["average"]["names"] == ["a"]
    # The one cannot be copied; the other can, and cannot be pickled.
    for odd in (threading.Lock(), lambda: 1):
        states = {"average": {"weight": sharded, "odd": odd}}
        with pytest.raises(RuntimeError, match="the state average cannot be saved"):
            payload(**states)
