"""The tokens of one or several datasets as one sequence of documents.

The one fact to know: datasets that are concatenated stay in caches of their own; a row may begin in
one and end in the next, just as if their documents lay in one file.

    TokenStore, TokenStore, ... -> TokenizedCorpus -> span, document -> packing
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from torchtitan.components.data.token_cache import TokenStore
from torchtitan.components.data.types import IGNORE_LABEL, TextSequence


@dataclass(frozen=True)
class TokenizedCorpus:
    """The tokens of a corpus and the digests of what they were made from."""

    stores: tuple[TokenStore, ...]
    digest: str
    tokenizer_digest: str

    @cached_property
    def _input_ends(self) -> list[int]:
        return list(accumulate(store.num_inputs for store in self.stores))

    @cached_property
    def _document_ends(self) -> list[int]:
        return list(accumulate(store.num_documents for store in self.stores))

    @property
    def num_inputs(self) -> int:
        return self._input_ends[-1]

    @property
    def num_documents(self) -> int:
        return self._document_ends[-1]

    @property
    def num_left_out(self) -> int:
        return sum(store.num_left_out for store in self.stores)

    def span(self, first: int, length: int) -> TextSequence:
        """Inputs ``first`` to ``first + length`` of the whole corpus; see ``TokenStore.span``."""
        parts = []
        while length > 0:
            which = bisect_right(self._input_ends, first)
            begin = self._input_ends[which - 1] if which else 0
            taken = min(length, self._input_ends[which] - first)
            parts.append(self.stores[which].span(first - begin, taken))
            first += taken
            length -= taken
        return parts[0] if len(parts) == 1 else join(parts)

    def document(self, number: int) -> TextSequence:
        """Document ``number`` of the whole corpus."""
        which = bisect_right(self._document_ends, number)
        store = self.stores[which]
        local = number - (self._document_ends[which - 1] if which else 0)
        first, last = int(store.starts[local]), int(store.starts[local + 1])
        return store.span(first, last - first)

    def lengths(self) -> Iterator[int]:
        """The number of inputs of each document."""
        for store in self.stores:
            # In pieces: as Python numbers all of them would take four times the memory.
            for first in range(0, store.num_documents, 2**20):
                yield from np.diff(store.starts[first : first + 2**20 + 1]).tolist()


def join(parts: Sequence[TextSequence], length: int | None = None) -> TextSequence:
    """``parts`` end to end as one row, padded to ``length`` with what counts in no loss.

    Every padding token is a document of its own (position 0), so that no mask grows with it.
    """
    num_tokens = sum(len(part.input_ids) for part in parts)
    padding = np.zeros((length or num_tokens) - num_tokens, dtype=np.int64)
    return TextSequence(
        input_ids=np.concatenate([*(part.input_ids for part in parts), padding]),
        labels=np.concatenate([*(part.labels for part in parts), padding + IGNORE_LABEL]),
        positions=np.concatenate([*(positions_of(part) for part in parts), padding]),
    )


def positions_of(sequence: TextSequence) -> np.ndarray:
    """Its positions; without any it is one document."""
    if sequence.positions is None:
        return np.arange(len(sequence.input_ids))
    return sequence.positions


def cut(sequence: TextSequence, first: int, last: int) -> TextSequence:
    """Inputs ``first`` to ``last`` of one document; positions begin at 0 again."""
    return TextSequence(
        input_ids=sequence.input_ids[first:last], labels=sequence.labels[first:last]
    )
