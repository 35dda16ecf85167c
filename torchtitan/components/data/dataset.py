"""Put source, filters and processor together into documents: a tokenized corpus or a stream.

The tokens of a corpus are made once per content of source, filters, processor and tokenizer,
whatever the run's batch size or ranks. The one fact to know: configs here only describe; ``check``
reads, ``build`` may tokenize.

    source -> filters, processor -> token_cache     -> TokenizedCorpus -> packing
                                 -> document_stream -> DocumentStream  -> packing
"""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchtitan.components.data.array_cache import cache_root
from torchtitan.components.data.corpus import TokenizedCorpus
from torchtitan.components.data.document_stream import DocumentStream
from torchtitan.components.data.files import Record, SampleError
from torchtitan.components.data.functions import describe_function
from torchtitan.components.data.processors import call_on, SampleProcessor, TextProcessor
from torchtitan.components.data.sources import (
    RandomAccessDataSource,
    SourceConfig,
    StreamingDataSource,
)
from torchtitan.components.data.token_cache import open_or_build
from torchtitan.components.data.tokenize import (
    DocumentMaker,
    nothing_found,
    PostFilter,
    PreFilter,
    tokenize,
)
from torchtitan.components.data.types import DatasetBuildContext, DatasetIterationPolicy
from torchtitan.components.tokenizer import BaseTokenizer

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
    def check(self, tokenizer: BaseTokenizer | None = None) -> list[str]:
        """What keeps the data from being read, one message each; changes nothing."""

    @abstractmethod
    def is_streamed(self) -> bool:
        """Whether any of the data is a stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleDatasetConfig(DatasetConfig):
    """The documents of one source through filters and one processor."""

    source: SourceConfig
    """Where the documents come from."""

    pre_filters: tuple[PreFilter, ...] = ()
    """Functions of a document's fields; a document is used if all return true."""

    processor: SampleProcessor.Config = field(default_factory=TextProcessor.Config)
    """What makes tokens of a document."""

    post_filters: tuple[PostFilter, ...] = ()
    """Functions of a document's TextSequence; it is used if all return true."""

    def build(
        self, *, context: DatasetBuildContext, dataset_iteration_policy: DatasetIterationPolicy
    ) -> TokenizedCorpus | DocumentStream:
        processor: SampleProcessor = self.processor.build(context=context)
        maker = DocumentMaker(processor, self.pre_filters, self.post_filters)
        if self.is_streamed():
            return DocumentStream(self.source, maker, dataset_iteration_policy)
        source: RandomAccessDataSource = self.source.build(
            dataset_iteration_policy=dataset_iteration_policy
        )
        return _tokenized(source, maker, context)

    def is_streamed(self) -> bool:
        # The class that the config belongs to tells; opening the data may take a while.
        owner = self.source._owner
        return owner is not None and issubclass(owner, StreamingDataSource)

    def check(self, tokenizer: BaseTokenizer | None = None) -> list[str]:
        problems: list[str] = []
        num_broken = num_documents = 0
        if tokenizer is not None and (lack := self.processor.check_tokenizer(tokenizer)):
            problems.append(lack)
        problems += self._filter_problems()
        try:
            probed = self.source.probe()
            if probed is None:
                return problems
            for found in probed:
                num_documents += 1
                problem = str(found) if isinstance(found, SampleError) else self._check(found)
                if problem is not None:
                    num_broken += 1
                    if num_broken <= _SHOWN_PROBLEMS:
                        problems.append(problem)
        except (OSError, ValueError, TypeError) as error:
            return [*problems, str(error)]
        if num_documents == 0:
            return [*problems, nothing_found()]
        if num_broken > _SHOWN_PROBLEMS:
            problems.append(f"and {num_broken - _SHOWN_PROBLEMS} more broken documents")
        return problems

    def _filter_problems(self) -> list[str]:
        problems = []
        for keep in (*self.pre_filters, *self.post_filters):
            try:
                describe_function(keep)
            except ValueError as error:
                problems.append(str(error))
        return problems

    def _check(self, record: Record) -> str | None:
        try:
            if not all(call_on(record, keep, "a pre-filter") for keep in self.pre_filters):
                return None
        except SampleError as error:
            return str(error)
        return self.processor.check(record)


def _tokenized(
    source: RandomAccessDataSource, maker: DocumentMaker, context: DatasetBuildContext
) -> TokenizedCorpus:
    root = cache_root(context.cache_dir)
    # Before the digest: the tokens of a later content must not get the name of this one.
    refuse_changes = source.watch()
    corpus = digest_of(source.digest(root), maker.describe(context))
    tokenizer = context.tokenizer.fingerprint()
    store = open_or_build(
        root,
        key=digest_of(corpus, tokenizer),
        dtype=_smallest_dtype(context.tokenizer.get_vocab_size()),
        documents=lambda: tokenize(source, maker, refuse_changes),
        own_labels=maker.processor.own_labels,
    )
    return TokenizedCorpus((store,), corpus, tokenizer)


def digest_of(*parts: str) -> str:
    """A digest of all ``parts`` in order."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _smallest_dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
