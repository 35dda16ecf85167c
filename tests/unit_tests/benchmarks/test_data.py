"""The measurements run on small sizes, and the cache that one of them makes is a real one."""

from pathlib import Path

from benchmarks.data import made_up_corpus, measure_restore, ROW_TOKENS, table_of
from torchtitan.components.data.token_cache import open_store


def test_a_made_up_corpus_is_a_cache_like_any_other(tmp_path: Path) -> None:
    store = open_store(made_up_corpus(tmp_path, 30, ROW_TOKENS))
    assert (store.num_documents, store.num_inputs) == (30, 30 * ROW_TOKENS)


def test_restoring_is_measured_for_each_size(tmp_path: Path) -> None:
    found = measure_restore(tmp_path, (1_000, 2_000))
    assert sorted(found["median_ms_by_rows"]) == ["1000", "2000"]
    assert found["largest_over_smallest"] > 0
    assert len(table_of({"restore": found})) == 3
