"""An index that no digest vouches for may say anything: a start then falls back, and never just fails."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.checkpointer.dcp_index import read_index
from torchtitan.components.checkpointer.errors import CheckpointDamagedError

from tests.unit_tests.components.checkpointer.runs import build_run
from tests.unit_tests.components.checkpointer.ways import DISABLED, TC_WAITING, Way

pytestmark = pytest.mark.usefixtures("one_rank")


def changed(step: Path, change: Callable[[Any], Any]) -> None:
    """Write the index of ``step`` anew."""
    path = step / ".metadata"
    index = read_index(str(step)) if path.exists() else None
    if index is None:
        path = step / "metadata.pkl"
        index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))


def forget_a_place(index: Any) -> None:
    index.storage_data = {key: it for key, it in index.storage_data.items() if key.fqn != "scale"}


def forget_all_places(index: Any) -> None:
    index.storage_data = None


def groups_of(index: Any) -> list[dict[str, Any]]:
    items = index["metadata"]["model"]["nested_path_to_metadata"]
    return [group for groups in items.values() for group in groups]


def misspell_a_dtype(index: Any) -> None:
    groups_of(index)[0]["sharding_metadata"]["data"]["dtype"] = "torch.flo`t32"


def take_a_rank_for_another(index: Any) -> None:
    for group in groups_of(index):
        group["ranks"] = [16]


CASES = [
    (DISABLED, forget_a_place),
    (DISABLED, forget_all_places),
    (TC_WAITING, misspell_a_dtype),
    (TC_WAITING, take_a_rank_for_another),
]


@pytest.mark.parametrize("is_foreign", [True, False])
@pytest.mark.parametrize(("way", "change"), CASES, ids=lambda it: getattr(it, "__name__", str(it)))
def test_what_the_bytes_of_an_unchecked_index_spell_is_damage(
    tmp_path: Path, way: Way, change: Callable[[Any], None], is_foreign: bool
) -> None:
    run = build_run(tmp_path, **way.settings)
    run.train(2)
    run.manager.close()
    step = tmp_path / "checkpoint/step-2"
    changed(step, change)
    if is_foreign:
        (step / "manifest.json").unlink()
    other = build_run(
        tmp_path, seed=3, verify="full" if is_foreign else "off", load_only=True, **way.settings
    )
    with pytest.raises(CheckpointDamagedError, match=str(step)) as failed:
        other.manager.load(2)
    assert way.format.marker in str(failed.value) and other.step == 0
    assert other.manager.load() and other.step == 1
    other.manager.close()
