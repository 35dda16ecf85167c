"""A checkpoint of any layout loads into any other one, on another number of ranks, bit for bit.

Every layout saves once and every layout loads what each of them saved, with a fresh trainer; then
one step shows that the data goes on in its order and that the model computes what it did before.
Sizes are uneven, so that shards are too, and some are empty.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from tests.ranks.layouts import (
    FSDP_2,
    FSDP_4,
    FSDP_TP_4,
    HSDP_4,
    Layout,
    ONE,
    REPLICATE_2,
    REPLICATE_TP_4,
    samples_in_order,
    TP_2,
    TP_4,
)
from tests.ranks.odd_model import odd_spec
from tests.ranks.pool import run_on_ranks
from tests.ranks.tiny_run import make_config, Recorded, run, Trace

ROWS_PER_STEP = 4
SAVED_STEP = 2
WRAPPED = Layout(name="TP 2 wrapped", tensor=2, wrapped=True)
LAYOUTS = [
    *(ONE, FSDP_2, REPLICATE_2, TP_2, WRAPPED),
    *(FSDP_4, HSDP_4, TP_4, FSDP_TP_4, REPLICATE_TP_4),
]
# Each fresh model is compiled anew, which takes seconds: a few sources tell whether names agree.
PAIRS = [
    (source, target)
    for target in LAYOUTS
    for source in LAYOUTS
    if not target.wrapped or source in (ONE, FSDP_TP_4, WRAPPED)
]
NUMBERS_OF_RANKS = [1, 2, 4]


def config_of(folder: str, name: str, layout: Layout, **checkpoint: object) -> Recorded.Config:
    config = make_config(Path(folder), name, **checkpoint)
    config.model_spec = odd_spec()
    settings = {"lr": 1e-2, "betas": (0.9, 0.95)}
    config.optimizer = OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern="norm", optimizer_name="AdamW", optimizer_kwargs={**settings, "eps": 1e-6}
            ),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=settings),
        ]
    )
    return layout.divide(config, rows_per_step=ROWS_PER_STEP)


def save_in_each(folder: str, layouts: list[Layout]) -> dict[str, Trace]:
    """Two steps in each layout, and the state as it was saved after them."""
    return {
        layout.name: run(
            config_of(folder, layout.name, layout, interval=SAVED_STEP), crash_after=SAVED_STEP
        )
        for layout in layouts
    }


def load_in_each(folder: str, layouts: list[Layout]) -> dict[tuple[str, str], Trace]:
    """The next step after what each layout saved, by (saved in, loaded in)."""
    return {
        (source.name, target.name): run(
            config_of(folder, source.name, target, load_only=True),
            crash_after=SAVED_STEP + 1,
            with_state=False,
        )
        for source, target in PAIRS
        if target in layouts
    }


def straight(folder: str) -> Trace:
    return run(config_of(folder, "straight", ONE, load_only=True), crash_after=SAVED_STEP + 1)


def _on_all_ranks(function: Callable[..., dict], folder: str) -> dict:
    """What ``function`` returns for the layouts of each number of ranks, by rank."""
    found: dict = {}
    for num_ranks in NUMBERS_OF_RANKS:
        layouts = [layout for layout in LAYOUTS if layout.num_ranks == num_ranks]
        ranks = run_on_ranks(num_ranks, function, folder, layouts, init=False, timeout_seconds=600)
        found |= {key: [rank[key] for rank in ranks] for key in ranks[0]}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("resharding"))


@pytest.fixture(scope="module")
def whole(folder: str) -> Trace:
    [trace] = run_on_ranks(1, straight, folder, init=False)
    return trace


@pytest.fixture(scope="module")
def saved(folder: str) -> dict[str, list[Trace]]:
    return _on_all_ranks(save_in_each, folder)


@pytest.fixture(scope="module")
def loaded(folder: str, saved: dict[str, list[Trace]]) -> dict[tuple[str, str], list[Trace]]:
    return _on_all_ranks(load_in_each, folder)


@pytest.mark.ranks
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_a_checkpoint_loads_into_any_layout_bit_for_bit(
    source: Layout,
    target: Layout,
    saved: dict[str, list[Trace]],
    loaded: dict[tuple[str, str], list[Trace]],
    whole: Trace,
) -> None:
    before, after = saved[source.name], loaded[source.name, target.name]
    step = SAVED_STEP + 1
    for rank in after:
        assert rank.resumed_from == SAVED_STEP
        assert rank.loaded == before[0].state
        assert rank.losses[step] == pytest.approx(whole.losses[step], rel=1e-4)
    assert samples_in_order(after, step, target) == samples_in_order([whole], step, ONE)


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_a_layout_saves_does_not_depend_on_it(
    layout: Layout, saved: dict[str, list[Trace]], folder: str, whole: Trace
) -> None:
    ranks = saved[layout.name]
    assert all(rank.state == ranks[0].state for rank in ranks), "ranks disagree on one state"
    for step in range(1, SAVED_STEP + 1):
        assert samples_in_order(ranks, step, layout) == samples_in_order([whole], step, ONE)
        assert ranks[0].losses[step] == pytest.approx(whole.losses[step], rel=1e-4)
    index = _index_of(folder, layout)
    assert _contents(index) == _contents(_index_of(folder, ONE))
    # What several ranks hold is written by one of them, and the files hold nothing else.
    for name, entry in _tensors(index).items():
        written = sum(chunk.sizes.numel() for chunk in entry.chunks)
        assert written == entry.size.numel(), f"{name} is there in part or more than once"
    pieces = index.storage_data.values()
    assert sum(piece.length for piece in pieces) == sum(
        file.stat().st_size for file in _path(folder, layout).glob("*.distcp")
    )


def _contents(index: Metadata) -> dict[str, Any]:
    """Shape and type of every entry, except those that each rank has for itself."""
    tensors = {
        name: (tuple(entry.size), entry.properties.dtype) for name, entry in _tensors(index).items()
    }
    return {
        name: tensors.get(name, "bytes")
        for name in index.state_dict_metadata
        if not name.startswith("rank_state.")
    }


def _tensors(index: Metadata) -> dict[str, TensorStorageMetadata]:
    entries = index.state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def _index_of(folder: str, layout: Layout) -> Metadata:
    return FileSystemReader(_path(folder, layout)).read_metadata()


def _path(folder: str, layout: Layout) -> Path:
    return Path(folder, layout.name, "checkpoint", f"step-{SAVED_STEP}")
