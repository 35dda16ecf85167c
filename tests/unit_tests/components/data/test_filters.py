"""Filters and functions of a recipe: what they see, and that a changed one is noticed."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchtitan.components.data import (
    ConcatThenSplitPackingConfig,
    DatasetBuildContext,
    functions,
    IndexedJsonlSource,
    SampleProcessor,
    SingleDatasetConfig,
    TextProcessor,
    TextSequence,
)
from torchtitan.components.data.files import Record
from torchtitan.components.data.functions import describe_function
from torchtitan.components.data.tokenize import DocumentMaker, tokenize
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from tests.unit_tests.components.data.streams import LinesStream, MakeLoader, write_lines


def data_of(path: Path, **fields: Any) -> SingleDatasetConfig:
    return SingleDatasetConfig(source=IndexedJsonlSource.Config(patterns=(str(path),)), **fields)


def is_short(fields: dict[str, Any]) -> bool:
    return len(fields["text"]) < 5


def test_filters_see_documents_before_and_after_the_processor(
    make_loader: MakeLoader, tmp_path: Path, tokenizer: HuggingFaceTokenizer
) -> None:
    path = write_lines(tmp_path / "x.jsonl", ["aa", "long text", "bb", "c"])
    lengths = []

    def is_pair(sequence: TextSequence) -> bool:
        lengths.append(len(sequence.input_ids))
        return tokenizer.decode(sequence.input_ids.tolist()) != "c"

    data = data_of(path, pre_filters=(is_short,), post_filters=(is_pair,))
    assert data.check() == []
    loader = make_loader(
        dataset=ConcatThenSplitPackingConfig(dataset=data), row_length=1, shuffle=False
    )
    rows: Any = loader._feed
    assert "2 documents, 2 left out" in rows._rows.summary()
    assert len(lengths) == 3


def test_a_filter_that_fails_is_named_with_the_document(
    make_loader: MakeLoader, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "x.jsonl", ["fine"], field="body")
    data = data_of(path, pre_filters=(is_short,))
    assert data.check()[0].startswith(f"{path}, line 1: a pre-filter failed with KeyError: 'text'")
    with pytest.raises(ValueError, match="line 1: a pre-filter failed with KeyError"):
        make_loader(dataset=ConcatThenSplitPackingConfig(dataset=data))


def fails(sequence: TextSequence) -> bool:
    raise LookupError(f"of {len(sequence.input_ids)} tokens")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_post_filter_that_fails_is_named_with_the_document(
    make_loader: MakeLoader, tmp_path: Path, is_stream: bool
) -> None:
    path = write_lines(tmp_path / "x.jsonl", ["no", "fine"])
    # The document that a pre-filter leaves out counts in the place that is named.
    data = data_of(path, pre_filters=(lambda fields: fields["text"] == "fine",))
    data = dataclasses.replace(data, post_filters=(fails,))
    if is_stream:
        data = dataclasses.replace(data, source=LinesStream.Config(path=str(path)))
    with pytest.raises(
        ValueError, match=r"line 2: a post-filter failed with LookupError: of \d+ tokens"
    ):
        next(make_loader(dataset=ConcatThenSplitPackingConfig(dataset=data)))


def test_filters_that_leave_nothing_are_an_error(make_loader: MakeLoader, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", ["all too long"])
    data = data_of(path, pre_filters=(is_short,))
    with pytest.raises(ValueError, match="documents that a filter or the processor leaves out"):
        make_loader(dataset=ConcatThenSplitPackingConfig(dataset=data))


def test_a_function_may_make_the_text(make_loader: MakeLoader, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", ["some text of the field"] * 3, field="body")
    by_function = TextProcessor.Config(text_fn=lambda fields: fields["body"])
    loaders = [
        make_loader(dataset=ConcatThenSplitPackingConfig(dataset=data_of(path, processor=how)))
        for how in (by_function, TextProcessor.Config(text_field="body"))
    ]
    first, second = [next(loader)[0]["input"].tolist() for loader in loaders]
    assert first == second
    wrong = data_of(path, processor=TextProcessor.Config(text_fn=len))  # type: ignore[arg-type]: on purpose
    assert "what text_fn returned holds a int, not text" in wrong.check()[0]


def test_a_changed_filter_is_named_at_a_resume(make_loader: MakeLoader, corpus: Path) -> None:
    loaders = [
        make_loader(dataset=ConcatThenSplitPackingConfig(dataset=data_of(corpus, **filters)))
        for filters in ({}, {"pre_filters": (lambda fields: True,)})
    ]
    with pytest.raises(ValueError, match="the corpus changed"):
        loaders[1].load_state_dict(loaders[0].state_dict())


def threshold(limit: int) -> Callable[[int], bool]:
    return lambda value: value < limit


def body_of(function: Callable[..., Any]) -> str:
    """The description of ``function`` without its name."""
    return describe_function(function).partition(" ")[2]


def test_descriptions_follow_what_a_function_does() -> None:
    def plain() -> Callable[[dict[str, Any]], Any]:
        def one(fields: dict[str, Any]) -> Any:
            return fields["a"]

        return one

    def commented() -> Callable[[dict[str, Any]], Any]:
        def one(fields: dict[str, Any]) -> Any:
            # A comment changes nothing.
            return fields["a"]

        return one

    def changed() -> Callable[[dict[str, Any]], Any]:
        def one(fields: dict[str, Any]) -> Any:
            return fields["b"]

        return one

    first, same, other = [body_of(each()) for each in (plain, commented, changed)]
    assert first == same != other
    assert describe_function(threshold(3)) == describe_function(threshold(3))
    assert describe_function(threshold(3)) != describe_function(threshold(4))
    assert describe_function(lambda x: x + 1) != describe_function(lambda x: x + 2)
    partials = [functools.partial(max, number) for number in (1, 1, 2)]
    described = [describe_function(each) for each in partials]
    assert described[0] == described[1] != described[2]


MEMBERS_OF_SETS = """
import functools, runpy, sys
describe_function = runpy.run_path(sys.argv[1])["describe_function"]
def member_of(names):
    return lambda name: name in names
