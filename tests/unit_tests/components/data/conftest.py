"""A corpus of 23 small documents, the shipped tokenizer, and a loader over both."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.data import DatasetConfig, GrainDataLoader, packed_text
from torchtitan.components.tokenizer import HuggingFaceTokenizer

ROOT = Path(__file__).parents[4]
NUM_DOCUMENTS = 23
ROW_LENGTH = 16


@pytest.fixture(scope="session")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(tokenizer_path=str(ROOT / "tests/assets/tokenizer"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 1 to 40 words, so that rows hold several and some fill several rows."""
    file = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    texts = [
        " ".join(f"word{number}x{word}" for word in range(1 + number * 7 % 40))
        for number in range(NUM_DOCUMENTS)
    ]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def make_loader(
    tokenizer: HuggingFaceTokenizer, corpus: Path, cache_dir: str
) -> Iterator[Callable[..., GrainDataLoader]]:
    """Builds a loader for a rank; keywords beyond the layout are fields of its config."""
    built = []

    def make(
        *,
        world: int = 1,
        rank: int = 0,
        rows: int = 1,
        row_length: int = ROW_LENGTH,
        files: str | None = None,
        dataset: DatasetConfig | None = None,
        other_tokenizer: HuggingFaceTokenizer | None = None,
        **settings: Any,
    ) -> GrainDataLoader:
        fields: dict[str, Any] = {"cache_dir": cache_dir, "num_prefetch_batches": 0, **settings}
        data = dataset or packed_text([files or str(corpus)])
        config = GrainDataLoader.Config(dataset=data, **fields)
        loader = config.build(
            dp_world_size=world,
            dp_rank=rank,
            tokenizer=other_tokenizer or tokenizer,
            max_context_length=row_length,
            num_tokens_per_batch=rows * row_length,
        )
        built.append(loader)
        return loader

    yield make
    for loader in built:
        loader.close()
