import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors, Tokenizer
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

ROOT = Path(__file__).parents[3]
ASSETS = ROOT / "tests/assets"
BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"


@pytest.fixture(scope="module")
def shipped() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.Config().build(tokenizer_path=str(ASSETS / "tokenizer"))


def small_bpe(folder: Path, **settings: Any) -> HuggingFaceTokenizer:
    """Letters a to e, one merge, and special tokens beyond the vocabulary."""
    vocabulary = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, "ab": 5}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return HuggingFaceTokenizer(tokenizer_path=str(folder))


SPECIAL = {
    "bos_token": {"content": "<s>"},
    "eos_token": "</s>",
    "added_tokens_decoder": {"7": {"content": "</s>"}, "6": {"content": "<s>"}},
}


def test_no_text_of_the_corpus_is_lost(shipped: HuggingFaceTokenizer) -> None:
    lines = (ASSETS / "jargon/jargon.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert len(texts) == 2250
    encoded = shipped.encode_batch(texts, add_bos=True, add_eos=True)
    assert [shipped.decode(ids) for ids in encoded] == texts


def test_text_unlike_the_corpus_is_not_lost_either(shipped: HuggingFaceTokenizer) -> None:
    text = "\u65e5\u672c\u8a9e \U0001f600\r\n\t  \x00 end"
    assert shipped.decode(shipped.encode(text)) == text


def test_the_shipped_vocabulary_is_2048_with_its_special_tokens(
    shipped: HuggingFaceTokenizer,
) -> None:
    assert shipped.get_vocab_size() == shipped.vocab_size == len(shipped.get_vocab()) == 2048
    assert [shipped.token_to_id(token) for token in (BOS, EOS, PAD)] == [0, 1, 2]
    assert (shipped.bos_token, shipped.eos_token) == (BOS, EOS)
    assert (shipped.bos_id, shipped.eos_id) == (0, 1)
    assert shipped.id_to_token(2) == PAD
    assert isinstance(shipped, BaseTokenizer)


def test_the_training_script_makes_the_shipped_files(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/train_tokenizer.py", "--output", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (ASSETS / "tokenizer" / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vocab-size", "258"], "at least 259"),
        (["--corpus", "missing.jsonl"], "there is no such file"),
    ],
)
def test_the_training_script_refuses_what_cannot_work(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    command = [sys.executable, "scripts/train_tokenizer.py", "--output", str(tmp_path), *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert message in result.stderr


def test_begin_and_end_are_added_when_asked_and_never_twice(
    shipped: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    plain = shipped.encode("hello")
    assert shipped.encode("hello", add_bos=True, add_eos=True) == [0, *plain, 1]
    assert shipped.encode("hello", add_bos=True) == [0, *plain]

    adding = Tokenizer.from_file(str(ASSETS / "tokenizer/tokenizer.json"))
    adding.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    adding.save(str(tmp_path / "tokenizer.json"))
    settings = (ASSETS / "tokenizer/tokenizer_config.json").read_text()
    (tmp_path / "tokenizer_config.json").write_text(settings)
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(tmp_path))
    assert (tokenizer.hf_adds_bos, tokenizer.hf_adds_eos) == (True, False)
    for add_bos in (True, False, None):
        assert tokenizer.encode("hello", add_bos=add_bos, add_eos=True) == [0, *plain, 1]


def test_the_settings_file_decides_the_default(tmp_path: Path) -> None:
    tokenizer = small_bpe(tmp_path, **SPECIAL, add_bos_token=True, add_eos_token=True)
    assert (tokenizer.default_add_bos, tokenizer.default_add_eos) == (True, True)
    assert tokenizer.encode("abc") == [6, 5, 2, 7]
    assert tokenizer.encode("abc", add_bos=False, add_eos=False) == [5, 2]
    assert tokenizer.encode_batch(["a", "b"]) == [[6, 0, 7], [6, 1, 7]]


def test_vocabulary_and_merges_make_a_byte_level_bpe(tmp_path: Path) -> None:
    tokenizer = small_bpe(tmp_path, **SPECIAL)
    assert tokenizer.encode("abcab", add_bos=True) == [6, 5, 2, 5]
    assert tokenizer.decode([6, 5, 2, 7]) == "abc"
    assert tokenizer.decode([6, 5, 2, 7], skip_special_tokens=False) == "<s>abc</s>"
    assert tokenizer.get_vocab_size() == 8


@pytest.mark.parametrize("name", ["vocab.json", "vocab.txt"])
def test_a_vocabulary_alone_makes_a_word_level_tokenizer(tmp_path: Path, name: str) -> None:
    words = ["[UNK]", "hello", "world"]
    as_json = json.dumps({word: number for number, word in enumerate(words)})
    (tmp_path / name).write_text(as_json if name.endswith("json") else "\n".join(words))
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(tmp_path))
    assert tokenizer.encode("hello strange world") == [1, 0, 2]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)
    assert tokenizer.encode("hello", add_bos=True, add_eos=True) == [1]


