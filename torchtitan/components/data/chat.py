"""Turn a conversation into tokens of which only the answer is learned.

The tokenizer's chat template writes the conversation twice: the question as the model meets it when
it is used, and the whole. What the whole has beyond the question is the answer. The one fact to
know: question and answer are encoded apart, so that the border between them is a border between
tokens, as it is when the model is used.

    fields -> messages -> chat template -> prompt | answer + end token -> labels: -100 ... | answer
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import numpy as np
import tyro

from torchtitan.components.data.files import Record, SampleError
from torchtitan.components.data.functions import describe_function
from torchtitan.components.data.processors import call_on, field_of, SampleProcessor
from torchtitan.components.data.types import DatasetBuildContext, IGNORE_LABEL, TextSequence
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.violations import reject

Messages: TypeAlias = list[dict[str, str]]
"""``[{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]``"""


class ChatProcessor(SampleProcessor):
    """One question and one answer; labels are -100 before the answer.

    A conversation longer than the context is left out: a cut answer would teach to stop anywhere.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SampleProcessor.Config):
        messages_field: str = "messages"
        """Field of a document that holds the messages, each with ``role`` and ``content``."""

        messages_fn: Annotated[Callable[[dict[str, Any]], Messages] | None, tyro.conf.Suppress] = (
            None
        )
        """Makes the messages of a document's fields, in place of ``messages_field``."""

        def __post_init__(self) -> None:
            if not self.messages_field:
                reject("messages_field is empty. Name the field that holds the messages.")

        def describe(self, context: DatasetBuildContext) -> str:
            source = repr(self.messages_field)
            if self.messages_fn is not None:
                source = describe_function(self.messages_fn)
            return (
                f"chat of {source}, answers of at most {context.max_context_length} tokens with "
                f"their questions, template {context.tokenizer.chat_template!r}"
            )

        def check(self, record: Record) -> str | None:
            try:
                self.messages_of(record)
            except ValueError as error:
                return str(error)
            return None

        def check_tokenizer(self, tokenizer: BaseTokenizer) -> str | None:
            if tokenizer.eos_id is None:
                return (
                    "chat data needs a tokenizer with an end token, which says where an answer "
                    "ends; this one has none. Name eos_token in its tokenizer_config.json."
                )
            try:
                tokenizer.apply_chat_template(_EXAMPLE[:1], add_generation_prompt=True)
                tokenizer.apply_chat_template(_EXAMPLE)
            except ValueError as error:
                return str(error)
            return None

        def messages_of(self, record: Record) -> Messages:
            """The question and the answer. Raises SampleError for anything else."""
            if self.messages_fn is None:
                messages = field_of(record, self.messages_field)
            else:
                messages = call_on(record, self.messages_fn, "messages_fn")
            _require_single_turn(record, messages)
            return messages

    def __init__(self, config: Config, *, context: DatasetBuildContext) -> None:
        """Raises ValueError for a tokenizer without end token or without a template that works."""
        super().__init__(config, context=context)
        self.messages_of = config.messages_of
        if problem := config.check_tokenizer(context.tokenizer):
            raise ValueError(problem)

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> TextSequence | None:
        return self._sequence(Record(sample, "document", 0))

    def process_batch(
        self, records: Sequence[Record], first_number: int
    ) -> list[TextSequence | None]:
        return [self._sequence(record) for record in records]

    def _sequence(self, record: Record) -> TextSequence | None:
        prompt, answer = self._texts(record)
        tokenizer = self.context.tokenizer
        prompt_ids = tokenizer.encode_verbatim(prompt)
        answer_ids = tokenizer.encode_verbatim(answer)
        if answer_ids[-1:] != [tokenizer.eos_id]:
            answer_ids = [*answer_ids, tokenizer.eos_id]
        ids = np.array([*prompt_ids, *answer_ids], dtype=np.int64)
        if not 2 <= len(ids) <= self.context.max_context_length + 1:
            return None
        labels = ids[1:].copy()
        labels[: max(0, len(prompt_ids) - 1)] = IGNORE_LABEL
        return TextSequence(input_ids=ids[:-1], labels=labels)

    def _texts(self, record: Record) -> tuple[str, str]:
        """The text up to the answer, and the answer with what the template puts behind it."""
        messages = self.messages_of(record)
        apply = self.context.tokenizer.apply_chat_template
        prompt, whole = apply(messages[:1], add_generation_prompt=True), apply(messages)
        if not whole.startswith(prompt):
            raise SampleError(
                f"{record.location}: the chat template writes {whole[: len(prompt) + 20]!r} for the "
                f"conversation, which does not begin with {prompt!r}, what it writes for the question "
                "with add_generation_prompt. Correct the template, so that the answer can be told apart."
            )
        answer = whole[len(prompt) :]
        end = self.context.tokenizer.eos_token
        # Templates like to write a line end behind the end token; the model is to stop before it.
        if end and answer.rstrip().endswith(end):
            answer = answer.rstrip()
        return prompt, answer


_EXAMPLE: Messages = [
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": "an answer"},
]


def _require_single_turn(record: Record, messages: Any) -> None:
    roles = [
        message.get("role") if isinstance(message, dict) else type(message).__name__
        for message in (messages if isinstance(messages, list) else [messages])
    ]
    if roles != ["user", "assistant"]:
        raise SampleError(
            f"{record.location}: Expected single-turn messages, one of the user and one of the "
            f"assistant, found {', '.join(map(str, roles)) or 'none'}. Correct or remove the document."
        )
    for message in messages:
        if not isinstance(message.get("content"), str):
            raise SampleError(
                f"{record.location}: the content of the {message['role']} is a "
                f"{type(message.get('content')).__name__}, not text. Correct or remove the document."
            )
