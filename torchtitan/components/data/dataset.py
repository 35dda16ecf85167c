"""Put a source and a processor together into a tokenized corpus.

The tokens are made once per content of source, processor and tokenizer, whatever the run's batch
size, context length or ranks. The one fact to know: configs here only describe; ``check`` reads,
``build`` may tokenize.

    source -> processor -> token_cache -> TokenizedCorpus -> packing
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchtitan.components.data.files import Record, SampleError
from torchtitan.components.data.processors import SampleProcessor, TextProcessor
from torchtitan.components.data.progress import byte_progress
from torchtitan.components.data.sources import RandomAccessDataSource, SourceConfig
from torchtitan.components.data.token_cache import cache_root, open_or_build, TokenStore
from torchtitan.components.data.types import (
    DatasetBuildContext,
    DatasetIterationPolicy,
    TextSequence,
)

# Enough documents to keep all cores of the tokenizer busy, few enough to be a moment's work.
_CHUNK_DOCUMENTS = 1024
_CHUNK_BYTES = 4 * 1024 * 1024
_SHOWN_PROBLEMS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig(ABC):
    """A description of data; a graph of them ends in rows."""

    @abstractmethod
    def build(
        self, *, context: DatasetBuildContext, dataset_iteration_policy: DatasetIterationPolicy
    ) -> Any:
        """What is described: documents or rows."""

    @abstractmethod
    def check(self) -> list[str]:
        """What keeps the data from being read, one message each; changes nothing."""


@dataclass(frozen=True, slots=True)
class TokenizedCorpus:
    """The tokens of a corpus and the digests of what they were made from."""

    store: TokenStore
    digest: str
    tokenizer_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleDatasetConfig(DatasetConfig):
    """The documents of one source through one processor."""

    source: SourceConfig
    """Where the documents come from."""

    processor: SampleProcessor.Config = field(default_factory=TextProcessor.Config)
    """What makes tokens of a document."""

    def build(
        self, *, context: DatasetBuildContext, dataset_iteration_policy: DatasetIterationPolicy
    ) -> TokenizedCorpus:
        source: RandomAccessDataSource = self.source.build(
            dataset_iteration_policy=dataset_iteration_policy
        )
        processor: SampleProcessor = self.processor.build(context=context)
        root = cache_root(context.cache_dir)
        # Before the digest: the tokens of a later content must not get the name of this one.
        refuse_changes = source.watch()
        corpus = _digest(source.digest(root), self.processor.describe())
        tokenizer = context.tokenizer.fingerprint()
        store = open_or_build(
            root,
            key=_digest(corpus, tokenizer),
            dtype=_smallest_dtype(context.tokenizer.get_vocab_size()),
            documents=lambda: _tokenize(source, processor, refuse_changes),
        )
        return TokenizedCorpus(store, corpus, tokenizer)

    def check(self) -> list[str]:
        problems: list[str] = []
        num_broken = num_documents = 0
        try:
            for found in self.source.probe():
                num_documents += 1
                problem = str(found) if isinstance(found, SampleError) else self._check(found)
                if problem is not None:
                    num_broken += 1
                    if num_broken <= _SHOWN_PROBLEMS:
                        problems.append(problem)
        except (OSError, ValueError) as error:
            return [str(error)]
        if num_documents == 0:
            return [_nothing_found()]
        if num_broken > _SHOWN_PROBLEMS:
            problems.append(f"and {num_broken - _SHOWN_PROBLEMS} more broken documents")
        return problems

    def _check(self, record: Record) -> str | None:
        return self.processor.check(record)


def _nothing_found() -> str:
    return (
        "the data files hold no document: found only blank lines, or documents of less than two "
        "tokens. Give files with text."
    )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _smallest_dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def _tokenize(
    source: RandomAccessDataSource, processor: SampleProcessor, refuse_changes: Callable[[], None]
) -> Iterator[np.ndarray]:
    """The tokens of every document that has at least two, with a progress bar."""
    num_read = num_kept = 0
    vocab_size = processor.context.tokenizer.get_vocab_size()
    with byte_progress(source.size_bytes(), "tokenizing") as bar:
        for chunk in _chunks(source.scan()):
            for sequence in processor.process_batch(chunk, num_read):
                if sequence is not None:
                    num_kept += 1
                    tokens = _with_last_label(sequence)
                    _refuse_unknown_ids(tokens, vocab_size)
                    yield tokens
            num_read += len(chunk)
            bar.update(sum(record.size_bytes for record in chunk))
    refuse_changes()
    if num_kept == 0:
        raise ValueError(_nothing_found())


def _with_last_label(sequence: TextSequence) -> np.ndarray:
    if not np.array_equal(sequence.labels[:-1], sequence.input_ids[1:]):
        raise ValueError(
            "a processor gave labels that are not the next inputs; only plain next-token labels "
            "can be cached. Use TextProcessor."
        )
    return np.append(sequence.input_ids, sequence.labels[-1:])


def _refuse_unknown_ids(tokens: np.ndarray, vocab_size: int) -> None:
    # A larger id would be cut to the width that the cache has, into another token.
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(
            f"the tokenizer made ids from {tokens.min()} to {tokens.max()}, but says that its "
            f"vocabulary has {vocab_size} entries. Use a tokenizer whose files fit together."
        )


def _chunks(records: Iterator[Record]) -> Iterator[list[Record]]:
    chunk: list[Record] = []
    size = 0
    for record in records:
        chunk.append(record)
        size += record.size_bytes
        if len(chunk) == _CHUNK_DOCUMENTS or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
