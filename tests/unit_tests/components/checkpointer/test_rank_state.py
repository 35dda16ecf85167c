"""State of single ranks: what is saved, and what another number of ranks makes of it."""

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer import rank_state
from torchtitan.components.checkpointer.dcp_index import outline_of, read_index
from torchtitan.components.checkpointer.nesting import encode
from torchtitan.components.checkpointer.rank_state import preserved_generators, RankState
from torchtitan.components.checkpointer.templates import SavedEntry

from tests.unit_tests.components.checkpointer.test_templates import Holder, load

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    with preserved_generators(CPU):
        yield


class Shares(Holder):
    """Takes every ``world_size``-th item of what all ranks had."""

    def load_state_dicts(self, state_dicts: list[Any], *, rank: int, world_size: int) -> None:
        items = sorted(item for state in state_dicts for item in state["items"])
        self.value = {"items": items[rank::world_size]}


def of_rank(rank: int, world_size: int, layout: str = "shards", **registered: Any) -> RankState:
    state = RankState(rank=rank, world_size=world_size, layout=layout, device=CPU)
    for name, part in registered.items():
        state.register(name, part)
    return state


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draw() -> tuple[Any, ...]:
    # Both Gaussians keep a second value for the next call.
    return random.gauss(0, 1), np.random.standard_normal(), torch.rand(3).tolist()


def save(path: Path, *ranks: RankState) -> None:
    """What these ranks would write, each with generators of its own."""
    merged: dict[str, Any] = {}
    for number, state in enumerate(ranks):
        seed(number)
        draw()
        merged |= encode(state.state_dict())
    dcp.save({"rank_state": merged}, checkpoint_id=str(path), no_dist=True)


def restored(path: Path, state: RankState, *, step: int = 7) -> tuple[Any, ...]:
    """What is drawn after ``state`` was loaded."""
    load(path, rank_state=state)
    state.restore_last(step)
    return draw()


def expected(number: int) -> tuple[Any, ...]:
    seed(number)
    draw()
    return draw()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "root"]


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_every_rank_goes_on_where_it_was_and_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, of_rank(0, 2, seen=Holder([1])), of_rank(1, 2, seen=Holder([1, 2, 3])))
    for rank, numbers in ((0, [1]), (1, [1, 2, 3])):
        seen = Holder([])
        state = of_rank(rank, 2, seen=seen)
        seed(99)
        assert restored(tmp_path, state) == expected(rank)
        assert seen.value == numbers
    assert lines(caplog) == []


def test_nothing_is_set_before_the_end_of_the_load_and_only_once(tmp_path: Path) -> None:
    save(tmp_path, of_rank(0, 1))
    state = of_rank(0, 1)
    seed(50)
    load(tmp_path, rank_state=state)
    assert draw() == (seed(50), draw())[1]
    state.restore_last(1)
    first = draw()
    state.restore_last(1)
    assert draw() != first


def test_another_number_of_ranks_draws_other_numbers_always_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "a", of_rank(0, 2), of_rank(1, 2))
    save(tmp_path / "b", of_rank(1, 2), of_rank(0, 2))
    seed(1)
    first = restored(tmp_path / "a", of_rank(0, 3))
    seed(2)
    again = restored(tmp_path / "a", of_rank(0, 3))
    others = [
        restored(tmp_path / "b", of_rank(0, 3)),
        restored(tmp_path / "a", of_rank(0, 3), step=8),
        restored(tmp_path / "a", of_rank(0, 1)),
        expected(0),
    ]
    assert first == again
    for position in range(3):
        assert len({str(found[position]) for found in [first, *others]}) == 5
    said = lines(caplog)
    assert len(said) == 5 and said[0] == (
        "The checkpoint was saved on 2 ranks and this run has 3: random number generators seeded "
        "anew from it: python, numpy, torch."
    )


def test_another_layout_of_as_many_ranks_is_treated_like_another_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = [
        of_rank(r, 2, "dp 2", items=Shares({"items": items}), seen=Holder([r]))
        for r, items in enumerate(([1, 4, 9], [2, 3]))
    ]
    save(tmp_path, *ranks)
    found = []
    for rank in range(2):
        items, seen = Shares({"items": []}), Holder("fresh")
        seed(7)  # alike on the ranks that share a tensor now
        found.append(restored(tmp_path, of_rank(rank, 2, "tp 2", items=items, seen=seen)))
        assert items.value == {"items": [1, 2, 3, 4, 9][rank::2]} and seen.value == "fresh"
    assert found[0] == found[1] != expected(0)
    assert lines(caplog) == [
        "The checkpoint was saved with dp 2 and this run has tp 2: random number generators "
        "seeded anew from it: python, numpy, torch; as this start has built it: seen."
    ]


def test_a_checkpoint_that_does_not_name_its_layout_is_of_the_same_one(tmp_path: Path) -> None:
    saved = of_rank(0, 1, "dp 1")
    seed(0)
    draw()
    state = {key: value for key, value in saved.state_dict().items() if key != "layout"}
    dcp.save({"rank_state": encode(state)}, checkpoint_id=str(tmp_path), no_dist=True)
    assert restored(tmp_path, of_rank(0, 1, "tp 1")) == expected(0)


