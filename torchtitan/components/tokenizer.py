"""Turn text into token ids and back.

A tokenizer is a folder of files; the special tokens come from ``tokenizer_config.json``, which is
optional, and so is a chat template. The one fact to know: ``encode`` never adds a begin or end
token twice. What the files' own post-processor adds already is left to it.

    folder -> tokenizer.json                 -> as it is
           -> vocab.json/.txt + merges.txt   -> byte-level BPE
           -> vocab.json/.txt                -> one id per word, "[UNK]" for the rest
           -> chat_template.jinja, else tokenizer_config.json -> chat_template.py
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, Tokenizer

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.config import Configurable
from torchtitan.tools.logging import logger

_CONFIG_FILE = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_VOCABULARY_FILES = ("vocab.json", "vocab.txt")
_UNKNOWN_TOKEN = "[UNK]"


class BaseTokenizer(ABC, Configurable):
    """What the data pipeline asks of a tokenizer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        def check(self, *, tokenizer_path: str) -> list[str]:
            """What keeps the tokenizer at ``tokenizer_path`` from being built; cheap, no effects."""
            return []

    bos_id: int | None = None
    eos_id: int | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    _template: ChatTemplate | None = None

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template; None without one."""
        return None if self._template is None else self._template.text

    def set_chat_template(self, template: str) -> None:
        """Write conversations with ``template``, in the language of jinja.

        Raises ValueError when it is no template.
        """
        self._template = ChatTemplate(template, self.special_tokens())

    def special_tokens(self) -> dict[str, str]:
        """The special tokens by the names that a chat template may use, such as ``eos_token``."""
        named = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        return {name: token for name, token in named.items() if token is not None}

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> str:
        """The text of a conversation; ``kwargs`` such as ``add_generation_prompt`` go to the template.

        Raises ValueError without a template, and for one that fails or needs a token that is missing.
        """
        if self._template is None:
            raise ValueError(
                f"a chat template was asked for, but the tokenizer has none. Put {_TEMPLATE_FILE} "
                f"beside it, or a chat_template into its {_CONFIG_FILE}."
            )
        return self._template.render(messages, **kwargs)

    @abstractmethod
    def encode(
        self, text: str, add_bos: bool | None = None, add_eos: bool | None = None
    ) -> list[int]:
        """The ids of ``text``; ``None`` follows the tokenizer's own settings."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        """The text of ``token_ids``."""

    @abstractmethod
    def get_vocab_size(self) -> int:
        """Number of ids, special tokens included: every id is below it."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A digest that differs when any text could be encoded differently.

        Cached tokens and saved positions of the data are valid only under the same digest.
        """

    def encode_verbatim(self, text: str) -> list[int]:
        """The ids of ``text`` and of nothing else: no begin or end token that it does not spell."""
        return self.encode(text, add_bos=False, add_eos=False)

    def encode_batch(
        self, texts: Sequence[str], add_bos: bool | None = None, add_eos: bool | None = None
    ) -> list[list[int]]:
        """``encode`` for many texts."""
        return [self.encode(text, add_bos=add_bos, add_eos=add_eos) for text in texts]


