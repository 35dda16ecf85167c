"""A run that is stopped at every step meets the rows of one that never was.

23 documents, 3 epochs, both packings, a corpus and a stream, in the rank itself and in two workers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.data import (
    ConcatThenSplitPackingConfig,
    DatasetConfig,
    DatasetMixConfig,
    FirstFitPackingConfig,
    HuggingFaceStreamingSource,
    IndexedJsonlSource,
    SingleDatasetConfig,
    WeightedDataset,
)

from tests.unit_tests.components.data.streams import (
    Batch,
    ids_of,
    LinesStream,
    MakeLoader,
    take,
    through_json,
)

ROW_LENGTH, ROWS = 128, 4
LAYOUT: dict[str, Any] = {
    "row_length": ROW_LENGTH,
    "rows": ROWS,
    # Several blocks of the stream in each epoch, and one that is not full.
    "streaming_shuffle_buffer_size": 8,
}
Source = Callable[[Path], Any]


def lines_on_disk(corpus: Path) -> Any:
    return IndexedJsonlSource.Config(patterns=(str(corpus),))


def lines_in_turn(corpus: Path) -> Any:
    return LinesStream.Config(path=str(corpus))


def hugging_face_stream(corpus: Path) -> Any:
    files = {"data_files": str(corpus)}
    return HuggingFaceStreamingSource.Config(path="json", split="train", load_dataset_kwargs=files)


def dataset_of(packing: Callable[..., DatasetConfig], source: Any) -> DatasetConfig:
    return packing(dataset=SingleDatasetConfig(source=source))


def three_epochs(loader: Any) -> tuple[list[Batch], list[dict]]:
    """The batches of a run into its fourth epoch, and the state after each."""
    batches, states, epoch = [], [], 0
    while epoch < 3:
        batches += take(loader, 1)
        state = through_json(loader.state_dict())
        states.append(state)
        epoch = json.loads(state["stream"])["epoch"] if "stream" in state else state["epoch"]
    return batches, states


def stopped_at_every_step(
    make: Callable[[], Any], num_steps: int
) -> tuple[list[Batch], list[dict]]:
    """The batches of a run of which every step is a run of its own, and the state after each."""
    batches, states, state = [], [], None
    for _ in range(num_steps):
        loader = make()
        loader.load_state_dict(state)
        batches += take(loader, 1)
        state = through_json(loader.state_dict())
        states.append(state)
        loader.close()
    return batches, states


@pytest.mark.parametrize("source", [lines_on_disk, lines_in_turn, hugging_face_stream])
@pytest.mark.parametrize("packing", [ConcatThenSplitPackingConfig, FirstFitPackingConfig])
def test_every_step_of_three_epochs_can_be_the_last(
    make_loader: MakeLoader, corpus: Path, source: Source, packing: Callable[..., DatasetConfig]
) -> None:
    data = dataset_of(packing, source(corpus))

    def make(**settings: Any) -> Any:
        return make_loader(dataset=data, **LAYOUT, **settings)

    batches, states = three_epochs(make(num_prefetch_batches=2))
    assert stopped_at_every_step(make, len(batches)) == (batches, states)


@pytest.mark.parametrize("source", [lines_on_disk, lines_in_turn])
@pytest.mark.parametrize("packing", [ConcatThenSplitPackingConfig, FirstFitPackingConfig])
def test_workers_change_nothing_and_every_step_of_theirs_can_be_the_last(
    make_loader: MakeLoader, corpus: Path, source: Source, packing: Callable[..., DatasetConfig]
) -> None:
    data = dataset_of(packing, source(corpus))
    expected, states = three_epochs(make_loader(dataset=data, **LAYOUT))

    def make() -> Any:
        return make_loader(dataset=data, num_workers=2, num_prefetch_batches=1, **LAYOUT)

    assert take(make(), len(expected)) == expected
    assert stopped_at_every_step(make, len(expected)) == (expected, states)


@pytest.mark.parametrize("source", [lines_on_disk, lines_in_turn, hugging_face_stream])
@pytest.mark.parametrize("packing", [ConcatThenSplitPackingConfig, FirstFitPackingConfig])
def test_two_ranks_then_one_then_four_keep_the_global_order(
    make_loader: MakeLoader, corpus: Path, source: Source, packing: Callable[..., DatasetConfig]
) -> None:
    data = dataset_of(packing, source(corpus))
    layout = {**LAYOUT, "rows": 1, "dataset": data, "allow_changed_degree": True}
    straight = take(make_loader(**layout), 24)
    seen: list[Batch] = []
    state = None
    for world, microbatches in [(2, 4), (1, 4), (4, 3)]:
        loaders = [make_loader(world=world, rank=rank, **layout) for rank in range(world)]
        for loader in loaders:
            loader.load_state_dict(state)
        seen += [ids_of(next(each)) for _ in range(microbatches) for each in loaders]
        states = [through_json(loader.state_dict()) for loader in loaders]
        assert all(found == states[0] for found in states)
        state = states[0]
        for loader in loaders:
            loader.close()
    assert seen == straight


@pytest.mark.parametrize(
    "sources", [(lines_on_disk, lines_on_disk), (lines_on_disk, lines_in_turn)]
)
def test_a_mix_is_resumed_at_every_step(
    make_loader: MakeLoader, corpus: Path, sources: tuple[Source, Source]
) -> None:
    parts = [
        WeightedDataset(dataset=SingleDatasetConfig(source=source(corpus)), weight=weight)
        for source, weight in zip(sources, (3.0, 1.0), strict=True)
    ]
    data = ConcatThenSplitPackingConfig(dataset=DatasetMixConfig(datasets=parts))

    def make() -> Any:
        return make_loader(dataset=data, **LAYOUT)

    straight = make()
    batches, states = [], []
    for _ in range(12):
        batches += take(straight, 1)
        states.append(through_json(straight.state_dict()))
    assert stopped_at_every_step(make, len(batches)) == (batches, states)


def test_a_stream_is_read_again_from_the_block_in_hand_only(
    make_loader: MakeLoader, corpus: Path
) -> None:
    data = dataset_of(ConcatThenSplitPackingConfig, lines_in_turn(corpus))
    layout = {**LAYOUT, "rows": 1, "dataset": data}
    loader = make_loader(**layout)
    read = []
    for _ in range(12):
        take(loader, 1)
        fresh = make_loader(**layout)
        fresh.load_state_dict(through_json(loader.state_dict()))
        LinesStream.opened.clear()
        take(fresh, 1)
        read += LinesStream.opened[:1]
    # Blocks of 8 documents; the last of an epoch holds 7.
    assert sorted(set(read)) == [0, 8, 16]
