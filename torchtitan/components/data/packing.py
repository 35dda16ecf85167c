"""Make rows of one length of documents: cut them where a row is full, or fill rows with whole ones.

The one fact to know: rows are made once, in the order of the corpus, so row i is the same tokens in
every epoch and for any number of ranks, and shuffling moves whole rows. Rows of a stream
are made as they come, by the same rules, in ``stream_packing.py``.

    TokenizedCorpus -> RowTable (rows by number) -> PackedRows (in the order of order.py) -> loader
    DocumentStream  -> stream_packing.py
    Mixture         -> each of its parts packed by itself -> mix.py
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.components.data import array_cache
from torchtitan.components.data.array_cache import ArrayFolder, ArrayWriter, cache_root
from torchtitan.components.data.corpus import join, TokenizedCorpus
from torchtitan.components.data.dataset import DatasetConfig, digest_of
from torchtitan.components.data.document_stream import DocumentStream
from torchtitan.components.data.first_fit import first_fit
from torchtitan.components.data.mix import mixed_rows, Mixture
from torchtitan.components.data.order import RowOrder
from torchtitan.components.data.stream_packing import ConcatThenSplitStream, FirstFitStream
from torchtitan.components.data.types import (
    DataFingerprint,
    DatasetBuildContext,
    DatasetIterationPolicy,
    RowDataset,
    RowStream,
    TextSequence,
)
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.violations import reject


class RowTable(ABC):
    """Rows of one length by number, in the order of the corpus."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, number: int) -> TextSequence: ...

    @abstractmethod
    def describe(self) -> str:
        """How the rows were made, for the fingerprint."""

    @abstractmethod
    def remainder(self) -> str:
        """What of the corpus is in no row, or how full the rows are; for the log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _PackingConfig(DatasetConfig):
    """What the two ways of packing share."""

    dataset: DatasetConfig
    """The documents to pack."""

    def build(
        self, *, context: DatasetBuildContext, dataset_iteration_policy: DatasetIterationPolicy
    ) -> RowDataset | RowStream:
        documents = self.dataset.build(
            context=context, dataset_iteration_policy=dataset_iteration_policy
        )
        return self._pack(documents, context, dataset_iteration_policy)

    def _pack(
        self, documents: Any, context: DatasetBuildContext, policy: DatasetIterationPolicy
    ) -> RowDataset | RowStream:
        if isinstance(documents, Mixture):
            packed = [self._pack(part.data, context, part.policy) for part in documents.parts]
            return mixed_rows(packed, documents.weights, policy.repeat)
        if isinstance(documents, DocumentStream):
            return self._stream(documents, context)
        if isinstance(documents, TokenizedCorpus):
            return PackedRows(documents, self._table(documents, context), policy)
        raise ValueError(
            f"{type(self).__name__} packs documents, but its dataset makes "
            f"{type(documents).__name__}, which is packed already. Pack once."
        )

    @abstractmethod
    def _table(self, corpus: TokenizedCorpus, context: DatasetBuildContext) -> RowTable: ...

    @abstractmethod
    def _stream(self, documents: DocumentStream, context: DatasetBuildContext) -> RowStream: ...

    def check(self, tokenizer: BaseTokenizer | None = None) -> list[str]:
        return self.dataset.check(tokenizer)

    def is_streamed(self) -> bool:
        return self.dataset.is_streamed()


@dataclass(frozen=True, kw_only=True, slots=True)
class ConcatThenSplitPackingConfig(_PackingConfig):
    """Rows of exactly ``max_context_length`` tokens, documents cut where a row is full."""

    def _table(self, corpus: TokenizedCorpus, context: DatasetBuildContext) -> RowTable:
        return SplitTable(corpus, context.max_context_length)

    def _stream(self, documents: DocumentStream, context: DatasetBuildContext) -> RowStream:
        return ConcatThenSplitStream(documents, context.max_context_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstFitPackingConfig(_PackingConfig):
    """Rows of whole documents, filled up with padding that counts in no loss."""

    num_packing_bins: int = 8
    """Rows that are open at a time; more of them leave less padding."""

    def __post_init__(self) -> None:
        if self.num_packing_bins <= 0:
            reject(
                f"num_packing_bins is {self.num_packing_bins}, but first-fit packing needs at least "
                "one open row. Set it to 1 or more; 8 is usual."
            )

    def _table(self, corpus: TokenizedCorpus, context: DatasetBuildContext) -> RowTable:
        root = cache_root(context.cache_dir)
        return fitted_table(corpus, context.max_context_length, self.num_packing_bins, root)

    def _stream(self, documents: DocumentStream, context: DatasetBuildContext) -> RowStream:
        return FirstFitStream(documents, context.max_context_length, self.num_packing_bins)


class SplitTable(RowTable):
    """All documents end to end, cut every ``row_length`` tokens; a rest that fills no row is left out."""

    def __init__(self, corpus: TokenizedCorpus, row_length: int) -> None:
        self._corpus = corpus
        self._row_length = row_length
        self._num_rows, self._left_over = divmod(corpus.num_inputs, row_length)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, number: int) -> TextSequence:
        return self._corpus.span(number * self._row_length, self._row_length)

    def describe(self) -> str:
        return f"concat-then-split, rows of {self._row_length} tokens"

    def remainder(self) -> str:
        return f"the last {self._left_over} tokens fill no row"


def fitted_table(corpus: TokenizedCorpus, row_length: int, num_bins: int, root: Any) -> RowTable:
    """The rows that first fit makes of ``corpus``, kept in the cache ``root``."""
    description = f"first-fit into {num_bins} bins, rows of {row_length} tokens"
    key = digest_of(corpus.digest, corpus.tokenizer_digest, description)
    dtypes = {"documents": np.dtype(np.int64), "starts": np.dtype(np.int64)}

    def fill(writer: ArrayWriter) -> dict[str, Any]:
        return _write_rows(writer, first_fit(corpus.lengths(), row_length, num_bins), corpus)

    found = array_cache.open_or_build(root, "rows", key, dtypes, fill, _rows_fit)
    return FittedTable(corpus, row_length, description, found)


def _write_rows(
    writer: ArrayWriter, rows: Iterable[list[int]], corpus: TokenizedCorpus
) -> dict[str, Any]:
    num_documents = 0
    buffered: list[int] = []
    starts = [0]
    for row in rows:
        buffered += row
        num_documents += len(row)
        starts.append(num_documents)
        if len(buffered) > 2**16:
            writer.append("documents", np.array(buffered))
            writer.append("starts", np.array(starts))
            buffered, starts = [], []
    writer.append("documents", np.array(buffered, dtype=np.int64))
    writer.append("starts", np.array(starts, dtype=np.int64))
    return {"num_too_long": corpus.num_documents - num_documents}


def _rows_fit(found: ArrayFolder) -> bool:
    starts = found.arrays["starts"]
    fits = starts[0] == 0 and starts[-1] == len(found.arrays["documents"])
    return bool(fits) and found.notes["num_too_long"] >= 0


class FittedTable(RowTable):
    """Whole documents in rows, as first fit placed them."""

    def __init__(
        self, corpus: TokenizedCorpus, row_length: int, description: str, found: ArrayFolder
    ) -> None:
        self._corpus = corpus
        self._row_length = row_length
        self._description = description
        self._found = found
        self._documents, self._starts = found.arrays["documents"], found.arrays["starts"]
        self._num_too_long: int = found.notes["num_too_long"]

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> TextSequence:
        documents = self._documents[self._starts[number] : self._starts[number + 1]].tolist()
        return join([self._corpus.document(each) for each in documents], self._row_length)

    def describe(self) -> str:
        return self._description

    def remainder(self) -> str:
        if self._num_too_long == 0:
            return "whole documents, none longer than a row"
        return f"whole documents; {self._num_too_long:,} longer than a row are left out"

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        arguments = (self._corpus, self._row_length, self._description, self._found.path)
        return _reopened, arguments


def _reopened(corpus: TokenizedCorpus, row_length: int, description: str, path: Any) -> FittedTable:
    found = array_cache.open_folder(path, _rows_fit)
    return FittedTable(corpus, row_length, description, found)


class PackedRows(RowDataset):
    """The rows of a tokenized corpus in their global order."""

    def __init__(
        self, corpus: TokenizedCorpus, table: RowTable, policy: DatasetIterationPolicy
    ) -> None:
        if len(table) == 0:
            raise ValueError(
                f"the data makes no row: asked for {table.describe()}, found "
                f"{corpus.num_inputs} tokens in {corpus.num_documents} documents "
                f"({table.remainder()}). Change --training.max_context_length or give more text."
            )
        self._table = table
        self._order = RowOrder(len(table), policy.seed, policy.shuffle)
        self._corpus = corpus
        self.fingerprint = DataFingerprint(
            corpus=corpus.digest,
            tokenizer=corpus.tokenizer_digest,
            packing=f"{table.describe()}, {self._order.describe()}",
        )

    def __len__(self) -> int:
        return self._order.num_rows

    def row_at(self, position: int) -> TextSequence:
        return self._table[self._order.row_at(position)]

    def summary(self) -> str:
        corpus = self._corpus
        left_out = f", {corpus.num_left_out:,} left out" if corpus.num_left_out else ""
        return (
            f"{corpus.num_documents:,} documents{left_out}, {corpus.num_inputs:,} tokens, "
            f"{len(self):,} rows of {self._row_length()} tokens an epoch, {self._order.describe()} "
            f"({self._table.remainder()})"
        )

    def _row_length(self) -> int:
        return len(self._table[0].input_ids)
