"""Cut the corpus into rows of one length.

All documents are laid end to end and cut every ``max_context_length`` tokens; what is left at the
end of the corpus fills no row and is left out. The one fact to know: the cut is made once, in the
order of the corpus, so row i is the same tokens in every epoch, and shuffling moves whole rows.

    token_cache -> pack_row -> PackedRows (RowDataset, in the order of order.py) -> loader
"""

from dataclasses import dataclass

import numpy as np

from torchtitan.components.data.dataset import DatasetConfig, SingleDatasetConfig, TokenizedCorpus
from torchtitan.components.data.order import RowOrder
from torchtitan.components.data.token_cache import TokenStore
from torchtitan.components.data.types import (
    DataFingerprint,
    DatasetBuildContext,
    DatasetIterationPolicy,
    RowDataset,
    TextSequence,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConcatThenSplitPackingConfig(DatasetConfig):
    """Rows of exactly ``max_context_length`` tokens, documents cut where a row is full."""

    dataset: SingleDatasetConfig
    """The documents to pack."""

    def build(
        self, *, context: DatasetBuildContext, dataset_iteration_policy: DatasetIterationPolicy
    ) -> RowDataset:
        corpus = self.dataset.build(
            context=context, dataset_iteration_policy=dataset_iteration_policy
        )
        return PackedRows(corpus, context.max_context_length, dataset_iteration_policy)

    def check(self) -> list[str]:
        return self.dataset.check()


class PackedRows(RowDataset):
    """The rows of a tokenized corpus."""

    def __init__(
        self, corpus: TokenizedCorpus, row_length: int, policy: DatasetIterationPolicy
    ) -> None:
        num_rows, self._left_over = divmod(corpus.store.num_inputs, row_length)
        if num_rows == 0:
            raise ValueError(
                f"the data makes no row: asked for rows of {row_length} tokens, found "
                f"{corpus.store.num_inputs} tokens in {corpus.store.num_documents} documents. "
                "Lower --training.max_context_length or give more text."
            )
        self._store = corpus.store
        self._row_length = row_length
        self._order = RowOrder(num_rows, policy.seed, policy.shuffle)
        self.fingerprint = DataFingerprint(
            corpus=corpus.digest,
            tokenizer=corpus.tokenizer_digest,
            packing=f"concat-then-split, rows of {row_length} tokens, {self._order.describe()}",
        )

    def __len__(self) -> int:
        return self._order.num_rows

    def row_at(self, position: int) -> TextSequence:
        first = self._order.row_at(position) * self._row_length
        return pack_row(self._store, first, self._row_length)

    def summary(self) -> str:
        return (
            f"{self._store.num_documents:,} documents, {self._store.num_inputs:,} tokens, "
            f"{len(self):,} rows of {self._row_length} tokens an epoch, {self._order.describe()} "
            f"(the last {self._left_over} tokens fill no row)"
        )


def pack_row(store: TokenStore, first: int, length: int) -> TextSequence:
    """Inputs ``first`` to ``first + length`` of the corpus, as int64.

    Labels stay within their document, across the row's end too. Positions restart at 0 at each
    document and at the row's start.
    """
    last = first + length
    low = int(np.searchsorted(store.starts, first, side="right")) - 1
    high = int(np.searchsorted(store.starts, last, side="left"))
    bounds = np.clip(store.starts[low : high + 1], first, last) - first
    lengths = np.diff(bounds)
    offsets = np.arange(length)
    # Each document has one token more than inputs: its last token is a label only.
    picked = offsets + np.repeat(np.arange(high - low), lengths)
    tokens = store.tokens[first + low : last + high].astype(np.int64)
    return TextSequence(
        input_ids=tokens[picked],
        labels=tokens[picked + 1],
        positions=offsets - np.repeat(bounds[:-1], lengths),
    )
