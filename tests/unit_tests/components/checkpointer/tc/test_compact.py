"""A file holds what its tensors show, and no more of the memory that they lie in."""

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torchtitan.components.checkpointer.tc.compact import compact
from torchtitan.components.checkpointer.tc.leaves import (
    leaves,
    name_of,
    path_of,
    require_distinct_names,
)


def size_of(tree: Any) -> int:
    stream = io.BytesIO()
    torch.save(tree, stream)
    return len(stream.getvalue())


def memory_of(tree: Any) -> int:
    """Bytes of all memory that the tensors in ``tree`` lie in."""
    tensors = [leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]
    memories = [tensor.untyped_storage() for tensor in tensors]
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())


def test_a_row_of_a_large_table_takes_the_space_of_a_row() -> None:
    table = torch.arange(100_000.0).view(1000, 100)
    tree = {"row": table[7], "deep": [{"other": table[9:11]}], "n": 3}
    found = compact(tree)
    assert size_of(found) < 10_000 < size_of(tree)
    assert found["row"].equal(table[7]) and found["deep"][0]["other"].equal(table[9:11])
    assert found["n"] == 3 and tree["row"].untyped_storage().nbytes() == 400_000


def test_what_needs_its_memory_stays_where_it_is() -> None:
    tree = {"w": torch.ones(10), "list": [torch.zeros(3, 2).t()], "empty": torch.zeros(0)}
    assert compact(tree) is tree


def test_views_that_show_all_of_their_memory_are_written_once() -> None:
    table = torch.arange(10_000.0)
    tree = {"front": table[:6000], "back": table[4000:], "whole": table}
    assert compact(tree) is tree and size_of(tree) < 50_000


def test_tied_tensors_are_tied_in_the_copy() -> None:
    row = torch.zeros(1000, 100)[3]
    found = compact({"a": row, "b": row, "c": row[:50]})
    assert found["a"] is found["b"]
    assert found["c"].equal(row[:50]) and size_of(found) < 3_000


def test_a_padded_shard_is_copied_as_the_shard_that_it_is(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    local = torch.arange(100_000.0)[:5]
    shard = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    found = compact({"w": shard})["w"]
    assert isinstance(found, DTensor) and found.placements == (Shard(0),)
    assert found.to_local().equal(local) and found.shape == shard.shape
    assert found.to_local().untyped_storage().nbytes() == 20


TREES = st.recursive(
    st.tuples(st.integers(0, 8), st.integers(0, 8), st.booleans()),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(tree=TREES)
@settings(max_examples=40, deadline=None)
def test_values_and_places_are_the_same_whatever_lies_where(tree: Any) -> None:
    tables = [torch.arange(8.0), torch.arange(8.0) * 3]

    def as_tensors(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: as_tensors(value) for key, value in tree.items()}
        if isinstance(tree, list):
            return [as_tensors(value) for value in tree]
        begin, end, which = tree
        return tables[which][begin:end]

    given_tree = as_tensors(tree)
    found = compact(given_tree)
    before, after = list(leaves(given_tree)), list(leaves(found))
    assert [place for place, _ in before] == [place for place, _ in after]
    assert all(
        there.equal(here) if isinstance(here, torch.Tensor) else there == here
        for (_, here), (_, there) in zip(before, after, strict=True)
    )
    assert memory_of(found) <= memory_of(given_tree)


def test_the_entries_of_the_model_have_no_key_before_their_names() -> None:
    assert path_of("model", ("layers", 0)) == ("layers", 0)
    assert path_of("plain", ()) == ("plain",)
    assert name_of("optimizer", ("state", 3, "w")) == "optimizer.state.3.w"


def test_entries_of_one_name_are_refused_all_at_once() -> None:
    require_distinct_names("plain", {"a": {"b": 1}, "a.c": 2})
    with pytest.raises(ValueError) as caught:
        require_distinct_names("plain", {"a.b": 1, "a": {"b": 2}, "x": {"1": 3}, "x.1": 4})
    text = str(caught.value)
    assert "plain.a.b (['a.b'] and ['a', 'b'])" in text and "plain.x.1 (" in text
