"""Train the byte-level BPE tokenizer that the recipes and the tests use.

Every byte is a token, so no text is lost: decoding what was encoded gives the same text, whatever
the script. The same corpus and size give the same files, byte for byte.

    corpus.jsonl -> texts -> BPE merges -> tokenizer.json + tokenizer_config.json
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import decoders, models, pre_tokenizers, Tokenizer, trainers

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (BOS, EOS, PAD)
NUM_BYTES = 256


def train(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with ``vocab_size`` entries, the special tokens (ids 0 to 2) among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        # Bytes that the corpus lacks must be encodable too.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``, made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def read_texts(corpus: Path, text_field: str) -> Iterator[str]:
    with corpus.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)[text_field]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--corpus",
        type=Path,
        default=Path("tests/assets/jargon/jargon.jsonl"),
        help="text to learn from, one JSON object a line (default: %(default)s)",
    )
    parser.add_argument(
        "--text-field", default="text", help="field that holds the text (default: %(default)s)"
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=2048,
        help="entries, special tokens among them (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("tests/assets/tokenizer"),
        help="folder for the two files (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    smallest = NUM_BYTES + len(SPECIAL_TOKENS)
    if options.vocab_size < smallest:
        parser.error(
            f"--vocab-size {options.vocab_size} is too small: {NUM_BYTES} bytes and "
            f"{len(SPECIAL_TOKENS)} special tokens need at least {smallest}"
        )
    if not options.corpus.is_file():
        parser.error(f"--corpus {options.corpus}: there is no such file")
    tokenizer = train(read_texts(options.corpus, options.text_field), options.vocab_size)
    save(tokenizer, options.output)
    print(f"{options.output}: {tokenizer.get_vocab_size()} entries from {options.corpus}")


if __name__ == "__main__":
    main()
