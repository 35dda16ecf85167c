"""Nested states come back as they were, whatever DCP makes of dicts, keys and tuples."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torchtitan.components.checkpointer.nesting import decode, encode

# Keys that a careless encoding would confuse with its own, or with numbers.
KEYS = st.sampled_from(
    ["a", "b.c", "!empty", "!tuple", "!3", "3", "", 3, -1, None, True, (1, "x"), 2.5]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3)


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    short = st.lists(children, max_size=3)
    return short | short.map(tuple) | st.dictionaries(KEYS, children, max_size=3)


STATES = st.dictionaries(KEYS, st.recursive(LEAVES, containers, max_leaves=6), max_size=4)


@given(STATES)
def test_decoding_gives_back_what_was_encoded(state: dict[Any, Any]) -> None:
    back = decode(encode(state))
    assert back == state and repr(back) == repr(state)


def test_ordinary_states_are_written_as_they_are() -> None:
    state = {"epoch": 3, "order": [1, 2], "betas": (0.9, 0.95), "inner": {"x": None, "": []}}
    assert encode(state) == state


def test_what_dcp_would_lose_is_marked() -> None:
    tensor = torch.ones(2)
    state = {"none": {}, "ids": {3: "x"}, "pair": (tensor, {}), "rows": [{}, (1, 2)]}
    encoded = encode(state)
    assert encoded == {
        "none": {"!empty": None},
        "ids": {"!3": "x"},
        "pair": {"!tuple": [tensor, {"!empty": None}]},
        "rows": [{"!empty": None}, (1, 2)],
    }
    assert encoded["pair"]["!tuple"][0] is tensor


def test_an_encoded_state_does_not_change_with_the_object_it_came_from() -> None:
    rows: list[Any] = [1, [2]]
    kept = {1}
    encoded = encode({"rows": rows, "seen": {"a": rows}, "set": kept, "pair": (0, rows)})
    rows[1].append(3)
    rows.append(4)
    kept.add(2)
    assert encoded["rows"] == [1, [2]] == encoded["seen"]["a"]
    assert encoded["set"] == {1} and encoded["pair"] == (0, [1, [2]])


def test_a_key_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(TypeError, match="has the key <object"):
        encode({"inner": {object(): 1}})


def test_a_dict_that_one_rank_fills_and_another_has_empty_is_that_of_the_first() -> None:
    together = encode({"inner": {}}) | encode({}) | {"row": 3}
    assert decode(together) == {"inner": {}, "row": 3}
    together["inner"] |= encode({"deep": {4: "x"}})
    assert decode(together) == {"inner": {"deep": {4: "x"}}, "row": 3}
