"""Read documents, leave out what filters do not want, and make tokens of the rest.

The same steps serve a corpus, of which every document is made once and cached, and a stream, of
which they are made as they come. The one fact to know: a filter that fails, and a processor whose
output cannot be kept, are errors that name the document.

    Record -> pre-filters -> processor -> post-filters -> TextSequence, or None: left out
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from torchtitan.components.data.files import Record
from torchtitan.components.data.functions import describe_function
from torchtitan.components.data.processors import call_on, SampleProcessor
from torchtitan.components.data.progress import byte_progress
from torchtitan.components.data.sources import RandomAccessDataSource
from torchtitan.components.data.token_cache import Document
from torchtitan.components.data.types import DatasetBuildContext, TextSequence

PreFilter: TypeAlias = Callable[[dict[str, Any]], bool]
PostFilter: TypeAlias = Callable[[TextSequence], bool]

# Enough documents to keep all cores of the tokenizer busy, few enough to be a moment's work.
_CHUNK_DOCUMENTS = 1024
_CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class DocumentMaker:
    """Filters and processor of one dataset."""

    processor: SampleProcessor
    pre_filters: tuple[PreFilter, ...] = ()
    post_filters: tuple[PostFilter, ...] = ()

    def describe(self, context: DatasetBuildContext) -> str:
        """All that decides which tokens are made of a document, besides the tokenizer's files."""
        filters = [
            f"{kind} filter {describe_function(function)}"
            for kind, functions in (("pre", self.pre_filters), ("post", self.post_filters))
            for function in functions
        ]
        config = self.processor.config
        processor = config.describe(context)
        if "describe" not in vars(type(config)):
            # What it inherits describes its settings, and the subclass may do something else.
            processor = f"{type(self.processor).__qualname__}: {processor}"
        return "\n".join([processor, *filters])

    def make(self, records: Sequence[Record], first_number: int) -> list[TextSequence | None]:
        """The tokens of each record; None for those that are left out."""
        made: list[TextSequence | None] = [None] * len(records)
        wanted = [
            number
            for number, record in enumerate(records)
            if all(call_on(record, keep, "a pre-filter") for keep in self.pre_filters)
        ]
        found = self.processor.process_batch([records[number] for number in wanted], first_number)
        vocab_size = self.processor.context.tokenizer.get_vocab_size()
        for number, sequence in zip(wanted, found, strict=True):
            if sequence is None or len(sequence.input_ids) == 0:
                continue
            record = records[number]
            if all(call_on(record, keep, "a post-filter", sequence) for keep in self.post_filters):
                _refuse_misfits(sequence, record.location, vocab_size)
                made[number] = sequence
        return made


def tokenize(
    source: RandomAccessDataSource, maker: DocumentMaker, refuse_changes: Callable[[], None]
) -> Iterator[Document | None]:
    """Every document of ``source`` for the cache, None for those left out, with a progress bar."""
    num_read = num_kept = 0
    own_labels = maker.processor.own_labels
    with byte_progress(source.size_bytes(), "tokenizing") as bar:
        for chunk in _chunks(source.scan()):
            for record, sequence in zip(chunk, maker.make(chunk, num_read), strict=True):
                num_kept += sequence is not None
                yield None if sequence is None else _document(sequence, record, own_labels)
            num_read += len(chunk)
            bar.update(sum(record.size_bytes for record in chunk))
    refuse_changes()
    if num_kept == 0:
        raise ValueError(nothing_found())


def nothing_found() -> str:
    return (
        "the data holds no document: found only blank lines, documents of less than two tokens, or "
        "documents that a filter or the processor leaves out. Give text to learn from."
    )


def _document(sequence: TextSequence, record: Record, own_labels: bool) -> Document:
    labels = sequence.labels
    last = max(int(labels[-1]), 0)  # A masked label is no token.
    tokens = np.append(sequence.input_ids, last)
    if own_labels:
        return tokens, labels
    if not np.array_equal(labels[:-1], sequence.input_ids[1:]):
        raise ValueError(
            f"{record.location}: the processor made labels that are not the next inputs, although its "
            "own_labels is False. Set it to True."
        )
    return tokens, None


def _refuse_misfits(sequence: TextSequence, location: str, vocab_size: int) -> None:
    inputs, labels, positions = sequence.input_ids, sequence.labels, sequence.positions
    if len(inputs) != len(labels):
        raise ValueError(
            f"{location}: the processor made {len(inputs)} inputs and {len(labels)} labels. Make one "
            "label for each input."
        )
    # A larger id would be cut to the width that the cache has, into another token.
    lowest, highest = int(inputs.min()), max(int(inputs.max()), int(labels.max()))
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"{location}: the tokenizer made ids from {lowest} to {highest}, but says that its "
            f"vocabulary has {vocab_size} entries. Use a tokenizer whose files fit together."
        )
    if positions is not None and not np.array_equal(positions, np.arange(len(inputs))):
        raise ValueError(
            f"{location}: the processor made positions of its own, but a document has those from 0 "
            "on. Return None, or one sequence for each document."
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
