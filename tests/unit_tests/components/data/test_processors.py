import numpy as np
import pytest
from torchtitan.components.data import DatasetBuildContext, processors, TextProcessor
from torchtitan.components.data.files import Record, SampleError
from torchtitan.components.data.processors import split_text
from torchtitan.components.tokenizer import HuggingFaceTokenizer


@pytest.fixture
def process(tokenizer: HuggingFaceTokenizer) -> TextProcessor:
    context = DatasetBuildContext(tokenizer=tokenizer, max_context_length=8, num_tokens_per_batch=8)
    return TextProcessor.Config().build(context=context)


def test_text_stands_between_begin_and_end_with_shifted_labels(
    process: TextProcessor, tokenizer: HuggingFaceTokenizer
) -> None:
    sequence = process({"text": "hello world"}, np.random.default_rng())
    ids = tokenizer.encode("hello world")
    assert sequence is not None
    assert sequence.input_ids.tolist() == [tokenizer.bos_id, *ids]
    assert sequence.labels.tolist() == [*ids, tokenizer.eos_id]


def test_fewer_than_two_tokens_are_left_out(
    process: TextProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process.context.tokenizer, "bos_id", None)
    monkeypatch.setattr(process.context.tokenizer, "eos_id", None)
    assert process({"text": ""}, np.random.default_rng()) is None
    assert process({"text": "a"}, np.random.default_rng()) is None


def test_a_long_text_loses_nothing_and_has_one_begin_and_one_end(
    process: TextProcessor, tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "_GROUP_CHARACTERS", 20)
    monkeypatch.setattr(processors, "split_text", lambda text: split_text(text, 7))
    long = "line one\nline two\n\nno line end in this long stretch of text\n"
    records = [Record({"text": text}, "somewhere", 0) for text in ("short", long, "", "last")]
    sequences = [found for found in process.process_batch(records, 0) if found is not None]
    assert [tokenizer.decode(found.input_ids.tolist()) for found in sequences] == [
        "short",
        long,
        "",
        "last",
    ]
    ends = [tokenizer.bos_id, tokenizer.eos_id]
    for sequence in sequences:
        ids = [*sequence.input_ids.tolist(), int(sequence.labels[-1])]
        assert [token for token in ids if token in ends] == ends


def test_pieces_end_at_line_ends_where_there_are_any() -> None:
    assert list(split_text("ab\ncd\nefghij", 7)) == ["ab\ncd\n", "efghij"]
    assert list(split_text("abcdefgh", 3)) == ["abc", "def", "gh"]
    assert list(split_text("", 3)) == [""]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"body": "x", "a": 1}, "no field 'text'; fields that are there: a, body"),
        ({"text": None}, "field 'text' holds a NoneType, not text"),
        ({"text": ["x"]}, "field 'text' holds a list, not text"),
        ({"text": "a \ud800 b"}, "field 'text' holds '\\ud800', half of a surrogate pair,"),
    ],
)
def test_a_document_without_text_is_named_by_place_and_field(
    process: TextProcessor, fields: dict, reason: str
) -> None:
    record = Record(fields, "data.jsonl, line 7", 0)
    with pytest.raises(SampleError) as found:
        process.process_batch([record], 0)
    assert str(found.value).startswith(f"data.jsonl, line 7: {reason}")
    assert str(process.config.check(record)).startswith(f"data.jsonl, line 7: {reason}")


def test_an_empty_field_name_is_refused() -> None:
    with pytest.raises(ValueError, match="text_field is empty"):
        TextProcessor.Config(text_field="")
