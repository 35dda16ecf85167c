import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torchtitan.components.data import (
    ConcatThenSplitPackingConfig,
    DatasetConcatConfig,
    DatasetMixConfig,
    FirstFitPackingConfig,
    IndexedJsonlSource,
    SingleDatasetConfig,
    WeightedDataset,
)
from torchtitan.components.data.mix import Turns
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from tests.unit_tests.components.data.streams import LinesStream, MakeLoader, take, write_lines


def letters(tmp_path: Path, letter: str, num_lines: int, stream: bool = False) -> Any:
    path = write_lines(tmp_path / f"{letter}.jsonl", [f"{letter} {letter} {letter}"] * num_lines)
    if stream:
        return SingleDatasetConfig(source=LinesStream.Config(path=str(path)))
    return SingleDatasetConfig(source=IndexedJsonlSource.Config(patterns=(str(path),)))


def mix_of(datasets: Sequence[Any], weights: Sequence[float]) -> DatasetMixConfig:
    parts = zip(datasets, weights, strict=True)
    return DatasetMixConfig(
        datasets=[WeightedDataset(dataset=data, weight=weight) for data, weight in parts]
    )


def letter_of(batch: tuple, tokenizer: HuggingFaceTokenizer) -> str:
    """The letter that fills a row."""
    text = tokenizer.decode(list(batch[0])).replace(" ", "")
    assert len(set(text)) == 1, text
    return text[0]


@given(
    weights=st.lists(st.sampled_from([0.1, 0.25, 0.5, 1, 2, 3, 7]), min_size=1, max_size=5),
    position=st.integers(0, 2000),
)
def test_turns_follow_the_weights_and_count_without_gaps(
    weights: list[float], position: int
) -> None:
    turns = Turns(weights)
    counts: Counter[int] = Counter()
    for place in range(position):
        part, before = turns.at(place)
        assert before == counts[part] and turns.position_of(part, before) == place
        counts[part] += 1
    for part, weight in enumerate(weights):
        assert abs(counts[part] - position * weight / sum(weights)) < len(weights) + 1


def test_weights_that_fit_no_short_period_are_kept_nearly() -> None:
    weights = [math.pi, 1 / 3, 1e-9]
    turns = Turns(weights)
    counts = Counter(turns.at(place)[0] for place in range(20_000))
    assert counts[0] / counts[1] == pytest.approx(math.pi * 3, rel=0.01)
    assert turns.position_of(2, 0) < 2**18


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_weights_that_mean_nothing_are_refused_by_number(tmp_path: Path, weight: float) -> None:
    data = letters(tmp_path, "a", 1)
    with pytest.raises(ValueError, match=f"positive-weight .* found {weight} at number 1"):
        mix_of([data, data], [1.0, weight])