class HuggingFaceTokenizer(BaseTokenizer):
    """A tokenizer read from local files in the Hugging Face formats.

    Raises FileNotFoundError for a missing folder and for one without a tokenizer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        def check(self, *, tokenizer_path: str) -> list[str]:
            """Says when the folder or a tokenizer in it is missing or barred; opens no file."""
            try:
                _tokenizer_files(Path(tokenizer_path))
            except OSError as error:
                return [str(error)]
            return []

    def __init__(self, config: Config | None = None, *, tokenizer_path: str) -> None:
        self.config = config or HuggingFaceTokenizer.Config()
        self.tokenizer_path = tokenizer_path
        folder = Path(tokenizer_path)
        files = _tokenizer_files(folder)
        self.tokenizer = _load(files)

        settings = _read_settings(folder / _CONFIG_FILE)
        _add_special_tokens(self.tokenizer, settings, folder / _CONFIG_FILE)
        # Ids may have gaps, so the number of entries alone could be too small.
        self._vocab_size = max(self.tokenizer.get_vocab().values(), default=-1) + 1
        self.bos_token = _token_text(settings.get("bos_token"))
        self.eos_token = _token_text(settings.get("eos_token"))
        self.bos_id = self._special_id("bos_token", self.bos_token)
        self.eos_id = self._special_id("eos_token", self.eos_token)

        # Asking the tokenizer itself is surer than reading its post-processor's description.
        probe = self.tokenizer.encode("a").ids
        self.hf_adds_bos = self.bos_id is not None and probe[:1] == [self.bos_id]
        self.hf_adds_eos = self.eos_id is not None and probe[-1:] == [self.eos_id]
        self.default_add_bos = bool(settings.get("add_bos_token", False))
        self.default_add_eos = bool(settings.get("add_eos_token", False))
        self._named_tokens = _named_tokens(settings)
        self._fingerprint = self._digest(files)
        if (template := _read_template(folder / _TEMPLATE_FILE, settings)) is not None:
            self.set_chat_template(template)

    def _special_id(self, name: str, token: str | None) -> int | None:
        if token is None:
            return None
        token_id = self.tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(
                f"{self.tokenizer_path}/{_CONFIG_FILE} names {token!r} as {name}, but the "
                f"vocabulary of {self.get_vocab_size()} entries has no such token. Add it to the "
                "tokenizer or correct the name."
            )
        return token_id

    def _digest(self, files: Sequence[Path]) -> str:
        digest = hashlib.sha256()
        for file in files:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{file.name}:{content}\n".encode())
        special = [self.bos_token, self.eos_token, self.default_add_bos, self.default_add_eos]
        added = sorted(self.tokenizer.get_added_tokens_decoder().items())
        vocabulary = [(id_, token.content) for id_, token in added]
        # They may come from the settings file, and decide which spaces a token takes along. Left out
        # where they are the usual ones: positions saved before flags were looked at stay valid.
        flags = [
            [id_, token.lstrip, token.rstrip, token.single_word, token.normalized]
            for id_, token in added
            if token.lstrip
            or token.rstrip
            or token.single_word
            or token.normalized == token.special
        ]
        digest.update(json.dumps([special, vocabulary, *([flags] if flags else [])]).encode())
        return digest.hexdigest()[:32]

    def fingerprint(self) -> str:
        """A digest of the files' content and of the special tokens, wherever the folder lies."""
        return self._fingerprint

    def _affixes(self, add_bos: bool | None, add_eos: bool | None) -> tuple[list[int], list[int]]:
        want_bos = self.default_add_bos if add_bos is None else add_bos
        want_eos = self.default_add_eos if add_eos is None else add_eos
        prefix, suffix = [], []
        if want_bos and not self.hf_adds_bos and self.bos_id is not None:
            prefix.append(self.bos_id)
        if want_eos and not self.hf_adds_eos and self.eos_id is not None:
            suffix.append(self.eos_id)
        return prefix, suffix

    def encode(
        self, text: str, add_bos: bool | None = None, add_eos: bool | None = None
    ) -> list[int]:
        """The ids of ``text``.

        ``add_bos`` and ``add_eos`` add only what the tokenizer's own post-processor does not;
        ``None`` follows ``add_bos_token`` and ``add_eos_token`` of the settings file, off when it
        has no such key. A special token that the tokenizer lacks is not added.
        """
        prefix, suffix = self._affixes(add_bos, add_eos)
        return prefix + self.tokenizer.encode(text).ids + suffix

    def encode_batch(
        self, texts: Sequence[str], add_bos: bool | None = None, add_eos: bool | None = None
    ) -> list[list[int]]:
        """``encode`` for many texts, on all cores."""
        prefix, suffix = self._affixes(add_bos, add_eos)
        return [prefix + found.ids + suffix for found in self.tokenizer.encode_batch(list(texts))]

    def encode_verbatim(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def special_tokens(self) -> dict[str, str]:
        return self._named_tokens

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        """The text of ``token_ids``, without special tokens unless ``skip_special_tokens=False``."""
        return self.tokenizer.decode(list(token_ids), **kwargs)

    def get_vocab_size(self) -> int:
        return self._vocab_size

    @property
    def vocab_size(self) -> int:
        """The same as ``get_vocab_size()``."""
        return self._vocab_size

    def id_to_token(self, token_id: int) -> str | None:
        return self.tokenizer.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)

    def get_vocab(self) -> dict[str, int]:
        """Every token, special ones too, with its id."""
        return self.tokenizer.get_vocab(with_added_tokens=True)


