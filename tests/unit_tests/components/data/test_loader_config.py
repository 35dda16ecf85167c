import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tyro
from torchtitan.components.data import (
    BaseDataLoader,
    ConcatThenSplitPackingConfig,
    GrainDataLoader,
    packed_text,
    SingleDatasetConfig,
)
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config.manager import custom_registry

from tests.unit_tests.components.data.streams import LinesStream


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Stands for the whole config of a run."""

    dataloader: BaseDataLoader.Config = field(
        default_factory=lambda: GrainDataLoader.Config(dataset=packed_text(["recipe.jsonl"]))
    )


def parse(*arguments: str) -> GrainDataLoader.Config:
    config = tyro.cli(RunConfig, args=arguments, default=RunConfig(), registry=custom_registry)
    assert isinstance(config.dataloader, GrainDataLoader.Config)
    return config.dataloader


def problems(
    config: GrainDataLoader.Config, row_length: int = 8, num_tokens: int = 16
) -> list[str]:
    return config.check(max_context_length=row_length, num_tokens_per_batch=num_tokens)


@pytest.fixture
def own_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory holds text of two kinds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"body": "from the lines file, a few tokens"}\n')
    (tmp_path / "b.txt").write_text("from the plain file, a few tokens")
    return tmp_path


def test_flags_alone_train_on_text_of_ones_own(
    own_text: Path, tokenizer: HuggingFaceTokenizer
) -> None:
    (own_text / "notes").mkdir()
    (own_text / "notes/c.md").write_text("from the notes")
    config = parse(
        "--dataloader.files",
        "a.jsonl,notes/*.md,b.txt",
        "--dataloader.text_field",
        "text",
        "--dataloader.no-shuffle",
        "--dataloader.cache_dir",
        "cache",
    )
    (own_text / "a.jsonl").write_text('{"text": "from the lines file"}\n')
    assert problems(config) == []
    loader = config.build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=tokenizer,
        max_context_length=8,
        num_tokens_per_batch=8,
    )
    tokens = []
    feed: Any = loader._feed
    for _ in range(len(feed._rows)):
        tokens += next(loader)[0]["input"].tolist()
    loader.close()
    text = tokenizer.decode(tokens)
    assert "from the lines file".startswith(text[:19]) and "from the plain file" in text
    assert (own_text / "cache/tokens").is_dir()


def test_another_field_holds_the_text(own_text: Path) -> None:
    flags = ("--dataloader.files", "a.jsonl")
    assert problems(parse(*flags, "--dataloader.text_field", "body")) == []
    (problem,) = problems(parse(*flags))
    assert problem.startswith("a.jsonl, line 1: no field 'text'; fields that are there: body")


def test_a_field_without_files_is_refused() -> None:
    with pytest.raises(ValueError, match="text_field is 'body' but dataloader.files is empty"):
        GrainDataLoader.Config(dataset=packed_text(["x.jsonl"]), text_field="body")


def test_no_data_at_all_is_refused() -> None:
    assert any("Give --dataloader.files" in found for found in problems(GrainDataLoader.Config()))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_an_impossible_seed_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=f"dataloader.seed is {seed}"):
        GrainDataLoader.Config(seed=seed)


def test_a_negative_read_ahead_is_refused() -> None:
    with pytest.raises(ValueError, match="num_prefetch_batches is -1"):
        GrainDataLoader.Config(num_prefetch_batches=-1)


def test_the_config_is_plain_values() -> None:
    config = GrainDataLoader.Config(dataset=packed_text(["x.jsonl"]))
    plain = json.loads(json.dumps(config.to_dict()))
    assert plain["dataset"]["dataset"]["source"] == {"patterns": ["x.jsonl"]}
    assert (plain["seed"], plain["shuffle"], plain["repeat"]) == (42, True, True)


def test_help_explains_every_flag_and_hides_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    flags = "files text-field seed shuffle repeat num-prefetch-batches cache-dir"
    assert all(f"--dataloader.{flag}" in shown.replace("no-", "") for flag in flags.split())
    assert "read-options" not in shown and "collator" not in shown


def test_check_names_all_problems_at_once(own_text: Path) -> None:
    lines = ['{"text": "fine"}', "", "{broken", '{"other": 1}', '{"text": 5}']
    (own_text / "a.jsonl").write_text("\n".join(lines))
    (own_text / "flat").touch()
    found = problems(
        GrainDataLoader.Config(files=["*.jsonl"], cache_dir="flat"), row_length=10, num_tokens=15
    )
    starts = [
        "a microbatch of 15 tokens cannot be made of rows of 10",
        "a.jsonl, line 3: not JSON",
        "a.jsonl, line 4: no field 'text'",
        "a.jsonl, line 5: field 'text' holds a int",
        "token cache in flat: is no folder",
    ]
    assert len(found) == len(starts)
    assert all(text.startswith(start) for text, start in zip(found, starts, strict=True))


def test_settings_of_streams_are_refused_for_corpora(own_text: Path) -> None:
    config = GrainDataLoader.Config(
        files=["b.txt"], streaming_shuffle_buffer_size=5, allow_changed_degree=True
    )
    found = problems(config)
    assert [message.split()[0] for message in found] == [
        "--dataloader.streaming-shuffle-buffer-size",
        "--dataloader.allow-changed-degree",
    ]
    stream = LinesStream.Config(path=str(own_text / "a.jsonl"))
    data = ConcatThenSplitPackingConfig(dataset=SingleDatasetConfig(source=stream))
    config = GrainDataLoader.Config(dataset=data, streaming_shuffle_buffer_size=5)
    assert not any("has no effect" in message for message in problems(config))


def test_many_broken_lines_are_counted(own_text: Path) -> None:
    (own_text / "a.jsonl").write_text("broken\n" * 25)
    found = problems(GrainDataLoader.Config(files=["a.jsonl"]))
    assert len(found) == 11
    assert found[-1] == "and 15 more broken documents"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no data file for a.jsonl"), ("", "empty data files"), (" \n\n", "no document")],
)
def test_check_and_build_refuse_missing_and_empty_data_alike(
    own_text: Path, tokenizer: HuggingFaceTokenizer, content: str | None, message: str
) -> None:
    os.remove("a.jsonl")
    if content is not None:
        (own_text / "a.jsonl").write_text(content)
    config = GrainDataLoader.Config(files=["a.jsonl"], cache_dir="cache")
    (problem,) = problems(config)
    assert message in problem
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        config.build(
            dp_world_size=1,
            dp_rank=0,
            tokenizer=tokenizer,
            max_context_length=8,
            num_tokens_per_batch=8,
        )


def test_check_leaves_no_trace(own_text: Path) -> None:
    before = sorted(own_text.rglob("*"))
    problems(GrainDataLoader.Config(files=["*.*"], cache_dir="cache"))
    assert sorted(own_text.rglob("*")) == before


@pytest.mark.parametrize(("row_length", "num_tokens"), [(8, 12), (8, 4), (8, 0)])
def test_a_microbatch_that_rows_do_not_fill_is_refused(
    own_text: Path, tokenizer: HuggingFaceTokenizer, row_length: int, num_tokens: int
) -> None:
    config = GrainDataLoader.Config(files=["b.txt"], cache_dir="cache")
    message = f"a microbatch of {num_tokens} tokens cannot be made of rows of {row_length} tokens"
    assert problems(config, row_length, num_tokens)[0].startswith(message)
    with pytest.raises(ValueError, match=message):
        config.build(
            dp_world_size=1,
            dp_rank=0,
            tokenizer=tokenizer,
            max_context_length=row_length,
            num_tokens_per_batch=num_tokens,
        )
    assert not (own_text / "cache").exists()


def test_too_little_data_without_repeat_is_refused(
    own_text: Path, tokenizer: HuggingFaceTokenizer
) -> None:
    config = GrainDataLoader.Config(files=["b.txt"], cache_dir="cache", repeat=False)
    with pytest.raises(ValueError, match="makes no batch: found 1 rows, one batch over 2 ranks"):
        config.build(
            dp_world_size=2,
            dp_rank=0,
            tokenizer=tokenizer,
            max_context_length=8,
            num_tokens_per_batch=8,
        )