def test_registered_state_is_divided_anew_if_it_says_how(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = [
        of_rank(r, 2, items=Shares({"items": items}), seen=Holder([r]), gone=Holder(1))
        for r, items in enumerate(([1, 4, 9], [2, 3]))
    ]
    save(tmp_path, *ranks)
    items, seen, added = Shares({"items": []}), Holder("fresh"), Holder("new")
    restored(tmp_path, of_rank(0, 3, items=items, seen=seen, added=added))
    assert items.value == {"items": [1, 4]}
    assert seen.value == "fresh" and added.value == "new"
    (line,) = lines(caplog)
    assert "as this start has built it: added, seen; not taken over: gone." in line


class Sums:
    """Adds up what all ranks had, in its own tensor."""

    def __init__(self, *numbers: float) -> None:
        self.total = torch.tensor(numbers)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total.copy_(state_dict["total"])

    def load_state_dicts(self, state_dicts: list[Any], *, rank: int, world_size: int) -> None:
        self.total.zero_()
        for state in state_dicts:
            self.total += state["total"]


def test_a_rank_reads_what_others_saved_only_to_divide_it_anew(tmp_path: Path) -> None:
    save(tmp_path, *(of_rank(r, 2, items=Shares({"items": [r]})) for r in range(2)))
    prefix = "rank_state."
    saved = {
        name: SavedEntry(path=entry.path[1:], shape=entry.shape, dtype=entry.dtype)
        for name, entry in outline_of(read_index(str(tmp_path))).items()
        if name.startswith(prefix)
    }
    read = {
        layout: of_rank(1, 2, layout, items=Shares({"items": []})).load_template(saved)
        for layout in ("shards", "copies")
    }
    assert "items" not in read["shards"]["rank_0"] and "items" in read["shards"]["rank_1"]
    assert "items" in read["copies"]["rank_0"]
    assert "torch" in read["shards"]["rank_1"] and "torch" not in read["copies"]["rank_1"]


def test_state_that_is_divided_anew_shares_no_memory_with_what_it_is_given(tmp_path: Path) -> None:
    save(tmp_path, *(of_rank(rank, 2, sums=Sums(number)) for rank, number in enumerate((3, 4))))
    for rank, world_size, layout in ((0, 1, "shards"), (1, 2, "copies")):
        sums = Sums(0)
        restored(tmp_path, of_rank(rank, world_size, layout, sums=sums))
        assert sums.total.tolist() == [7]


def test_state_that_is_new_or_gone_is_named_with_the_same_ranks_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, of_rank(0, 1, gone=Holder(1)))
    added = Holder("new")
    assert restored(tmp_path, of_rank(0, 1, added=added)) == expected(0)
    assert added.value == "new"
    (line,) = lines(caplog)
    assert line.endswith("as this start has built it: added; not taken over: gone.")


def test_a_generator_that_cannot_be_restored_is_seeded_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ordinary = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        state = of_rank(0, 1).state_dict()
        np.random.standard_normal()
        there = of_rank(0, 1)
        there.load_state_dict(encode(state))
        np.random.standard_normal()
        there.restore_last(0)
        after = np.random.standard_normal()
        np.random.set_bit_generator(np.random.PCG64(3))
        assert np.random.standard_normal() == after
        assert lines(caplog) == []
    finally:
        np.random.set_bit_generator(ordinary)
    other = of_rank(0, 1)
    other.load_state_dict(encode(state))
    other.restore_last(0)
    (line,) = lines(caplog)
    assert line.endswith("random number generators seeded anew from it: numpy.")


def test_the_generator_of_an_accelerator_is_saved_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generator = torch.Generator()
    module = SimpleNamespace(
        get_rng_state=lambda device: generator.get_state(),
        set_rng_state=lambda state, device: generator.set_state(state),
        manual_seed=generator.manual_seed,
    )
    with patch.object(rank_state, "device_module", module):
        save(
            tmp_path / "gpu",
            RankState(rank=0, world_size=1, layout="shards", device=torch.device("cuda", 0)),
        )
        save(tmp_path / "cpu", of_rank(0, 1))
        numbers = torch.rand(3, generator=generator).tolist()
        again = RankState(rank=0, world_size=1, layout="shards", device=torch.device("cuda", 0))
        restored(tmp_path / "gpu", again)
        assert torch.rand(3, generator=generator).tolist() == numbers
        assert lines(caplog) == []
        restored(tmp_path / "cpu", again)
    assert restored(tmp_path / "gpu", of_rank(0, 1)) == expected(0)
    from_cpu, from_gpu = lines(caplog)
    assert from_cpu.endswith("random number generators seeded anew from it: cuda.")
    assert from_gpu.endswith("not taken over: cuda.")


def test_a_checkpoint_from_before_there_was_such_state_is_loaded_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dcp.save({"train_state": {"step": 3}}, checkpoint_id=str(tmp_path), no_dist=True)
    seed(11)
    assert restored(tmp_path, of_rank(0, 1)) == (seed(11), draw())[1]
    (line,) = lines(caplog)
    assert "older" in line


def test_only_plain_text_and_bytes_are_saved(tmp_path: Path) -> None:
    own = of_rank(0, 1).state_dict()["rank_0"]
    assert {name: type(value) for name, value in own.items()} == {
        "python": str,
        "numpy": str,
        "torch": bytes,
    }


@pytest.mark.parametrize("name", ["torch", "taken", "two words", "a.b", ""])
def test_a_name_that_is_taken_or_no_word_is_refused(name: str) -> None:
    state = of_rank(0, 1, taken=Holder(1))
    with pytest.raises(ValueError, match="numpy.*python.*taken.*torch"):
        state.register(name, Holder(2))


def test_what_cannot_be_saved_is_refused() -> None:
    nothing: Any = object()
    with pytest.raises(ValueError, match="lacks state_dict"):
        of_rank(0, 1).register("nothing", nothing)
