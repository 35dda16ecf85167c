import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchtitan.components.data import (
    ChatProcessor,
    DatasetBuildContext,
    FirstFitPackingConfig,
    HuggingFaceRandomAccessSource,
    HuggingFaceStreamingSource,
    IndexedJsonlSource,
    SingleDatasetConfig,
)
from torchtitan.components.data.files import Record
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.models.llama3.config_registry import sft_debugmodel

from tests.unit_tests.components.data.conftest import ROOT
from tests.unit_tests.components.data.streams import MakeLoader

QUESTION, ANSWER = "what is a hack?", "a quick job"


def chat(question: str = QUESTION, answer: str = ANSWER) -> dict[str, Any]:
    messages = [("user", question), ("assistant", answer)]
    return {"messages": [{"role": role, "content": text} for role, text in messages]}


@pytest.fixture
def own_tokenizer() -> HuggingFaceTokenizer:
    """One that a test may change."""
    return HuggingFaceTokenizer(tokenizer_path=str(ROOT / "tests/assets/tokenizer"))


@pytest.fixture
def process(own_tokenizer: HuggingFaceTokenizer) -> Callable[..., Any]:
    def make(length: int = 64, **fields: Any) -> ChatProcessor:
        context = DatasetBuildContext(
            tokenizer=own_tokenizer, max_context_length=length, num_tokens_per_batch=length
        )
        return ChatProcessor.Config(**fields).build(context=context)

    return make


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_only_the_answer_and_its_end_are_learned(
    process: Callable[..., Any], own_tokenizer: HuggingFaceTokenizer
) -> None:
    found = process()(chat(), rng())
    text = own_tokenizer.decode(found.input_ids.tolist(), skip_special_tokens=False)
    assert text == f"<|begin_of_text|>Question: {QUESTION}\nAnswer: {ANSWER}"
    learned = found.labels[found.labels != -100].tolist()
    assert learned[-1] == own_tokenizer.eos_id and learned.count(own_tokenizer.eos_id) == 1
    assert own_tokenizer.decode(learned) == f" {ANSWER}"
    # The last token of the question predicts the first of the answer, and no label comes earlier.
    first = int(np.argmax(found.labels != -100))
    assert (found.labels[first:] != -100).all() and (found.labels[:first] == -100).all()
    assert (
        found.labels[first : len(found.labels) - 1].tolist()
        == found.input_ids[first + 1 :].tolist()
    )


@pytest.mark.parametrize("ending", ["", "{{ eos_token }}", "{{ eos_token }}\n\n"])
def test_the_end_token_comes_once_whatever_the_template_writes(
    process: Callable[..., Any], own_tokenizer: HuggingFaceTokenizer, ending: str
) -> None:
    own_tokenizer.set_chat_template(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
        "{% if m.role == 'assistant' %}" + ending + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    found = process()(chat(), rng())
    assert found.labels[-1] == own_tokenizer.eos_id
    learned = found.labels[found.labels != -100].tolist()
    assert learned.count(own_tokenizer.eos_id) == 1 and ANSWER in own_tokenizer.decode(learned)


def test_a_conversation_longer_than_the_context_is_left_out(process: Callable[..., Any]) -> None:
    length = len(process()(chat(), rng()).input_ids)
    assert process(length)(chat(), rng()) is not None
    assert process(length - 1)(chat(), rng()) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": []}, "Expected single-turn messages.*found none"),
        ({"messages": chat()["messages"] * 2}, "found user, assistant, user, assistant"),
        ({"messages": chat()["messages"][::-1]}, "found assistant, user"),
        ({"messages": "hello"}, "found str"),
        ({"text": "x"}, "no field 'messages'; fields that are there: text"),
        (chat(answer=5), "content of the assistant is a int, not text"),  # type: ignore[arg-type]: on purpose
    ],
)
def test_anything_but_one_question_and_one_answer_is_named(
    process: Callable[..., Any], fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"row 7: .*{reason}"):
        process().process_batch([Record(fields, "row 7", 0)], 0)
    assert "row 7" in str(ChatProcessor.Config().check(Record(fields, "row 7", 0)))


