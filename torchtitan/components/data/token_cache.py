"""The tokens of a corpus in memory-mapped files, and how a stretch of them is read.

The one fact to know: a document has one token more than inputs, because its last token is only a
label. Where labels are not simply the next tokens (chat data, with the question masked), they are
kept in a third array.

    Document, Document, ... -> open_or_build -> array_cache -> TokenStore -> span (TextSequence)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from torchtitan.components.data import array_cache
from torchtitan.components.data.array_cache import ArrayFolder, ArrayWriter
from torchtitan.components.data.types import TextSequence

Document: TypeAlias = tuple[np.ndarray, np.ndarray | None]
"""The tokens of a document, at least two, and the labels of all but the last unless those are the
next tokens."""

_KIND = "tokens"


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The tokens of all documents, end to end.

    ``starts`` (int64, one more than documents) counts the inputs before each document. An input is
    a token that has a next one, so document ``d`` begins at ``tokens[starts[d] + d]``. ``labels``
    (int32, one for each input) is None where every label is the next token.
    """

    tokens: np.ndarray
    starts: np.ndarray
    labels: np.ndarray | None = None
    num_left_out: int = 0
    """Documents that the corpus holds besides, of which nothing was to be learned."""
    folder: Path | None = None
    """Where it lies; None for one in memory."""

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1

    @property
    def num_inputs(self) -> int:
        return int(self.starts[-1])

    def span(self, first: int, length: int) -> TextSequence:
        """Inputs ``first`` to ``first + length``, as int64.

        Labels stay within their document, across the end of the span too. Positions restart at 0
        at each document and at the start of the span.
        """
        last = first + length
        low = int(np.searchsorted(self.starts, first, side="right")) - 1
        high = int(np.searchsorted(self.starts, last, side="left"))
        bounds = np.clip(self.starts[low : high + 1], first, last) - first
        lengths = np.diff(bounds)
        offsets = np.arange(length)
        # Each document has one token more than inputs: its last token is a label only.
        picked = offsets + np.repeat(np.arange(high - low), lengths)
        tokens = self.tokens[first + low : last + high].astype(np.int64)
        own = None if self.labels is None else self.labels[first:last].astype(np.int64)
        return TextSequence(
            input_ids=tokens[picked],
            labels=tokens[picked + 1] if own is None else own,
            positions=offsets - np.repeat(bounds[:-1], lengths),
        )

    def __reduce__(self) -> tuple[Callable[..., "TokenStore"], tuple[Any, ...]]:
        # To another process goes the place: the arrays themselves may be larger than its memory.
        if self.folder is not None:
            return open_store, (self.folder,)
        return TokenStore, (self.tokens, self.starts, self.labels, self.num_left_out)


def open_or_build(
    root: Path,
    key: str,
    dtype: np.dtype,
    documents: Callable[[], Iterator[Document | None]],
    *,
    own_labels: bool = False,
) -> TokenStore:
    """The cached tokens named ``key``; calls ``documents`` for all of them when there are none.

    None stands for a document that is left out. With ``own_labels`` every document brings labels.
    """
    dtypes = {"tokens": dtype, "starts": np.dtype(np.int64)}
    if own_labels:
        dtypes["labels"] = np.dtype(np.int32)
    found = array_cache.open_or_build(
        root, _KIND, key, dtypes, lambda writer: _write(writer, documents()), _fits
    )
    return _store_in(found)


def open_store(folder: Path) -> TokenStore:
    """Map the tokens in ``folder``.

    Raises FileNotFoundError where there are none, DamagedCacheError for files that do not fit.
    """
    return _store_in(array_cache.open_folder(folder, _fits))


def _write(writer: ArrayWriter, documents: Iterator[Document | None]) -> dict[str, Any]:
    num_inputs = num_left_out = 0
    writer.append("starts", np.zeros(1, np.int64))
    for document in documents:
        if document is None:
            num_left_out += 1
            continue
        tokens, labels = document
        num_inputs += len(tokens) - 1
        writer.append("tokens", tokens)
        writer.append("starts", np.array([num_inputs]))
        if labels is not None:
            writer.append("labels", labels)
    return {"num_left_out": num_left_out}


def _store_in(found: ArrayFolder) -> TokenStore:
    return TokenStore(
        tokens=found.arrays["tokens"],
        starts=found.arrays["starts"],
        labels=found.arrays.get("labels"),
        num_left_out=found.notes["num_left_out"],
        folder=found.path,
    )


def _fits(found: ArrayFolder) -> bool:
    store = _store_in(found)
    num_labels = store.num_inputs if store.labels is None else len(store.labels)
    num_tokens = store.num_inputs + store.num_documents
    return (
        store.starts[0] == 0 and num_tokens == len(store.tokens) and store.num_inputs == num_labels
    )
