import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.tokenizer import HuggingFaceTokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [{"role": "user", "content": "a <b> \u00e9"}]


def rendered(text: str, **variables: Any) -> str:
    return ChatTemplate(text, TOKENS).render(MESSAGES, **variables)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>a <b> \u00e9</s>"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "a <b> \u00e9"}'),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{% for n in [1, 2, 3] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", "1"),
        ("{% if add_generation_prompt %}on{% else %}off{% endif %}", "off"),
        ("{% if tools %}tools{% endif %}{{ other is defined }}", "False"),
        ("{% if pad_token is defined %}{{ pad_token }}{% endif %}-", "-"),
    ],
)
def test_templates_find_what_they_expect(template: str, text: str) -> None:
    assert rendered(template) == text


def test_variables_reach_the_template() -> None:
    assert (
        rendered("{{ add_generation_prompt }} {{ day }}", add_generation_prompt=True, day=3)
        == "True 3"
    )
    assert len(rendered("{{ strftime_now('%Y') }}")) == 4


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ pad_token }}",
            "writes pad_token, but the tokenizer has none; it has bos_token, eos_token",
        ),
        ("{{ raise_exception('no tools here') }}", "failed with TemplateError: no tools here"),
        ("{{ messages[3].content }}", "failed with UndefinedError"),
        ("{{ messages.append(1) }}", "does what templates may not do"),
        ("{{ ''.__class__.__mro__ }}", "does what templates may not do"),
    ],
)
def test_a_template_that_fails_says_why(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rendered(template)


def test_a_broken_template_is_named_with_its_line() -> None:
    with pytest.raises(ValueError, match="the chat template is none, line 2: "):
        ChatTemplate("fine\n{% if %}", TOKENS)


def test_a_template_can_be_given_to_another_process() -> None:
    template = ChatTemplate("{{ messages[0].role }}", TOKENS)
    template.render(MESSAGES)
    assert pickle.loads(pickle.dumps(template)).render(MESSAGES) == "user"


def tokenizer_with(folder: Path, **settings: Any) -> HuggingFaceTokenizer:
    (folder / "vocab.json").write_text(json.dumps({"[UNK]": 0, "user": 1, "<s>": 2}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return HuggingFaceTokenizer(tokenizer_path=str(folder))


def test_the_file_beats_the_settings(tmp_path: Path) -> None:
    inline = "inline {{ messages[0].role }}"
    assert tokenizer_with(tmp_path).chat_template is None
    tokenizer = tokenizer_with(tmp_path, chat_template=inline)
    assert tokenizer.apply_chat_template(MESSAGES) == "inline user"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": inline}]
    assert tokenizer_with(tmp_path, chat_template=named).chat_template == inline
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    tokenizer = tokenizer_with(tmp_path, chat_template=inline, bos_token="<s>")
    assert tokenizer.apply_chat_template(MESSAGES) == "file <s>"
    tokenizer.set_chat_template("set")
    assert tokenizer.apply_chat_template(MESSAGES) == "set"


def test_without_a_template_the_way_out_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="chat_template.jinja"):
        tokenizer_with(tmp_path).apply_chat_template(MESSAGES)
