"""Turn one document's fields into tokens with labels.

What a processor makes is cached for all later runs, so its ``describe()`` must change whenever its
output can. The one fact to know: labels are shifted here, and nowhere after.

    Record -> process_batch -> TextSequence (or None: nothing to learn) -> token_cache
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.components.data.files import Record, SampleError
from torchtitan.components.data.types import DatasetBuildContext, TextSequence
from torchtitan.config import Configurable
from torchtitan.config.violations import reject

# One long text is encoded in pieces of about this many characters: the library needs some hundred
# bytes of memory for each character that it has in work.
_PIECE_CHARACTERS = 1_000_000


class SampleProcessor(Configurable, ABC):
    """Makes a TextSequence of a document; built with ``context=``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        def describe(self) -> str:
            """What decides the output besides document and tokenizer, for the fingerprint."""
            return f"{type(self).__qualname__} {self.to_dict()}"

        def check(self, record: Record) -> str | None:
            """What keeps ``record`` from being processed, found without a tokenizer."""
            return None

    def __init__(self, config: Config, *, context: DatasetBuildContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> TextSequence | None:
        """The tokens of one document; None leaves it out."""

    def process_batch(
        self, records: Sequence[Record], first_number: int
    ) -> list[TextSequence | None]:
        """``__call__`` for many documents, the first of which is number ``first_number``.

        ``rng`` depends on the document's number alone, since the output is kept over runs.
        """
        return [
            self(record.fields, np.random.default_rng(number))
            for number, record in enumerate(records, start=first_number)
        ]


class TextProcessor(SampleProcessor):
    """Plain text between a begin and an end token, every next token a label."""

    @dataclass(kw_only=True, slots=True)
    class Config(SampleProcessor.Config):
        text_field: str = "text"
        """Field of a document that holds its text."""

        def __post_init__(self) -> None:
            if not self.text_field:
                reject("text_field is empty. Name the field of a document that holds its text.")

        def describe(self) -> str:
            return f"text of {self.text_field!r} between begin and end tokens"

        def check(self, record: Record) -> str | None:
            try:
                _text_of(record, self.text_field)
            except SampleError as error:
                return str(error)
            return None

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> TextSequence | None:
        return self.process_batch([Record(sample, "document", 0)], 0)[0]

    def process_batch(
        self, records: Sequence[Record], first_number: int
    ) -> list[TextSequence | None]:
        field = self.config.text_field
        pieces = [list(split_text(_text_of(record, field))) for record in records]
        flat = [piece for text in pieces for piece in text]
        encoded = iter(self.context.tokenizer.encode_batch(flat, add_bos=True, add_eos=True))
        return [_shift(self._join([next(encoded) for _ in text])) for text in pieces]

    def _join(self, pieces: list[list[int]]) -> list[int]:
        """One list of ids, begin and end tokens only at its ends."""
        joined = pieces[0]
        for piece in pieces[1:]:
            if self.context.tokenizer.eos_id is not None:
                joined.pop()
            joined += piece if self.context.tokenizer.bos_id is None else piece[1:]
        return joined


def _shift(ids: list[int]) -> TextSequence | None:
    if len(ids) < 2:
        return None
    tokens = np.asarray(ids, dtype=np.int64)
    return TextSequence(input_ids=tokens[:-1], labels=tokens[1:])


def split_text(text: str, piece_characters: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """Cut ``text`` after line ends into pieces that a tokenizer can hold; at least one piece."""
    start = 0
    while len(text) - start > piece_characters:
        line_end = text.rfind("\n", start, start + piece_characters)
        end = line_end + 1 if line_end >= start else start + piece_characters
        yield text[start:end]
        start = end
    yield text[start:]


def _text_of(record: Record, field: str) -> str:
    if field not in record.fields:
        present = ", ".join(sorted(record.fields)) or "none"
        raise SampleError(
            f"{record.location}: no field {field!r}; fields that are there: {present}. Correct "
            "the document, or name the right field with --dataloader.text_field."
        )
    text = record.fields[field]
    if not isinstance(text, str):
        raise SampleError(
            f"{record.location}: field {field!r} holds a {type(text).__name__}, not text. Correct "
            "the document, or name another field with --dataloader.text_field."
        )
    return text