@pytest.mark.parametrize("streams", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("packing", [ConcatThenSplitPackingConfig, FirstFitPackingConfig])
def test_rows_come_in_the_share_of_the_weights(
    make_loader: MakeLoader,
    tokenizer: HuggingFaceTokenizer,
    tmp_path: Path,
    streams: tuple[bool, bool],
    packing: Any,
) -> None:
    parts = [letters(tmp_path, "a", 9, streams[0]), letters(tmp_path, "b", 30, streams[1])]
    loader = make_loader(dataset=packing(dataset=mix_of(parts, [3, 1])), row_length=8)
    found = [letter_of(batch, tokenizer) for batch in take(loader, 40)]
    assert Counter(found) == {"a": 30, "b": 10}
    assert loader.state_dict()["fingerprint"]["packing"].startswith("mix [3, 1] of (")


def test_packed_datasets_can_be_mixed_too(make_loader: MakeLoader, tmp_path: Path) -> None:
    parts = [letters(tmp_path, "a", 9), letters(tmp_path, "b", 30)]
    inside = ConcatThenSplitPackingConfig(dataset=mix_of(parts, [3, 1]))
    outside = mix_of([ConcatThenSplitPackingConfig(dataset=part) for part in parts], [3, 1])
    loaders = [make_loader(dataset=data, row_length=8) for data in (inside, outside)]
    assert take(loaders[0], 30) == take(loaders[1], 30)
    with pytest.raises(ValueError, match="number 0 is packed, number 1 is not"):
        make_loader(dataset=mix_of([inside, parts[0]], [1, 1]), row_length=8)


def test_each_part_is_shuffled_with_a_seed_of_its_own(
    make_loader: MakeLoader, corpus: Path
) -> None:
    alone = SingleDatasetConfig(source=IndexedJsonlSource.Config(patterns=(str(corpus),)))
    mixed = make_loader(dataset=ConcatThenSplitPackingConfig(dataset=mix_of([alone] * 2, [1, 1])))
    rows = take(mixed, 20)
    for number in range(2):
        expected = make_loader(
            dataset=ConcatThenSplitPackingConfig(dataset=alone), seed=42 + number
        )
        assert rows[number::2] == take(expected, 10)


@pytest.mark.parametrize("streams", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("world", [1, 2])
def test_a_mix_without_repeat_ends_with_its_first_part(
    make_loader: MakeLoader, tmp_path: Path, streams: tuple[bool, bool], world: int
) -> None:
    # 10 documents of 4 inputs make 5 rows of 8; 90 make 45, of which 3 go with each of the 5.
    parts = [letters(tmp_path, "a", 90, streams[0]), letters(tmp_path, "b", 10, streams[1])]
    data = ConcatThenSplitPackingConfig(dataset=mix_of(parts, [3, 1]))
    layout = {"dataset": data, "row_length": 8, "repeat": False, "world": world}
    lengths = [len(list(make_loader(rank=rank, **layout))) for rank in range(world)]
    assert lengths == [22 // world] * world


def test_documents_of_a_concatenation_share_rows(
    make_loader: MakeLoader, tmp_path: Path, corpus: Path
) -> None:
    lines = corpus.read_text().splitlines(keepends=True)
    halves = []
    for name, part in (("one", lines[:9]), ("two", lines[9:])):
        (tmp_path / name).write_text("".join(part))
        source = IndexedJsonlSource.Config(patterns=(str(tmp_path / name),))
        halves.append(SingleDatasetConfig(source=source))
    for packing in (ConcatThenSplitPackingConfig, FirstFitPackingConfig):
        whole = SingleDatasetConfig(source=IndexedJsonlSource.Config(patterns=(str(corpus),)))
        expected = make_loader(dataset=packing(dataset=whole), row_length=128)
        joined = packing(dataset=DatasetConcatConfig(datasets=halves))
        assert take(make_loader(dataset=joined, row_length=128), 30) == take(expected, 30)


def test_a_concatenation_of_streams_or_mixes_is_refused(
    make_loader: MakeLoader, tmp_path: Path
) -> None:
    corpus, stream = letters(tmp_path, "a", 3), letters(tmp_path, "b", 3, stream=True)
    for other in (stream, mix_of([corpus], [1])):
        data = ConcatThenSplitPackingConfig(dataset=DatasetConcatConfig(datasets=[corpus, other]))
        with pytest.raises(TypeError, match="needs map-style children.* at number 1"):
            make_loader(dataset=data)
    streamed = DatasetConcatConfig(datasets=[corpus, stream])
    assert "found a stream at number 1" in ConcatThenSplitPackingConfig(dataset=streamed).check()[0]


def test_nothing_to_mix_or_to_put_together_is_refused() -> None:
    for config in (DatasetMixConfig, DatasetConcatConfig):
        with pytest.raises(ValueError, match="datasets is empty"):
            config(datasets=[])


def test_a_changed_weight_is_named_at_a_resume(make_loader: MakeLoader, tmp_path: Path) -> None:
    parts = [letters(tmp_path, "a", 9), letters(tmp_path, "b", 30)]
    loaders = [
        make_loader(
            dataset=ConcatThenSplitPackingConfig(dataset=mix_of(parts, weights)), row_length=8
        )
        for weights in ([3, 1], [1, 1])
    ]
    with pytest.raises(ValueError, match=r"the packing changed .*mix \[3, 1\].*mix \[1, 1\]"):
        loaders[1].load_state_dict(loaders[0].state_dict())