print(describe_function(member_of({"en", "de", "fr"})))
print(describe_function(functools.partial(max, {"en", "de", "fr"})))
print(describe_function(lambda name: name in {"en", "de", "fr"}))
"""


def said_under_hashes_of(seed: int) -> str:
    command = [sys.executable, "-c", MEMBERS_OF_SETS, functions.__file__]
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    return subprocess.run(command, env=environment, check=True, capture_output=True).stdout.decode()


def test_every_process_describes_a_function_alike() -> None:
    assert said_under_hashes_of(1) == said_under_hashes_of(2) != ""


def test_long_values_and_keyword_defaults_count_whole() -> None:
    def holding(value: Any) -> Callable[[], Any]:
        return lambda: value

    def limited(*, limit: int = 3) -> int:
        return limit

    first = describe_function(limited)
    limited.__kwdefaults__ = {"limit": 4}
    assert describe_function(limited) != first
    for one, other in (
        (re.compile("a" * 300 + "b"), re.compile("a" * 300 + "c")),
        (np.arange(5000), np.arange(5000) + (np.arange(5000) == 2500)),
        ({"a": {1, 2}}, {"a": {1, 3}}),
    ):
        assert describe_function(holding(one)) == describe_function(holding(one))
        assert describe_function(holding(one)) != describe_function(holding(other))
    with pytest.raises(ValueError, match="holds <object object at .*Hold plain values"):
        describe_function(holding([object()]))


def test_an_object_has_to_describe_itself() -> None:
    class Longer:
        def __init__(self, than: int) -> None:
            self.than = than

        def __call__(self, fields: dict[str, Any]) -> bool:
            return len(fields["text"]) > self.than

    with pytest.raises(ValueError, match="nothing tells when it changes"):
        describe_function(Longer(3))

    class Described(Longer):
        def describe(self) -> str:
            return f"longer than {self.than}"

    assert describe_function(Described(3)) == "longer than 3"


@pytest.mark.parametrize(
    ("labels", "positions", "reason"),
    [
        ([2], None, "made 2 inputs and 1 labels"),
        ([9, 3], None, "labels that are not the next inputs"),
        ([2, 5000], None, "ids from 1 to 5000, but says that its vocabulary has 2048"),
        ([2, 3], [0, 0], "made positions of its own"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_document(
    make_loader: MakeLoader,
    corpus: Path,
    tokenizer: HuggingFaceTokenizer,
    labels: list[int],
    positions: list[int] | None,
    reason: str,
) -> None:
    class Odd(TextProcessor):
        def process_batch(
            self, records: Sequence[Record], first_number: int
        ) -> list[TextSequence | None]:
            own = None if positions is None else np.array(positions)
            made = TextSequence(input_ids=np.array([1, 2]), labels=np.array(labels), positions=own)
            return [made] * len(records)

    context = DatasetBuildContext(tokenizer=tokenizer, max_context_length=8, num_tokens_per_batch=8)
    source: Any = IndexedJsonlSource.Config(patterns=(str(corpus),)).build(
        dataset_iteration_policy=None
    )
    maker = DocumentMaker(Odd(TextProcessor.Config(), context=context))
    with pytest.raises(ValueError, match=f"line 1: .*{reason}"):
        list(tokenize(source, maker, lambda: None))


def test_a_processor_of_ones_own_keeps_its_labels(make_loader: MakeLoader, corpus: Path) -> None:
    data = data_of(corpus, processor=Masked.Config())
    loader = make_loader(dataset=ConcatThenSplitPackingConfig(dataset=data), row_length=4)
    inputs, labels = next(loader)
    starts = inputs["positions"] == 0
    assert inputs["input"].tolist()[0] in (5, 6) and (labels[starts] != 6).all()


def test_a_processor_of_ones_own_is_told_by_its_settings(tokenizer: HuggingFaceTokenizer) -> None:
    context = DatasetBuildContext(tokenizer=tokenizer, max_context_length=8, num_tokens_per_batch=8)
    descriptions = [
        Masked.Config(count=count, keep=keep).describe(context)
        for count, keep in ((1, is_short), (1, is_short), (2, is_short), (1, threshold(3)))
    ]
    plain, loud = [
        DocumentMaker(kind.Config().build(context=context)).describe(context)
        for kind in (TextProcessor, Loud)
    ]
    assert plain != loud
    # No address of an object in them, which would be another one in the next run.
    assert descriptions[0] == descriptions[1] and " at 0x" not in descriptions[0]
    assert len(set(descriptions)) == 3


def test_a_processor_of_ones_own_is_told_by_context_and_template_too(tmp_path: Path) -> None:
    own = HuggingFaceTokenizer(tokenizer_path="tests/assets/tokenizer")
    short, long = [
        DatasetBuildContext(tokenizer=own, max_context_length=length, num_tokens_per_batch=8)
        for length in (4, 8)
    ]
    before = Masked.Config().describe(short)
    assert Masked.Config().describe(long) != before
    own.set_chat_template("{{ messages[0].content }}")
    assert Masked.Config().describe(short) != before


def test_a_filter_that_cannot_be_described_is_found_beforehand(corpus: Path) -> None:
    held = object()
    (problem,) = data_of(corpus, pre_filters=(lambda fields: fields != held,)).check()
    assert "a function of the data holds <object object at" in problem


class Loud(TextProcessor):
    """Differs from its base in what it does, not in its settings."""

    @dataclass(kw_only=True, slots=True)
    class Config(TextProcessor.Config):
        pass


class Masked(SampleProcessor):
    """Five tokens, the first of which is not learned."""

    @dataclass(kw_only=True, slots=True)
    class Config(SampleProcessor.Config):
        count: int = 1
        keep: Callable[..., bool] = is_short

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> TextSequence | None:
        return TextSequence(input_ids=np.array([5, 6, 6, 6]), labels=np.array([-100, 6, 6, 7]))
