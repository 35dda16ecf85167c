"""A checkpoint of any layout loads into any other one, on another number of ranks, bit for bit.

Every layout saves once and loads, with a fresh trainer, what the others saved (all of them, but for
the few layouts that cost the most or differ the least); then one step shows that the data goes on
in its order and that the model computes what it did before. Sizes are uneven, so that shards are too,
and some are empty.
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
    HSDP_TP_8,
    Layout,
    ONE,
    REPLICATE_2,
    REPLICATE_TP_4,
    samples_in_order,
    TP_2,
    TP_2_NO_SP,
    TP_4,
)
from tests.ranks.odd_model import odd_spec
from tests.ranks.pool import run_on_ranks
from tests.ranks.tiny_run import make_config, Recorded, run, Trace

ROWS_PER_STEP = 4
SAVED_STEP = 2
WRAPPED = Layout(name="TP 2 wrapped", tensor=2, wrapped=True)
LAYOUTS = [
    *(ONE, FSDP_2, REPLICATE_2, TP_2, TP_2_NO_SP, WRAPPED),
    *(FSDP_4, HSDP_4, TP_4, FSDP_TP_4, REPLICATE_TP_4, HSDP_TP_8),
]
# Each fresh model is compiled anew, which takes seconds, and eight ranks share few cores: there
# a few layouts tell whether names and pieces agree.
SOURCES = {WRAPPED: [ONE, FSDP_TP_4, WRAPPED]}
PARTNERS = {
    TP_2_NO_SP: [FSDP_2, TP_2, TP_2_NO_SP],
    HSDP_TP_8: [ONE, FSDP_TP_4, HSDP_TP_8],
}
PAIRS = [
    (source, target)
    for target in LAYOUTS
    for source in LAYOUTS
    if source in SOURCES.get(target, LAYOUTS)
    and source in PARTNERS.get(target, LAYOUTS)
    and target in PARTNERS.get(source, LAYOUTS)
]


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


def save_and_load(folder: str, layouts: list[Layout]) -> dict[Any, Trace]:
    """Both in one start of the ranks, which costs more than what they do."""
    return {**save_in_each(folder, layouts), **load_in_each(folder, layouts)}


def _on_ranks(num_ranks: int, function: Callable[..., dict], folder: str) -> dict:
    """What ``function`` returns for the layouts of that many ranks, by rank."""
    layouts = [layout for layout in LAYOUTS if layout.num_ranks == num_ranks]
    ranks = run_on_ranks(num_ranks, function, folder, layouts, init=False, timeout_seconds=600)
    return {key: [rank[key] for rank in ranks] for key in ranks[0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("resharding"))


@pytest.fixture(scope="module")
def whole(folder: str) -> Trace:
    [trace] = run_on_ranks(1, straight, folder, init=False)
    return trace


@pytest.fixture(scope="module")
def made(folder: str) -> dict[Any, list[Trace]]:
    """The traces of a layout under its name, and of a pair under both."""
    found: dict[Any, list[Trace]] = {}
    # Eight ranks load what the others saved, and then the others load.
    for num_ranks in (1, 2, 4):
        found |= _on_ranks(num_ranks, save_in_each, folder)
    found |= _on_ranks(8, save_and_load, folder)
    for num_ranks in (1, 2, 4):
        found |= _on_ranks(num_ranks, load_in_each, folder)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_a_checkpoint_loads_into_any_layout_bit_for_bit(
    source: Layout,
    target: Layout,
    made: dict[Any, list[Trace]],
    whole: Trace,
) -> None:
    before, after = made[source.name], made[source.name, target.name]
    step = SAVED_STEP + 1
    for rank in after:
        assert rank.resumed_from == SAVED_STEP
        assert rank.loaded == before[0].state
        assert rank.losses[step] == pytest.approx(whole.losses[step], rel=1e-4)
    assert samples_in_order(after, step, target) == samples_in_order([whole], step, ONE)


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_a_layout_saves_does_not_depend_on_it(
    layout: Layout, made: dict[Any, list[Trace]], folder: str, whole: Trace
) -> None:
    ranks = made[layout.name]
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
