from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from torchtitan.components.data.corpus import TokenizedCorpus
from torchtitan.components.data.packing import PackedRows, SplitTable
from torchtitan.components.data.token_cache import TokenStore
from torchtitan.components.data.types import DatasetIterationPolicy, TextSequence

POLICY = DatasetIterationPolicy(seed=0, shuffle=False, repeat=True, dp_rank=0, dp_world_size=1)
documents_strategy = st.lists(
    st.lists(st.integers(0, 65535), min_size=2, max_size=30), min_size=1, max_size=20
)


def store_of(documents: list[list[int]], dtype: type = np.uint16) -> TokenStore:
    lengths = [len(document) - 1 for document in documents]
    tokens = [token for document in documents for token in document]
    return TokenStore(
        tokens=np.array(tokens, dtype=dtype), starts=np.cumsum([0, *lengths], dtype=np.int64)
    )


def corpus_of(*stores: TokenStore) -> TokenizedCorpus:
    return TokenizedCorpus(stores, "corpus", "tokenizer")


def positions(row: TextSequence) -> list[int]:
    assert row.positions is not None
    return row.positions.tolist()


def rows_one_token_at_a_time(documents: list[list[int]], length: int) -> list[list[tuple]]:
    """(input, label, position) of each row, the slow and obvious way."""
    rows, row, position = [], [], 0
    for document in documents:
        position = 0
        for token, following in pairwise(document):
            row.append((token, following, position))
            position += 1
            if len(row) == length:
                rows.append(row)
                row, position = [], 0
    return rows


@settings(max_examples=60, deadline=None)
@given(documents=documents_strategy, length=st.integers(1, 40))
def test_rows_equal_those_of_a_walk_token_by_token(documents: list[list[int]], length: int) -> None:
    store = store_of(documents)
    expected = rows_one_token_at_a_time(documents, length)
    assert len(expected) == store.num_inputs // length
    for number, row in enumerate(expected):
        packed = store.span(number * length, length)
        columns = packed.input_ids.tolist(), packed.labels.tolist(), positions(packed)
        found = zip(*columns, strict=True)
        assert list(found) == row


def test_labels_stay_in_their_document_and_cross_the_row_end() -> None:
    # Two documents, 4 and 3 inputs; rows of 3.
    store = store_of([[1, 10, 11, 12, 2], [1, 20, 21, 2]])
    first, second = store.span(0, 3), store.span(3, 3)
    assert first.input_ids.tolist() == [1, 10, 11]
    assert first.labels.tolist() == [10, 11, 12]
    assert second.input_ids.tolist() == [12, 1, 20]
    assert second.labels.tolist() == [2, 20, 21]
    assert positions(second) == [0, 0, 1]


def test_a_document_of_several_rows_starts_at_position_0_in_each() -> None:
    store = store_of([list(range(9))])
    assert positions(store.span(0, 4)) == positions(store.span(4, 4)) == [0, 1, 2, 3]


def test_rows_are_int64_whatever_the_cache_holds() -> None:
    for dtype in (np.uint16, np.uint32):
        row = store_of([[60000, 60001, 60002]], dtype).span(0, 2)
        for array in (row.input_ids, row.labels, row.positions):
            assert array is not None and array.dtype == np.int64


def test_what_fills_no_row_is_left_out_and_said() -> None:
    corpus = corpus_of(store_of([[1, 5, 6, 7, 8, 9]]))
    rows = PackedRows(corpus, SplitTable(corpus, 2), POLICY)
    assert len(rows) == 2
    assert "the last 1 tokens fill no row" in rows.summary()


def test_a_corpus_shorter_than_a_row_is_refused() -> None:
    corpus = corpus_of(store_of([[1, 5, 2]]))
    with pytest.raises(ValueError, match="rows of 3 tokens, found 2 tokens in 1 documents"):
        PackedRows(corpus, SplitTable(corpus, 3), POLICY)