def test_a_missing_settings_file_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]")
    HuggingFaceTokenizer(tokenizer_path=str(tmp_path))
    assert "tokenizer_config.json is missing" in caplog.text


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere: found nothing.*--hf_assets_path"):
        HuggingFaceTokenizer(tokenizer_path=path)
    (problem,) = HuggingFaceTokenizer.Config().check(tokenizer_path=path)
    assert "nowhere: found nothing" in problem
    (tmp_path / "nowhere").touch()
    with pytest.raises(FileNotFoundError, match="found a file of that name"):
        HuggingFaceTokenizer(tokenizer_path=path)


def test_a_folder_without_a_tokenizer_lists_what_was_looked_for_and_found(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").touch()
    (tmp_path / "merges.txt").touch()
    with pytest.raises(FileNotFoundError) as caught:
        HuggingFaceTokenizer(tokenizer_path=str(tmp_path))
    message = str(caught.value)
    for part in ("tokenizer.json", "vocab.json", "vocab.txt", "--hf_assets_path"):
        assert part in message
    assert "found merges.txt, tokenizer.model" in message
    assert HuggingFaceTokenizer.Config().check(tokenizer_path=str(tmp_path)) == [message]


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    small_bpe(tmp_path)
    (tmp_path / name).write_text("{broken")
    with pytest.raises(ValueError, match=name):
        HuggingFaceTokenizer(tokenizer_path=str(tmp_path))


def test_a_special_token_that_the_vocabulary_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'<s>' as bos_token.*6 entries"):
        small_bpe(tmp_path, bos_token="<s>")


def test_special_tokens_at_other_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'<s>' the id 9, but the vocabulary gives it 6"):
        small_bpe(tmp_path, added_tokens_decoder={"9": {"content": "<s>"}})


def test_the_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    first = small_bpe(tmp_path / "one", **SPECIAL)
    assert small_bpe(tmp_path / "two", **SPECIAL).fingerprint() == first.fingerprint()

    other_default = small_bpe(tmp_path / "two", **SPECIAL, add_eos_token=True)
    other_special = small_bpe(tmp_path / "two", **(SPECIAL | {"eos_token": "<s>"}))
    (tmp_path / "two/merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "two/tokenizer_config.json").write_text(json.dumps(SPECIAL))
    other_merges = HuggingFaceTokenizer(tokenizer_path=str(tmp_path / "two"))
    prints = {
        tokenizer.fingerprint() for tokenizer in (first, other_default, other_special, other_merges)
    }
    assert len(prints) == 4


def test_the_fingerprint_follows_the_flags_of_added_tokens(tmp_path: Path) -> None:
    entry = {"content": "<s>", "special": True}
    plain, greedy = [
        small_bpe(tmp_path, added_tokens_decoder={"6": {**entry, "lstrip": lstrip}})
        for lstrip in (False, True)
    ]
    assert plain.fingerprint() != greedy.fingerprint()
