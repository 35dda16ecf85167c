"""Settings that cannot work end with exit code 2 and one message, before anything starts."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from torchtitan.components.data import (
    ChatProcessor,
    FirstFitPackingConfig,
    GrainDataLoader,
    IndexedJsonlSource,
    SingleDatasetConfig,
)
from torchtitan.config.violations import EXIT_CODE
from torchtitan.models.common.decoder import Decoder
from torchtitan.preflight import parse_or_exit, problems
from torchtitan.trainer import Trainer

from tests.unit_tests.preflight.conftest import RECIPE, Refusal


def message_of(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        parse_or_exit(args)
    assert stop.value.code == EXIT_CODE
    return " ".join(capsys.readouterr().err.split())


def checkpoint_files(folder: str, step: int, marker: bool = True) -> Path:
    path = Path(folder) / "checkpoint" / f"step-{step}"
    path.mkdir(parents=True)
    if marker:
        (path / ".metadata").write_bytes(b"")
    return path


def test_a_recipe_as_it_stands_has_no_problems_and_nothing_is_written(
    config: Trainer.Config, tmp_path: Path
) -> None:
    assert problems(config, 1) == problems(config, 2) == []
    assert list(tmp_path.iterdir()) == []


def test_violations_of_fields_in_different_sections_come_in_one_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = "--checkpoint.interval 0 --checkpoint.keep_latest_k 1 --metrics.log_freq 0"
    message = message_of([*RECIPE, *flags.split(), "--training.max_context_length", "0"], capsys)
    for part in ("interval", "at least 2", "log_freq", "max_context_length"):
        assert part in message
    assert message.startswith("4 settings cannot be used")


def test_broken_fields_and_broken_combinations_come_in_one_message(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async_tp = ["--compile.enable", "--compile.enable_async_tensor_parallel"]
    flags = ["--checkpoint.interval=0", "--training.max_context_length=0", *async_tp]
    message = message_of([*RECIPE, *flags, f"--hf_assets_path={tmp_path}"], capsys)
    for part in ("interval", "max_context_length", async_tp[1].replace("_", "-"), str(tmp_path)):
        assert part in message
    assert message.startswith("4 settings cannot be used")


def test_violations_across_sections_come_in_one_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NGPU", "3")
    flags = [
        "--parallelism.data_parallel_shard_degree=2",
        "--training.num_tokens_per_train_step=1000",
        f"--hf_assets_path={tmp_path}",
        "--dataloader.files=missing-*.jsonl",
        "--checkpoint.load_step=7",
    ]
    message = message_of([*RECIPE, *flags], capsys)
    parts = [
        "data_parallel_shard_degree",
        "num_tokens_per_train_step=1000 is not a multiple of the 3072",
        f"no tokenizer in {tmp_path}:",
        "no data file for missing-*.jsonl",
        "--checkpoint.load_step=7 was asked for",
    ]
    assert not [part for part in parts if part not in message], message
    assert message.startswith("5 settings cannot be used")


@pytest.mark.parametrize("degree", [0, -1])
def test_a_degree_that_is_no_number_of_ranks_is_refused_once(degree: int, refusal: Refusal) -> None:
    [message] = refusal([f"--parallelism.tensor_parallel_degree={degree}"])
    assert f"tensor_parallel_degree is {degree}; it must be greater than 0" in message


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--config", "llama3_jargon"], "--module is required."),
        (["--module", "llama3"], "--config is required."),
        (["--module", "nope", "--config", "x"], "Cannot import module 'nope'"),
        (["--module", "llama3", "--config", "llama3_jargo"], "Did you mean llama3_jargon?"),
    ],
)
def test_a_missing_or_unknown_recipe_ends_with_exit_code_2(
    args: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = message_of(args, capsys)
    assert message.startswith("1 setting cannot be used")
    assert text in message


def test_an_unknown_flag_ends_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--training.stepz" in message_of([*RECIPE, "--training.stepz", "3"], capsys)


@pytest.mark.parametrize(
    "flags",
    [
        "--parallelism.pipeline_parallel_degree 2",
        "--parallelism.context_parallel_degree 2",
        "--parallelism.expert_parallel_degree 2",
        "--parallelism.num_pp_microbatches 4",
        "--debug.moe_force_load_balance",
        "--checkpoint.last_save_in_hf --checkpoint.last_save_model_only",
        "--checkpoint.initial_load_in_hf",
        "--checkpoint.folder s3://bucket/run",
        "--dump_folder memory://run",
        "--comm.mode local_tensor",
    ],
)
def test_what_is_not_available_is_refused_by_its_flag(flags: str, refusal: Refusal) -> None:
    name = flags.split()[0].replace("-", "_")
    assert [
        message
        for message in refusal(flags)
        if name in message.replace("-", "_") and "not available" in message
    ]


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(config: Trainer.Config) -> None:
    assert config.model_spec is not None
    model = config.model_spec.model
    assert isinstance(model, Decoder.Config)
    model.vocab_size = 1000
    loss, tokenizer = problems(config, 1)
    assert "vocabulary of 2048 tokens, but the model predicts 1000" in loss
    assert "has 2048 tokens, but the model llama3 jargon has a vocabulary of 1000" in tokenizer


def test_a_batch_that_does_not_divide_is_refused(config: Trainer.Config) -> None:
    config.training.num_tokens_per_train_step = 3 * 1024
    [problem] = problems(config, 2)
    assert "num_tokens_per_train_step=3072 is not a multiple of the 2048 tokens" in problem
    assert problems(config, 3) == []


def test_a_context_that_does_not_fill_the_microbatch_is_refused(config: Trainer.Config) -> None:
    config.training.max_context_length = 300
    found = problems(config, 2)
    assert [problem for problem in found if "300" in problem and "1024" in problem], found


def test_bad_lines_of_a_data_file_are_named(config: Trainer.Config, tmp_path: Path) -> None:
    corpus = tmp_path / "mine.jsonl"
    corpus.write_text('{"text": "good"}\nnot json\n{"body": "no text field"}\n')
    assert isinstance(config.dataloader, GrainDataLoader.Config)
    config.dataloader.files = [str(corpus)]
    found = " ".join(problems(config, 1))
    assert f"{corpus}, line 2: not JSON" in found
    assert f"{corpus}, line 3" in found
    assert f"{corpus}, line 1" not in found


def test_chats_need_a_chat_template_and_are_named_by_line(
    config: Trainer.Config, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"tests/assets/tokenizer/{name}", tmp_path / name)
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    config.hf_assets_path = str(tmp_path)
    source = IndexedJsonlSource.Config(patterns=(str(tmp_path / "chats.jsonl"),))
    chats = SingleDatasetConfig(source=source, processor=ChatProcessor.Config())
    config.dataloader = GrainDataLoader.Config(dataset=FirstFitPackingConfig(dataset=chats))
    template, line = problems(config, 1)
    assert "a chat template was asked for, but the tokenizer has none" in template
    assert "chats.jsonl, line 1: Expected single-turn messages" in line


def test_a_dump_folder_below_a_file_is_refused(config: Trainer.Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config.dump_folder = str(tmp_path / "file" / "run")
    [problem] = problems(config, 1)
    assert problem.startswith(f"--dump_folder {tmp_path}/file/run cannot be written")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that root cannot write")
def test_a_dump_folder_that_nobody_can_write_is_refused(config: Trainer.Config) -> None:
    config.dump_folder = "/proc/run"
    [problem] = problems(config, 1)
    assert problem.startswith("--dump_folder /proc/run cannot be written (/proc:")


@pytest.mark.parametrize("present", [[], [3], [7]])
def test_a_load_step_without_a_complete_checkpoint_is_refused(
    config: Trainer.Config, present: list[int]
) -> None:
    for step in present:
        checkpoint_files(config.dump_folder, step, marker=step != 7)
    config.checkpoint.load_step = 7
    [problem] = problems(config, 1)
    assert "--checkpoint.load_step=7" in problem
    assert ("[3]" in problem) == (present == [3])


def test_a_load_step_below_minus_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "load_step=-2" in message_of([*RECIPE, "--checkpoint.load_step", "-2"], capsys)


def test_an_initial_load_path_that_is_no_directory_is_refused(
    config: Trainer.Config, tmp_path: Path
) -> None:
    config.checkpoint.initial_load_path = str(tmp_path / "nothing")
    [problem] = problems(config, 1)
    assert str(tmp_path / "nothing") in problem and "step-N" in problem


def test_a_seed_checkpoint_needs_checkpoints_and_one_rank(config: Trainer.Config) -> None:
    config.checkpoint.create_seed_checkpoint = True
    assert problems(config, 1) == []
    [problem] = problems(config, 2)
    assert "needs --checkpoint.enable and 1 rank, found 2" in problem
    config.checkpoint.enable = False
    [problem] = problems(config, 1)
    assert "needs --checkpoint.enable and 1 rank, found 1" in problem


def test_help_lists_the_flags_and_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_or_exit([*RECIPE, "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "--checkpoint.interval" in printed and "--checkpoint.async-mode" in printed


def test_saves_through_shared_memory_are_refused_where_there_is_none(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: object) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    flags = "--checkpoint.async_mode async_with_pinned_mem"
    monkeypatch.setattr(os, "memfd_create", missing)
    [message] = refusal(flags)
    assert flags in message and "Function not implemented" in message
    assert "--checkpoint.async_mode async, which" in message
