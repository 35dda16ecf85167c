"""Turn one document's fields into tokens with labels.

What a processor makes is cached for all later runs, so its ``describe`` must change whenever its
output can. The one fact to know: labels are shifted here, and nowhere after.

    Record -> process_batch -> TextSequence (or None: nothing to learn) -> token_cache
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Annotated, Any, ClassVar

import numpy as np
import tyro

from torchtitan.components.data.files import Record, SampleError
from torchtitan.components.data.functions import describe_function
from torchtitan.components.data.types import DatasetBuildContext, TextSequence
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import Configurable
from torchtitan.config.configurable import to_plain
from torchtitan.config.violations import reject

# A long text is encoded in pieces, a few at a time: the library needs some hundred bytes of memory
# for each character that it has in work.
_PIECE_CHARACTERS = 1_000_000
_GROUP_CHARACTERS = 4_000_000


class SampleProcessor(Configurable, ABC):
    """Makes a TextSequence of a document; built with ``context=``."""

    own_labels: ClassVar[bool] = True
    """Whether labels may be anything; False promises that each is the next token, which takes no
    room in the cache."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        def describe(self, context: DatasetBuildContext) -> str:
            """What decides the output besides document and tokenizer files, for the fingerprint."""
            settings = {
                item.name: describe_function(value) if callable(value) else to_plain(value)
                for item in fields(self)
                for value in [getattr(self, item.name)]
            }
            # A processor sees these two as well, and neither is in the tokenizer's files.
            return (
                f"{type(self).__qualname__} {settings}, context of {context.max_context_length} "
                f"tokens, template {context.tokenizer.chat_template!r}"
            )

        def check(self, record: Record) -> str | None:
            """What keeps ``record`` from being processed, found without a tokenizer."""
            return None

        def check_tokenizer(self, tokenizer: BaseTokenizer) -> str | None:
            """What ``tokenizer`` lacks to be used here."""
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

        ``rng`` depends on the number alone, since the output is kept over runs. Pre-filters come
        before: the documents that they want are numbered without gaps from ``first_number`` on, so
        other filters, which make another cache, may give a document another number.
        """
        return [
            self(record.fields, np.random.default_rng(number))
            for number, record in enumerate(records, start=first_number)
        ]


class TextProcessor(SampleProcessor):
    """Plain text between a begin and an end token, every next token a label."""

    own_labels = False

    @dataclass(kw_only=True, slots=True)
    class Config(SampleProcessor.Config):
        text_field: str = "text"
        """Field of a document that holds its text."""

        text_fn: Annotated[Callable[[dict[str, Any]], str] | None, tyro.conf.Suppress] = None
        """Makes the text of a document's fields, in place of ``text_field``."""

        def __post_init__(self) -> None:
            if not self.text_field:
                reject("text_field is empty. Name the field of a document that holds its text.")

        def describe(self, context: DatasetBuildContext) -> str:
            if self.text_fn is not None:
                return f"text by {describe_function(self.text_fn)} between begin and end tokens"
            return f"text of {self.text_field!r} between begin and end tokens"

        def check(self, record: Record) -> str | None:
            try:
                self.text_of(record)
            except SampleError as error:
                return str(error)
            return None

        def text_of(self, record: Record) -> str:
            """The text of a document. Raises SampleError when it is none."""
            if self.text_fn is None:
                return _text_in_field(record, self.text_field)
            text = call_on(record, self.text_fn, "text_fn")
            return _require_text(record, text, "what text_fn returned")

    def __init__(self, config: Config, *, context: DatasetBuildContext) -> None:
        super().__init__(config, context=context)
        self.text_of = config.text_of

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> TextSequence | None:
        return self.process_batch([Record(sample, "document", 0)], 0)[0]

    def process_batch(
        self, records: Sequence[Record], first_number: int
    ) -> list[TextSequence | None]:
        texts = [self.text_of(record) for record in records]
        pieces = [list(split_text(text)) for text in texts]
        encoded = self._encode(piece for text in pieces for piece in text)
        return [_shift(self._join(list(islice(encoded, len(text))))) for text in pieces]

    def _encode(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of each piece, begin and end tokens around it."""
        group: list[str] = []
        num_characters = 0
        for piece in pieces:
            group.append(piece)
            num_characters += len(piece)
            if num_characters >= _GROUP_CHARACTERS:
                yield from self._encode_group(group)
                group, num_characters = [], 0
        yield from self._encode_group(group)

    def _encode_group(self, pieces: list[str]) -> list[np.ndarray]:
        found = self.context.tokenizer.encode_batch(pieces, add_bos=True, add_eos=True)
        return [np.asarray(ids, dtype=np.int64) for ids in found]

    def _join(self, pieces: list[np.ndarray]) -> np.ndarray:
        """The ids of one text, begin and end tokens only at its ends."""
        has_bos = self.context.tokenizer.bos_id is not None
        has_eos = self.context.tokenizer.eos_id is not None
        inner = [
            ids[int(has_bos and number > 0) : len(ids) - int(has_eos and number < len(pieces) - 1)]
            for number, ids in enumerate(pieces)
        ]
        return np.concatenate(inner)


def _shift(ids: np.ndarray) -> TextSequence | None:
    if len(ids) < 2:
        return None
    return TextSequence(input_ids=ids[:-1], labels=ids[1:])


def split_text(text: str, piece_characters: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """Cut ``text`` after line ends into pieces that a tokenizer can hold; at least one piece."""
    start = 0
    while len(text) - start > piece_characters:
        line_end = text.rfind("\n", start, start + piece_characters)
        end = line_end + 1 if line_end >= start else start + piece_characters
        yield text[start:end]
        start = end
    yield text[start:]


def call_on(
    record: Record, function: Callable[[Any], Any], name: str, made: TextSequence | None = None
) -> Any:
    """``function`` of the fields, or of what was ``made`` of them.

    Raises SampleError naming the record when that fails.
    """
    try:
        return function(record.fields if made is None else made)
    # It belongs to a recipe, and may raise whatever it likes.
    except Exception as error:
        present = ", ".join(sorted(record.fields)) or "none"
        raise SampleError(
            f"{record.location}: {name} failed with {type(error).__name__}: {error}; fields that are "
            f"there: {present}. Correct the document or {name}."
        ) from error


def field_of(record: Record, field: str) -> Any:
    """The value of a field. Raises SampleError naming row and field when there is none."""
    if field not in record.fields:
        present = ", ".join(sorted(record.fields)) or "none"
        raise SampleError(
            f"{record.location}: no field {field!r}; fields that are there: {present}. Correct "
            "the document or name the right field: in the processor of the recipe, or with "
            "--dataloader.text_field where --dataloader.files names the data."
        )
    return record.fields[field]


def _text_in_field(record: Record, field: str) -> str:
    return _require_text(record, field_of(record, field), f"field {field!r}")


def _require_text(record: Record, text: Any, what: str) -> str:
    if not isinstance(text, str):
        raise SampleError(
            f"{record.location}: {what} holds a {type(text).__name__}, not text. Correct the document "
            "or name another field: in the processor of the recipe, or with --dataloader.text_field "
            "where --dataloader.files names the data."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can spell it as an escape, but it is no character, and tokenizers take only text.
        raise SampleError(
            f"{record.location}: {what} holds {ascii(text[error.start])}, half of a surrogate "
            f"pair, at character {error.start}, so it is not text. Correct or remove the document."
        ) from error
    return text