def test_a_function_may_make_the_messages(process: Callable[..., Any]) -> None:
    def of_pair(fields: dict[str, Any]) -> list[dict[str, str]]:
        return chat(fields["q"], fields["a"])["messages"]

    found = process(messages_fn=of_pair)({"q": QUESTION, "a": ANSWER}, rng())
    assert found.labels.tolist() == process()(chat(), rng()).labels.tolist()
    with pytest.raises(ValueError, match="messages_fn failed with KeyError: 'q'"):
        process(messages_fn=of_pair)({"a": ANSWER}, rng())


def test_a_tokenizer_that_lacks_what_chats_need_is_refused_beforehand(
    process: Callable[..., Any], own_tokenizer: HuggingFaceTokenizer
) -> None:
    data = SingleDatasetConfig(
        source=IndexedJsonlSource.Config(patterns=(str(ROOT / "tests/assets/sft_test/data.json"),)),
        processor=ChatProcessor.Config(),
    )
    assert data.check(own_tokenizer) == []
    own_tokenizer.set_chat_template("{{ sep_token }}{{ messages[0].content }}")
    for message in (data.check(own_tokenizer)[0], _refusal(process)):
        assert message.startswith("the chat template writes sep_token, but the tokenizer has none")
    own_tokenizer.eos_id = None
    for message in (data.check(own_tokenizer)[0], _refusal(process)):
        assert "needs a tokenizer with an end token" in message
    own_tokenizer.eos_id, own_tokenizer._template = 1, None
    assert "the tokenizer has none" in data.check(own_tokenizer)[0]


def _refusal(process: Callable[..., Any]) -> str:
    with pytest.raises(ValueError) as caught:
        process()
    return str(caught.value)


def test_a_template_that_rewrites_the_question_is_refused(
    process: Callable[..., Any], own_tokenizer: HuggingFaceTokenizer
) -> None:
    own_tokenizer.set_chat_template("{{ messages | length }}{{ messages[-1].content }}")
    with pytest.raises(ValueError, match="does not begin with"):
        process()(chat(), rng())


def test_labels_survive_the_cache_and_packing(
    make_loader: MakeLoader, tmp_path: Path, tokenizer: HuggingFaceTokenizer
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat(f"q{n}", f"a{n}")) + "\n" for n in range(5)))
    source = IndexedJsonlSource.Config(patterns=(str(path),))
    data = SingleDatasetConfig(source=source, processor=ChatProcessor.Config())
    loader = make_loader(dataset=FirstFitPackingConfig(dataset=data), row_length=128, shuffle=False)
    inputs, labels = next(loader)
    assert tokenizer.decode(labels[labels != -100].tolist()) == " a0 a1 a2 a3 a4"
    num_padding = int((inputs["input"] == 0).sum()) - 5  # Each begins with token 0.
    assert (labels[-num_padding:] == -100).all()


@pytest.mark.parametrize("source", [HuggingFaceRandomAccessSource, HuggingFaceStreamingSource])
def test_conversations_may_come_from_hugging_face(
    make_loader: MakeLoader, tmp_path: Path, tokenizer: HuggingFaceTokenizer, source: Any
) -> None:
    path = tmp_path / "chats.json"
    path.write_text("".join(json.dumps(chat(f"q{n}", f"a{n}")) + "\n" for n in range(5)))
    kwargs = {"data_files": str(path), "cache_dir": str(tmp_path / "hf")}
    config = source.Config(path="json", split="train", load_dataset_kwargs=kwargs)
    data = SingleDatasetConfig(source=config, processor=ChatProcessor.Config())
    assert data.check(tokenizer) == []
    loader = make_loader(dataset=FirstFitPackingConfig(dataset=data), row_length=128, shuffle=False)
    _, labels = next(loader)
    assert tokenizer.decode(labels[labels != -100].tolist()) == " a0 a1 a2 a3 a4"


def test_a_changed_template_is_noticed_at_a_resume(
    make_loader: MakeLoader, own_tokenizer: HuggingFaceTokenizer, process: Callable[..., Any]
) -> None:
    processor = process()
    before = processor.config.describe(processor.context)
    own_tokenizer.set_chat_template("{{ messages[0].content }}{{ messages[-1].content }}")
    assert processor.config.describe(processor.context) != before


def test_the_recipe_learns_from_answers() -> None:
    config: Any = sft_debugmodel().dataloader
    packing: Any = config.dataset
    assert isinstance(packing, FirstFitPackingConfig)
    documents: Any = packing.dataset
    assert isinstance(documents.processor, ChatProcessor.Config)