def _tokenizer_files(folder: Path) -> list[Path]:
    """The files that make up the tokenizer in ``folder``, in the order of the module's table."""
    if not folder.is_dir():
        found = "a file of that name" if folder.exists() else "nothing of that name"
        raise FileNotFoundError(
            f"tokenizer folder {folder}: found {found} (seen from {Path.cwd()}). Set "
            "--hf_assets_path to a folder that holds tokenizer.json."
        )
    if (folder / "tokenizer.json").is_file():
        return [folder / "tokenizer.json"]
    vocabularies = [folder / name for name in _VOCABULARY_FILES if (folder / name).is_file()]
    if vocabularies:
        merges = folder / "merges.txt"
        return [vocabularies[0], merges] if merges.is_file() else [vocabularies[0]]
    names = sorted(entry.name for entry in folder.iterdir())
    raise FileNotFoundError(
        f"no tokenizer in {folder}: looked for tokenizer.json, else vocab.json or vocab.txt with "
        f"or without merges.txt; found {', '.join(names) or 'an empty folder'}. Put one of them "
        "there, or point --hf_assets_path to a folder that has one."
    )


def _load(files: Sequence[Path]) -> Tokenizer:
    first = files[0]
    try:
        if first.name == "tokenizer.json":
            return Tokenizer.from_file(str(first))
        vocabulary = _read_vocabulary(first)
        if len(files) == 2:
            return _byte_level_bpe(vocabulary, files[1])
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN_TOKEN))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        return tokenizer
    # The library raises a bare Exception for whatever is wrong with a file.
    except Exception as error:
        raise ValueError(
            f"cannot read the tokenizer in {', '.join(map(str, files))}: {error}. Write the "
            "files anew or point --hf_assets_path to another folder."
        ) from error


def _read_vocabulary(file: Path) -> dict[str, int]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        return json.loads(text)
    return {token: token_id for token_id, token in enumerate(text.splitlines())}


def _byte_level_bpe(vocabulary: dict[str, int], merges_file: Path) -> Tokenizer:
    merges = []
    for line in merges_file.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#version"):
            left, right = line.split(" ")
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        logger.warning(
            f"{file} is missing: the tokenizer has no begin and end tokens, so documents are "
            "not separated by a token"
        )
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}. Correct it or remove it.") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file} holds a {type(settings).__name__}, not an object. Correct it.")
    return settings


def _named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """All that the settings call a token: ``bos_token``, ``pad_token`` and the like."""
    texts = {name: _token_text(value) for name, value in settings.items() if _is_token(name, value)}
    return {name: text for name, text in texts.items() if text is not None}


def _is_token(name: str, value: Any) -> bool:
    is_text = isinstance(value, str) or (isinstance(value, dict) and "content" in value)
    return name.endswith("_token") and is_text


def _read_template(file: Path, settings: dict[str, Any]) -> str | None:
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        # Several, by name; the one called default is the one for conversations.
        named = {item.get("name"): item.get("template") for item in found}
        return named.get("default")
    return found


def _token_text(value: str | dict[str, Any] | None) -> str | None:
    return value["content"] if isinstance(value, dict) else value


def _add_special_tokens(tokenizer: Tokenizer, settings: dict[str, Any], file: Path) -> None:
    """Register the special tokens that ``settings`` lists, at exactly the ids they are given."""
    listed = settings.get("added_tokens_decoder", {})
    for id_text, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        token = AddedToken(
            entry["content"],
            single_word=entry.get("single_word", False),
            lstrip=entry.get("lstrip", False),
            rstrip=entry.get("rstrip", False),
            normalized=entry.get("normalized", False),
        )
        if entry.get("special", True):
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != int(id_text):
            raise ValueError(
                f"{file} gives {token.content!r} the id {id_text}, but the vocabulary gives it "
                f"{tokenizer.token_to_id(token.content)}. Use the files of one tokenizer."
            )
    for name in ("bos_token", "eos_token", "pad_token"):
        text = _token_text(settings.get(name))
        # A special token is one id even where the model would split its text.
        if text is not None and tokenizer.token_to_id(text) is not None:
            tokenizer.add_special_tokens([text])
