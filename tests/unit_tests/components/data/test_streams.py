"""What a stream promises beside the exact resume, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torchtitan.components.data import (
    ConcatThenSplitPackingConfig,
    FirstFitPackingConfig,
    IndexedJsonlSource,
    SingleDatasetConfig,
)
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from tests.unit_tests.components.data.streams import (
    ids_of,
    LinesStream,
    MakeLoader,
    take,
    write_lines,
)


def stream_of(path: Path, **fields: Any) -> ConcatThenSplitPackingConfig:
    source = LinesStream.Config(path=str(path))
    return ConcatThenSplitPackingConfig(dataset=SingleDatasetConfig(source=source, **fields))


@pytest.mark.parametrize("packing", [ConcatThenSplitPackingConfig, FirstFitPackingConfig])
def test_the_rows_are_those_of_the_same_documents_as_a_corpus(
    make_loader: MakeLoader, corpus: Path, packing: Any
) -> None:
    lines = IndexedJsonlSource.Config(patterns=(str(corpus),))
    rows = [
        [
            ids_of(batch)
            for batch in make_loader(
                dataset=packing(dataset=SingleDatasetConfig(source=source)),
                row_length=128,
                shuffle=False,
                repeat=False,
            )
        ]
        for source in (lines, LinesStream.Config(path=str(corpus)))
    ]
    assert len(rows[0]) > 3 and rows[0] == rows[1]


def test_a_changed_number_of_ranks_needs_the_flag(make_loader: MakeLoader, corpus: Path) -> None:
    data = stream_of(corpus)
    state = make_loader(dataset=data, world=2).state_dict()
    other = make_loader(dataset=data, world=3)
    with pytest.raises(ValueError, match="data-parallel degree 2, this one has 3") as caught:
        other.load_state_dict(state)
    assert "--dataloader.allow-changed-degree" in str(caught.value)
    make_loader(dataset=data, world=3, allow_changed_degree=True).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"seed": 7}, "packing"),
        ({"shuffle": False}, "packing"),
        ({"streaming_shuffle_buffer_size": 5}, "packing"),
        ({"row_length": 8}, "packing"),
    ],
)
def test_a_changed_order_is_named(
    make_loader: MakeLoader, corpus: Path, settings: dict[str, Any], name: str
) -> None:
    data = stream_of(corpus)
    state = make_loader(dataset=data).state_dict()
    with pytest.raises(ValueError, match=f"the {name} changed"):
        make_loader(dataset=data, **settings).load_state_dict(state)


@pytest.mark.parametrize("is_stream", [False, True])
def test_another_tokenizer_is_named(
    make_loader: MakeLoader,
    corpus: Path,
    tmp_path: Path,
    tokenizer: HuggingFaceTokenizer,
    is_stream: bool,
) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(tokenizer.tokenizer_path, folder)
    file = folder / "tokenizer.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "Lowercase"}})
    )
    other = HuggingFaceTokenizer(tokenizer_path=str(folder))
    layout: dict[str, Any] = {"dataset": stream_of(corpus)} if is_stream else {}
    state = make_loader(**layout).state_dict()
    changed = make_loader(other_tokenizer=other, **layout)
    with pytest.raises(ValueError, match="the tokenizer changed") as caught:
        changed.load_state_dict(state)
    for digest in (tokenizer.fingerprint(), other.fingerprint()):
        assert digest in str(caught.value)


def test_another_source_is_named(make_loader: MakeLoader, corpus: Path, tmp_path: Path) -> None:
    state = make_loader(dataset=stream_of(corpus)).state_dict()
    other = write_lines(tmp_path / "other.jsonl", ["words " * 30])
    with pytest.raises(ValueError, match="the corpus changed"):
        make_loader(dataset=stream_of(other)).load_state_dict(state)
    with pytest.raises(ValueError, match="the corpus and the packing changed"):
        make_loader().load_state_dict(state)


def test_shuffling_moves_documents_within_the_buffer_and_anew_in_each_epoch(
    make_loader: MakeLoader, corpus: Path
) -> None:
    layout = {"row_length": 32, "streaming_shuffle_buffer_size": 8, "repeat": False}
    plain = list(make_loader(dataset=stream_of(corpus), shuffle=False, **layout))
    shuffled = list(make_loader(dataset=stream_of(corpus), **layout))
    assert len(plain) == len(shuffled)
    assert any(a[1].tolist() != b[1].tolist() for a, b in zip(plain, shuffled, strict=True))
    layout["repeat"] = True
    twice = take(make_loader(dataset=stream_of(corpus), **layout), 2 * len(plain))
    assert twice[: len(plain)] != twice[len(plain) :]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_without_repeat_all_ranks_stop_at_the_same_batch(
    make_loader: MakeLoader, corpus: Path, world: int, prefetch: int
) -> None:
    layout = {"dataset": stream_of(corpus), "row_length": 32, "repeat": False}
    total = len(list(make_loader(**layout)))
    layout |= {"world": world, "num_prefetch_batches": prefetch}
    loaders = [make_loader(rank=rank, **layout) for rank in range(world)]
    assert {len(list(loader)) for loader in loaders} == {total // world}
    for loader in loaders:
        assert list(loader) == []
        assert loader.state_dict() == loaders[0].state_dict()
    again = make_loader(**layout)
    again.load_state_dict(loaders[0].state_dict())
    assert list(again) == []


def test_the_state_survives_a_checkpoint_into_a_fresh_loader(
    make_loader: MakeLoader, corpus: Path, tmp_path: Path
) -> None:
    layout = {"dataset": stream_of(corpus), "streaming_shuffle_buffer_size": 8}
    loader = make_loader(**layout)
    take(loader, 7)
    expected = loader.state_dict()
    dcp.save({"dataloader": loader}, checkpoint_id=tmp_path, no_dist=True)
    fresh = make_loader(**layout)
    dcp.load({"dataloader": fresh}, checkpoint_id=tmp_path, no_dist=True)
    assert fresh.state_dict() == expected
    assert take(fresh, 2) == take(loader, 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_empty_stream_is_refused(make_loader: MakeLoader, tmp_path: Path, workers: int) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    loader = make_loader(dataset=stream_of(empty), num_workers=workers)
    with pytest.raises(ValueError, match="the stream lines of empty.jsonl is empty"):
        next(loader)


def test_a_stream_of_which_a_filter_leaves_nothing_is_refused(
    make_loader: MakeLoader, corpus: Path
) -> None:
    loader = make_loader(dataset=stream_of(corpus, pre_filters=(nothing,)))
    with pytest.raises(ValueError, match="the data holds no document"):
        next(loader)


def nothing(fields: dict[str, Any]) -> bool:
    return False


def test_a_stream_shorter_than_a_row_is_refused(make_loader: MakeLoader, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "lines.jsonl", ["short"])
    with pytest.raises(ValueError, match="makes no row of 64 tokens in epoch 0"):
        next(make_loader(dataset=stream_of(lines), row_length=64))


def test_a_broken_document_is_named_and_met_again(make_loader: MakeLoader, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "fine"}\n{"other": 1}\n')
    loader = make_loader(dataset=stream_of(lines), num_prefetch_batches=2)
    for _ in range(2):
        with pytest.raises(
            ValueError, match="line 2: no field 'text'; fields that are there: other"
        ):
            next(loader)


def test_a_stream_too_short_for_one_batch_of_all_ranks_is_refused(
    make_loader: MakeLoader, tmp_path: Path
) -> None:
    lines = write_lines(tmp_path / "lines.jsonl", ["one two three four five"])
    layout = {"dataset": stream_of(lines), "row_length": 4, "world": 8, "repeat": False}
    for rank in (0, 7):
        with pytest.raises(
            ValueError, match="makes no batch: the stream ended after [12] rows, one"
        ):
            next(make_loader(rank=rank, **layout))


def test_a_source_that_has_nothing_to_check_is_not_refused(corpus: Path) -> None:
    assert LinesStream.Config(path=str(corpus)).probe() is None
    assert stream_of(corpus).check() == []
