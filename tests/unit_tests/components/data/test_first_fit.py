import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from torchtitan.components.data import FirstFitPackingConfig, SingleDatasetConfig
from torchtitan.components.data.corpus import TokenizedCorpus
from torchtitan.components.data.first_fit import first_fit
from torchtitan.components.data.packing import fitted_table, PackedRows
from torchtitan.components.data.sources import LocalFilesSource
from torchtitan.components.data.types import DatasetIterationPolicy

from tests.unit_tests.components.data.streams import LinesStream, MakeLoader, write_lines
from tests.unit_tests.components.data.test_packing import corpus_of, store_of

POLICY = DatasetIterationPolicy(seed=0, shuffle=False, repeat=True, dp_rank=0, dp_world_size=1)


def corpus_with(lengths: list[int]) -> TokenizedCorpus:
    """Documents of that many inputs; every token tells the number of its document."""
    return corpus_of(store_of([[number] * (n + 1) for number, n in enumerate(lengths)]))


def test_a_document_goes_into_the_first_row_that_has_room() -> None:
    # Rows of 10, 2 open ones: 6 | 5 | 4 into the first | 6 fits in none and opens new ones.
    assert list(first_fit([6, 5, 4, 6, 3, 11, 4], 10, 2)) == [[0, 2], [1], [3, 4], [6]]


@given(
    lengths=st.lists(st.integers(1, 12), max_size=40),
    num_bins=st.integers(1, 5),
)
def test_every_document_that_fits_is_in_exactly_one_row(lengths: list[int], num_bins: int) -> None:
    rows = list(first_fit(lengths, 10, num_bins))
    placed = [number for row in rows for number in row]
    assert sorted(placed) == [number for number, length in enumerate(lengths) if length <= 10]
    assert all(0 < sum(lengths[number] for number in row) <= 10 for row in rows)


def test_rows_hold_whole_documents_and_padding_that_counts_in_no_loss(tmp_path: Path) -> None:
    table = fitted_table(corpus_with([3, 4, 2]), 8, 8, tmp_path)
    row, second = [table[number] for number in range(len(table))]
    assert row.positions is not None
    assert row.input_ids.tolist() == [0, 0, 0, 1, 1, 1, 1, 0]
    assert row.labels.tolist() == [0, 0, 0, 1, 1, 1, 1, -100]
    assert row.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert second.labels.tolist() == [2, 2, -100, -100, -100, -100, -100, -100]
    assert row.input_ids.dtype == row.labels.dtype == np.int64


def test_documents_longer_than_a_row_are_counted_and_said(tmp_path: Path) -> None:
    corpus = corpus_with([9, 3, 8, 12])
    rows = PackedRows(corpus, fitted_table(corpus, 8, 8, tmp_path), POLICY)
    assert len(rows) == 2
    assert "2 longer than a row are left out" in rows.summary()
    long = corpus_with([9, 9, 9])
    table = fitted_table(long, 8, 4, tmp_path)
    with pytest.raises(ValueError, match="makes no row: asked for first-fit.*3 longer than a row"):
        PackedRows(long, table, POLICY)


def test_rows_are_placed_once_and_then_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fitted_table(corpus_with([3, 4, 2]), 8, 8, tmp_path)

    def never_called(*arguments: object) -> Iterator[list[int]]:
        raise AssertionError("placed again")

    monkeypatch.setattr("torchtitan.components.data.packing.first_fit", never_called)
    again = fitted_table(corpus_with([3, 4, 2]), 8, 8, tmp_path)
    assert [again[n].labels.tolist() for n in range(2)] == [
        first[n].labels.tolist() for n in range(2)
    ]


@pytest.mark.parametrize("bins", [0, -1])
def test_no_open_row_is_refused(bins: int) -> None:
    source = LocalFilesSource.Config(patterns=["x.txt"])
    with pytest.raises(ValueError, match=f"num_packing_bins is {bins}"):
        FirstFitPackingConfig(dataset=SingleDatasetConfig(source=source), num_packing_bins=bins)


def test_a_stream_reports_what_is_too_long(
    make_loader: MakeLoader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = write_lines(tmp_path / "lines.jsonl", ["a few words", "many words " * 40] * 5)
    source = LinesStream.Config(path=str(lines))
    data = FirstFitPackingConfig(dataset=SingleDatasetConfig(source=source))
    loader = make_loader(dataset=data, row_length=16, repeat=False)
    assert len(list(islice(loader, 10))) > 0
    assert "first-fit left out 1 of " in caplog.text
    total = "first-fit left out 5 of 10 documents that were read in epoch 0"
    assert caplog.text.count(total) == 1


def test_a_stream_reports_the_total_of_each_epoch_on_one_rank(
    make_loader: MakeLoader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = write_lines(tmp_path / "lines.jsonl", ["a few words", "many words " * 40] * 5)
    source = LinesStream.Config(path=str(lines))
    data = FirstFitPackingConfig(dataset=SingleDatasetConfig(source=source))
    layout = {"dataset": data, "row_length": 16, "world": 2}
    state, epoch = None, -1
    loader = make_loader(rank=0, **layout)
    while epoch < 2:
        next(loader)
        state = loader.state_dict()
        epoch = json.loads(state["stream"])["epoch"]
    totals = re.findall(r"out (\d+ of \d+) documents .* in epoch (\d+)", caplog.text)
    # The rows of the third epoch lie behind all of its documents.
    assert totals == [("5 of 10", "0"), ("5 of 10", "1"), ("5 of 10", "2")]
    caplog.clear()
    other = make_loader(rank=1, **layout)
    other.load_state_dict(state)
    assert len(list(islice(other, 10))) == 10 and "left out" not in caplog.text


def test_a_stream_of_which_nothing_fits_is_refused(make_loader: MakeLoader, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "lines.jsonl", ["many words " * 40] * 5)
    source = LinesStream.Config(path=str(lines))
    data = FirstFitPackingConfig(dataset=SingleDatasetConfig(source=source))
    with pytest.raises(ValueError, match="makes no row of 16 tokens in epoch 0"):
        next(make_loader(dataset=data, row_length=16))
