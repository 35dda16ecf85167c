"""A checkpoint of any layout loads into any other one, on another number of ranks, bit for bit.

Every layout saves once with each manager and loads, with a fresh trainer, what the others saved (all of
them with DCP, but for the few layouts that cost the most or differ the least; with torch_checkpointing
each is read by two others, of another kind or number of ranks); then one step shows that the data goes
on in its order and that the model computes what it did before. Sizes are uneven, so that shards are
too, and some are empty.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torchtitan.components.checkpointer.dcp_index import outline_of
from torchtitan.components.checkpointer.tc.reading import look
from torchtitan.components.checkpointer.tc.storage import DurableStorageConfig
from torchtitan.components.checkpointer.templates import SavedEntry
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
from tests.ranks.tc_files import shares_of, unevenness
from tests.ranks.tiny_run import make_config, Recorded, run, Trace
from tests.unit_tests.components.checkpointer.ways import DISABLED, TC_WAITING, Way

# The first test waits for the runs of all, which up to eight ranks make on few cores.
pytestmark = pytest.mark.timeout(900)
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
# Each is read by the next one and the fourth one after it: on more, fewer and as many ranks.
TC_ORDER = [
    *(ONE, FSDP_2, TP_2, HSDP_4, FSDP_TP_4, WRAPPED),
    *(REPLICATE_2, TP_4, FSDP_4, REPLICATE_TP_4, TP_2_NO_SP),
]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Saved in one layout, loaded in another."""

    way: Way
    source: Layout
    target: Layout

    def __str__(self) -> str:
        return f"{self.way.format.backend}-{self.source}-{self.target}"


DCP_PAIRS = [
    Pair(way=DISABLED, source=source, target=target)
    for target in LAYOUTS
    for source in LAYOUTS
    if source in SOURCES.get(target, LAYOUTS)
    and source in PARTNERS.get(target, LAYOUTS)
    and target in PARTNERS.get(source, LAYOUTS)
]
TC_PAIRS = [
    Pair(way=TC_WAITING, source=source, target=target)
    for place, source in enumerate(TC_ORDER)
    for target in (TC_ORDER[(place + distance) % len(TC_ORDER)] for distance in (1, 4))
    if source in SOURCES.get(target, LAYOUTS)
]
PAIRS = [*DCP_PAIRS, *TC_PAIRS]
SAVES = [*((DISABLED, each) for each in LAYOUTS), *((TC_WAITING, each) for each in TC_ORDER)]


def name_of(way: Way, layout: Layout) -> str:
    return f"{way.format.backend} {layout}"


def config_of(folder: str, name: str, layout: Layout, **checkpoint: Any) -> Recorded.Config:
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


def save_in_each(folder: str, layouts: list[Layout]) -> dict[Any, Trace]:
    """Two steps in each layout with each manager, and the state as it was saved after them."""
    traces = {}
    for way, layout in SAVES:
        if layout in layouts:
            name = name_of(way, layout)
            config = config_of(folder, name, layout, interval=SAVED_STEP, **way.settings)
            traces[name] = run(config, crash_after=SAVED_STEP)
    return traces


def load_in_each(folder: str, layouts: list[Layout]) -> dict[Any, Trace]:
    """The next step after what was saved, by pair."""
    traces = {}
    for pair in PAIRS:
        if pair.target in layouts:
            name = name_of(pair.way, pair.source)
            config = config_of(folder, name, pair.target, load_only=True, **pair.way.settings)
            traces[str(pair)] = run(config, crash_after=SAVED_STEP + 1, with_state=False)
    return traces


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
    """The traces of a save under its name, and of a pair."""
    found: dict[Any, list[Trace]] = {}
    # Eight ranks load what the others saved, and then the others load.
    for num_ranks in (1, 2, 4):
        found |= _on_ranks(num_ranks, save_in_each, folder)
    found |= _on_ranks(8, save_and_load, folder)
    for num_ranks in (1, 2, 4):
        found |= _on_ranks(num_ranks, load_in_each, folder)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_checkpoint_loads_into_any_layout_bit_for_bit(
    pair: Pair, made: dict[Any, list[Trace]], whole: Trace
) -> None:
    before, after = made[name_of(pair.way, pair.source)], made[str(pair)]
    step = SAVED_STEP + 1
    for rank in after:
        assert rank.resumed_from == SAVED_STEP
        assert rank.loaded == before[0].state
        assert rank.losses[step] == pytest.approx(whole.losses[step], rel=1e-4)
    assert samples_in_order(after, step, pair.target) == samples_in_order([whole], step, ONE)


@pytest.mark.ranks
@pytest.mark.parametrize(("way", "layout"), SAVES, ids=str)
def test_what_a_layout_saves_does_not_depend_on_it_nor_on_the_manager(
    way: Way, layout: Layout, made: dict[Any, list[Trace]], folder: str, whole: Trace
) -> None:
    ranks = made[name_of(way, layout)]
    assert all(rank.state == ranks[0].state for rank in ranks), "ranks disagree on one state"
    for step in range(1, SAVED_STEP + 1):
        assert samples_in_order(ranks, step, layout) == samples_in_order([whole], step, ONE)
        assert ranks[0].losses[step] == pytest.approx(whole.losses[step], rel=1e-4)
    reference = _contents(outline_of(_index_of(folder, ONE)))
    if way == TC_WAITING:
        saved = look(DurableStorageConfig().create_storage(), str(_path(folder, way, layout)))
        assert _contents(saved.outline) == reference
        written, sizes = shares_of(_path(folder, way, layout))
        for name, (shape, _) in reference.items():
            assert shape is None or written[name] == prod(shape), f"{name} is not there once"
        assert len(sizes) == layout.num_ranks and unevenness(sizes) <= 1.1
        return
    index = _index_of(folder, layout)
    assert _contents(outline_of(index)) == reference
    # What several ranks hold is written by one of them, and the files hold nothing else.
    for name, entry in index.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            written = sum(chunk.sizes.numel() for chunk in entry.chunks)
            assert written == entry.size.numel(), f"{name} is there in part or more than once"
    pieces = index.storage_data.values()
    assert sum(piece.length for piece in pieces) == sum(
        file.stat().st_size for file in _path(folder, way, layout).glob("*.distcp")
    )


def test_torch_checkpointing_saves_and_loads_every_layout_of_up_to_four_ranks() -> None:
    few = {layout for layout in LAYOUTS if layout.num_ranks <= 4}
    assert {pair.source for pair in TC_PAIRS} == {pair.target for pair in TC_PAIRS} == few
    counts = {(pair.source.num_ranks, pair.target.num_ranks) for pair in TC_PAIRS}
    assert counts == {(one, other) for one in (1, 2, 4) for other in (1, 2, 4)} - {(1, 1)}


def _contents(outline: Mapping[str, SavedEntry]) -> dict[str, Any]:
    """Shape and type of every entry, except those that each rank has for itself."""
    return {
        name: (entry.shape, entry.dtype)
        for name, entry in outline.items()
        if not name.startswith("rank_state.")
    }


def _index_of(folder: str, layout: Layout) -> Metadata:
    return FileSystemReader(_path(folder, DISABLED, layout)).read_metadata()


def _path(folder: str, way: Way, layout: Layout) -> Path:
    return Path(folder, name_of(way, layout), "checkpoint", f"step-{SAVED_STEP}")
