"""What a load asks for: all that was saved, whatever shape a freshly built object has."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, HealthCheck, settings, strategies as st
from torchtitan.components.checkpointer.dcp_index import outline_of, read_index
from torchtitan.components.checkpointer.errors import CheckpointMismatchError
from torchtitan.components.checkpointer.matching import require_match
from torchtitan.components.checkpointer.templates import snapshots, templates

from tests.unit_tests.components.checkpointer.test_nesting import containers, LEAVES


class Holder:
    """State that is whatever it holds."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state_dict: Any) -> None:
        self.value = state_dict


def save(path: Path, **values: Any) -> None:
    states = {key: Holder(value) for key, value in values.items()}
    dcp.save(snapshots(states, frozenset(values)), checkpoint_id=str(path), no_dist=True)


def load(path: Path, **targets: Any) -> None:
    outline = outline_of(read_index(str(path)))
    states = templates(targets, frozenset(targets), outline)
    others = {str(entry.path[0]) for entry in outline.values()}
    require_match(str(path), states, other_keys=others, outline=outline)
    dcp.load(states, checkpoint_id=str(path), no_dist=True)


def loaded(path: Path, live: Any) -> Any:
    holder = Holder(live)
    load(path, part=holder)
    return holder.value


def plain(value: Any) -> Any:
    """``value`` in a form whose repr shows every difference."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value


TENSORS = st.sampled_from(
    [
        torch.arange(3),
        torch.arange(4),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.tensor(1.5),
        torch.zeros(0, 2),
        torch.tensor([True]),
    ]
)
# No dots: DCP itself refuses two values whose dotted names are the same.
NAMES = st.sampled_from(["a", "b", "!empty", "!tuple", "0", 0, 7, None, True])


def nested(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return containers(children).filter(lambda c: not isinstance(c, dict)) | st.dictionaries(
        NAMES, children, max_size=3
    )


STATES = st.dictionaries(NAMES, st.recursive(LEAVES | TENSORS, nested, max_leaves=6), max_size=4)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(saved=STATES, live=STATES)
def test_any_state_is_restored_into_an_object_of_any_other_shape(
    tmp_path_factory: pytest.TempPathFactory, saved: dict[Any, Any], live: dict[Any, Any]
) -> None:
    path = tmp_path_factory.mktemp("any")
    expected = repr(plain(saved))
    save(path, part=saved)
    assert repr(plain(loaded(path, live))) == expected


def test_tensors_are_read_into_those_of_the_object_where_they_fit(tmp_path: Path) -> None:
    save(tmp_path, part={"same": torch.ones(3), "other": torch.ones(4), "cast": torch.ones(2)})
    live = {"same": torch.zeros(3), "other": torch.zeros(3), "cast": torch.zeros(2).half()}
    same = live["same"]
    state = loaded(tmp_path, live)
    assert state["same"] is same and same.tolist() == [1, 1, 1]
    assert state["other"].tolist() == [1, 1, 1, 1]
    assert state["cast"].dtype is torch.float32, "no bit may be lost"


def test_entries_of_other_ranks_are_not_read(tmp_path: Path) -> None:
    save(tmp_path, part={"dp_rank_0": {"row": 1}, "dp_rank_1": {"row": 2}, "world": 2})
    assert loaded(tmp_path, {"dp_rank_1": {"row": 0}}) == {"dp_rank_1": {"row": 2}, "world": 2}
    assert loaded(tmp_path, {"dp_rank_5": {"row": 0}}) == {"world": 2}
    everything = {"dp_rank_0": {"row": 1}, "dp_rank_1": {"row": 2}, "world": 2}
    assert loaded(tmp_path, {"epoch": 0}) == everything


def test_numbered_keys_of_a_dict_that_has_grown_are_no_ranks(tmp_path: Path) -> None:
    save(tmp_path, part={"page_rank_0": 1, "page_rank_1": 2, "rank_1": 3})
    restored = loaded(tmp_path, {"page_rank_0": 0, "rank_0": 0})
    assert restored == {"page_rank_0": 1, "page_rank_1": 2, "rank_1": 3}


def test_a_plain_dict_is_restored_in_place(tmp_path: Path) -> None:
    saved = {"part": {"grows": [1, 2], "empty": {}, 3: "x"}}
    dcp.save(snapshots(saved, frozenset({"part"})), checkpoint_id=str(tmp_path), no_dist=True)
    live: dict[Any, Any] = {"grows": [], "gone": 1}
    load(tmp_path, part=live)
    assert live == saved["part"]


def test_a_part_that_was_saved_as_none_is_loaded_as_none(tmp_path: Path) -> None:
    dcp.save({"part": None}, checkpoint_id=str(tmp_path), no_dist=True)
    assert loaded(tmp_path, {"epoch": 3, "row": torch.ones(1)}) is None


def test_a_part_that_was_not_saved_is_reported_as_missing(tmp_path: Path) -> None:
    save(tmp_path, other={"epoch": 3})
    with pytest.raises(CheckpointMismatchError, match="2 missing: part.epoch, part.inner.row"):
        loaded(tmp_path, {"epoch": 3, "inner": {"row": 1}})
    assert loaded(tmp_path, {}) == {}


def test_a_checkpoint_of_another_program_without_paths_can_be_read(tmp_path: Path) -> None:
    save(tmp_path, part={"epoch": 4})
    index = read_index(str(tmp_path))
    index.planner_data = None
    (entry,) = outline_of(index).values()
    assert entry.path == ("part", "epoch")


def test_an_entry_that_the_object_misses_is_an_error_that_names_it(tmp_path: Path) -> None:
    class Strict(Holder):
        def load_state_dict(self, state_dict: Any) -> None:
            self.value = state_dict["ntokens_seen"]

    save(tmp_path, part={"step": 1})
    with pytest.raises(CheckpointMismatchError, match="'ntokens_seen'.*'step'.*loading part"):
        load(tmp_path, part=Strict({"ntokens_seen": 0}))


def test_a_live_tensor_that_repeats_its_elements_is_not_written_into(tmp_path: Path) -> None:
    save(tmp_path, part={"row": torch.arange(3.0), "one": torch.ones(1, 3)})
    live = {"row": torch.zeros(1).expand(3), "one": torch.zeros(3).expand(1, 3)}
    found = loaded(tmp_path, live)
    assert found["row"].tolist() == [0.0, 1.0, 2.0] and found["one"].tolist() == [[1.0] * 3]
    assert found["one"] is live["one"]
