"""Each setting that would fail later, or do nothing, is refused by itself and by its name."""

import errno
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.config import override
from torchtitan.config.override import _registry
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common import RMSNorm
from torchtitan.preflight import num_ranks, parse_or_exit, problems
from torchtitan.tools import filesystem
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

from tests.unit_tests.preflight.conftest import Refusal

on_cpu = pytest.mark.skipif(device_type != "cpu", reason="there is an accelerator")
OPTIMIZER = "--optimizer.param-groups.0."


# Flags, and what the one message must say.
REFUSED: list[tuple[str, list[str]]] = [
    ("--loss.num_chunks 3", ["3 chunks", "1024 tokens", "loss.num_chunks"]),
    ("--loss.loss-fn.global-vocab-size 5", ["vocabulary of 5 tokens", "predicts 2048"]),
    (
        f"{OPTIMIZER}optimizer-name Foo",
        ["optimizer.param_groups.0", "Optimizer Foo not added", "'Adam', 'AdamW'"],
    ),
    (f"{OPTIMIZER}optimizer-kwargs.lr 0", ["lr is 0.0", "greater than 0"]),
    (f"{OPTIMIZER}optimizer-kwargs.lr -1", ["lr is -1.0", "greater than 0"]),
    (f"{OPTIMIZER}optimizer-kwargs.lr nan", ["lr is nan", "must be a number"]),
    (f"{OPTIMIZER}optimizer-kwargs.betas 2 0.9", ["param_groups.0", "Invalid beta parameter"]),
    (
        "--lr-scheduler.total-steps 10 --lr-scheduler.min-lr-factor 0",
        ["lr_scheduler.total_steps is 10", "steps 11 to 150", "learn nothing"],
    ),
    ("--override.imports nope.mod.f", ["'nope.mod.f'", "No module named 'nope'"]),
    (
        "--override.imports torchtitan.config.override.nope",
        ["'torchtitan.config.override.nope'", "not a registered override"],
    ),
    ("--training.no-disable-cuda-graphs", ["--training.no-disable-cuda-graphs", "CUDA graphs"]),
    ("--compile.backend eager", ["--compile.backend eager", "without --compile.enable"]),
    ("--compile.components loss", ["--compile.components ['loss']", "without --compile.enable"]),
    (
        "--compile.enable --compile.backend nope",
        ["--compile.backend nope is no back end", "inductor, aot_eager, eager"],
    ),
    (
        "--compile.enable --compile.backend eager --compile.components model,attention,blocks",
        ["--compile.components names attention, blocks,", "choose from loss, model"],
    ),
    (
        "--parallelism.pipeline-parallel-layers-per-stage 2",
        ["layers_per_stage 2 has no effect", "pipeline parallelism is not available"],
    ),
    (
        "--parallelism.context-parallel-load-balancer ptrr",
        ["load_balancer ptrr has no effect", "leave it at headtail"],
    ),
    (
        "--parallelism.no-enable-sequence-parallel",
        ["no-enable-sequence-parallel has no effect", "--parallelism.tensor_parallel_degree"],
    ),
    ("--debug.deterministic_warn_only", ["no effect without --debug.deterministic"]),
    (
        "--metrics.save_for_all_ranks",
        ["metrics.save_for_all_ranks has no effect", "--metrics.enable-tensorboard"],
    ),
    (
        "--profiler.memory_snapshot_freq 5",
        ["memory_snapshot_freq 5 has no effect", "--profiler.enable_memory_snapshot"],
    ),
    (
        "--validator.dataloader.files held-out.jsonl",
        ["--validator.dataloader.files has no effect", "--validator.enable"],
    ),
    (
        "--checkpoint.export_dtype bfloat16",
        ["export_dtype bfloat16 has no effect", "--checkpoint.last_save_model_only"],
    ),
    (
        "--checkpoint.load_only --checkpoint.create_seed_checkpoint",
        ["create_seed_checkpoint saves", "contradicts --checkpoint.load_only;"],
    ),
    (
        "--checkpoint.no-enable --checkpoint.load_step 3",
        ["--checkpoint.load_step 3 has no effect", "--checkpoint.enable"],
    ),
    (
        "--checkpoint.no-enable --checkpoint.initial_load_path /some/step-1",
        ["initial_load_path /some/step-1 has no effect", "--checkpoint.enable"],
    ),
    (
        "activation-checkpoint:selective "
        "--activation-checkpoint.force-recompute-mm-shapes-by-fqns attention_norm",
        ["force_recompute_mm_shapes_by_fqns names attention_norm", "RMSNorm"],
    ),
]


@pytest.mark.parametrize(("flags", "parts"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_one_setting_gives_one_message(flags: str, parts: list[str], refusal: Refusal) -> None:
    [message] = refusal(flags)
    assert not [part for part in parts if part not in message], message


@on_cpu
@pytest.mark.parametrize(
    ("flag", "parts"),
    [
        (
            "--optimizer.implementation=fused_opt_states_bf16",
            ["fused_opt_states_bf16", "31 others", "tok_embeddings.weight"],
        ),
        ("--profiler.enable-memory-snapshot", ["--profiler.enable_memory_snapshot", "CUDA"]),
        ("--training.enable_cpu_offload", ["--training.enable_cpu_offload", "no accelerator"]),
    ],
)
def test_what_needs_an_accelerator_is_refused_on_the_cpu(
    flag: str, parts: list[str], refusal: Refusal
) -> None:
    [message] = refusal(flag)
    assert not [part for part in parts if part not in message], message


def test_a_pattern_that_matches_nothing_is_refused(config: Trainer.Config) -> None:
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name="AdamW")
        for pattern in ("norm", "norm.weight", ".*", "wo")
    ]
    config.optimizer.param_groups = groups
    first, second = problems(config, 1)
    assert "'norm.weight' takes no parameter: 22 trainable parameters were left" in first
    assert "'wo' takes no parameter: 0 trainable parameters were left" in second


def test_parameters_in_no_group_are_counted_and_named(config: Trainer.Config) -> None:
    config.optimizer.param_groups[0].pattern = "norm"
    [message] = problems(config, 1)
    assert "no param group takes 22 of 31 trainable parameters" in message
    assert "for example layers.0.attention" in message


def test_unknown_settings_of_an_optimizer_are_all_named(config: Trainer.Config) -> None:
    config.optimizer.param_groups[0].optimizer_kwargs |= {"momentum": 0.9, "learning_rate": 1}
    [message] = problems(config, 1)
    assert "unknown settings learning_rate, momentum; it takes amsgrad, betas" in message


def test_settings_for_an_optimizer_that_no_group_uses_are_refused(config: Trainer.Config) -> None:
    config.optimizer.optimizer_factory_kwargs_by_name = {"Adam": {"amsgrad": True}}
    [message] = problems(config, 1)
    assert "settings for ['Adam'], but the param groups use ['AdamW']" in message


def test_a_learning_rate_that_is_text_is_refused_where_it_is_written() -> None:
    with pytest.raises(ValueError, match="lr is '3e-4'"):
        ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": "3e-4"})


def test_patterns_meet_the_names_that_the_run_will_have(config: Trainer.Config) -> None:
    pattern = "_checkpoint_wrapped_module"
    config.optimizer.param_groups.insert(
        0, ParamGroupConfig(pattern=pattern, optimizer_name="AdamW")
    )
    [message] = problems(config, 1)
    assert f"{pattern!r} takes no parameter" in message
    config.activation_checkpoint = SelectiveAC.Config()
    assert problems(config, 1) == []
    config.checkpoint.create_seed_checkpoint = True
    assert len(problems(config, 1)) == 1


@pytest.fixture
def overrides(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with an override that matches no config, and one that wants an option."""

    def unused(config: RMSNorm.Config) -> RMSNorm.Config:
        return config

    def fussy(config: RMSNorm.Config, eps: float) -> RMSNorm.Config:
        return config

    module = ModuleType("overrides_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    unused.__module__ = fussy.__module__ = module.__name__
    with patch.dict(_registry):
        override(target=RMSNorm.Config, fqns=["nowhere.*"])(unused)
        override(target=RMSNorm.Config)(fussy)
        yield module.__name__


def test_an_override_for_nothing_is_refused(config: Trainer.Config, overrides: str) -> None:
    config.override.imports = [f"{overrides}.unused"]
    [message] = problems(config, 1)
    assert f"{overrides}.unused changes nothing" in message


def test_an_override_with_options_it_does_not_have_is_refused(
    config: Trainer.Config, overrides: str
) -> None:
    config.override.imports = [(f"{overrides}.fussy", {"epsilon": 1.0})]
    [message] = problems(config, 1)
    assert "unexpected keyword argument 'epsilon'" in message


def test_overrides_context_and_optimizer_are_refused_together(refusal: Refusal) -> None:
    flags = (
        "--override.imports nope.f other.g --training.max_context_length 1048576 "
        "--training.num_tokens_per_microbatch_per_dp_rank 1048576 "
        f"{OPTIMIZER}optimizer-name Foo"
    )
    first, second, context, optimizer = refusal(flags)
    assert "'nope.f'" in first and "'other.g'" in second
    assert "max_context_length is 1048576" in context
    assert "Optimizer Foo" in optimizer


def test_tensorboard_files_without_its_package_are_refused(
    config: Trainer.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.metrics.enable_tensorboard = True
    assert problems(config, 1) == []
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name)
    )
    [message] = problems(config, 1)
    assert "the package tensorboard is not installed" in message


@pytest.mark.parametrize(
    ("name", "content", "detail"),
    [
        ("tokenizer.json", "{", "cannot read the tokenizer"),
        ("tokenizer_config.json", "[]", "holds a list"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "invalid literal"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"0": {}}}', "KeyError: 'content'"),
    ],
)
def test_a_damaged_tokenizer_is_reported_with_the_rest(
    name: str, content: str, detail: str, tmp_path: Path, refusal: Refusal
) -> None:
    for each in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / each).write_bytes((Path("tests/assets/tokenizer") / each).read_bytes())
    (tmp_path / name).write_text(content)
    messages = refusal([f"--hf_assets_path={tmp_path}", "--loss.num_chunks=3"])
    assert len(messages) == 2
    assert f"The tokenizer in --hf_assets_path {tmp_path} cannot be used" in messages[0]
    assert detail in messages[0]


def test_a_checkpoint_folder_that_is_a_file_is_refused(
    config: Trainer.Config, tmp_path: Path
) -> None:
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "checkpoint").write_text("")
    for config.checkpoint.load_only in (False, True):
        [message] = problems(config, 1)
        assert message.startswith(
            f"--checkpoint.folder {tmp_path}/outputs/checkpoint is not a folder"
        )


def test_a_checkpoint_folder_that_cannot_be_read_is_refused(
    config: Trainer.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "outputs" / "checkpoint")
    os.makedirs(folder)

    def broken_disk(path: str) -> list[str]:
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(filesystem, "listdir", broken_disk)
    [message] = problems(config, 1)
    assert message.startswith(f"--checkpoint.folder {folder} cannot be read ({folder}: Input/")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that root cannot write")
def test_a_checkpoint_folder_that_nobody_can_write_is_refused(refusal: Refusal) -> None:
    [message] = refusal("--checkpoint.folder /proc/x")
    assert message.startswith("--checkpoint.folder /proc/x cannot be written (/proc:")


def test_a_tensorboard_folder_that_is_a_file_is_refused(
    config: Trainer.Config, tmp_path: Path
) -> None:
    config.metrics.enable_tensorboard = True
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "tb").write_text("")
    [message] = problems(config, 1)
    assert message.startswith("--metrics.save_tb_folder")


@pytest.mark.parametrize(
    "flag",
    ["dump_folder", "checkpoint.folder", "checkpoint.initial_load_path", "hf_assets_path"],
)
def test_a_home_that_the_shell_did_not_write_out_is_refused(flag: str, refusal: Refusal) -> None:
    reason = "starts with ~, which is not expanded; write the path out."
    assert f"--{flag} ~/x {reason}" in refusal(f"--{flag}=~/x")


def test_a_config_file_needs_a_folder_that_exists(config: Trainer.Config, tmp_path: Path) -> None:
    config.debug.save_config_file = "config.json"
    assert problems(config, 1) == []
    config.debug.save_config_file = "/no-such-folder/config.json"
    [message] = problems(config, 1)
    assert message.startswith("--debug.save_config_file /no-such-folder/config.json: the folder")
    config.debug.save_config_file = str(tmp_path)
    [message] = problems(config, 1)
    assert f"{tmp_path} is a folder" in message


def test_ranks_are_those_of_the_launcher_else_of_all_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert num_ranks() == 1
    monkeypatch.setenv("NGPU", "3")
    assert num_ranks() == 3
    monkeypatch.setenv("NNODES", "2")
    assert num_ranks() == 6
    assert num_ranks(simulated=True) == 3
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert num_ranks() == 4


@pytest.mark.parametrize("value", ["0", "two", "-1"])
@pytest.mark.parametrize("name", ["NGPU", "NNODES", "WORLD_SIZE"])
def test_a_count_that_is_none_is_refused_with_the_rest(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    monkeypatch.setenv(name, value)
    first, second = refusal("--loss.num_chunks 3")
    assert first.startswith(f"{name}='{value}' is not a number of ")
    assert "3 chunks" in second


def test_simulated_ranks_need_their_number(refusal: Refusal) -> None:
    [message] = refusal("--comm.mode fake_backend")
    assert "NGPU is not set" in message


def test_a_simulated_rank_is_one_of_them(monkeypatch: pytest.MonkeyPatch, refusal: Refusal) -> None:
    monkeypatch.setenv("NGPU", "2")
    monkeypatch.setenv("RANK", "2")
    [message] = refusal("--comm.mode fake_backend")
    assert "RANK='2' is none of the 2 ranks" in message


def test_data_is_read_by_one_rank_of_a_machine(
    config: Trainer.Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    corpus = tmp_path / "mine.jsonl"
    corpus.write_text("not json\n")
    assert "files" in config.dataloader.__dataclass_fields__
    setattr(config.dataloader, "files", [str(corpus)])  # noqa: B010 (the base has no such field)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert problems(config, 2) == []
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert len(problems(config, 2)) == 1


@pytest.mark.parametrize(
    "flags",
    [
        "--checkpoint.load_only --checkpoint.enable_first_step_checkpoint",
        "--checkpoint.load_only --checkpoint.export_dtype bfloat16",
        "--checkpoint.no-enable --checkpoint.load_only --checkpoint.export_dtype bfloat16",
        "--checkpoint.no-enable --checkpoint.enable_first_step_checkpoint",
    ],
)
def test_settings_that_wait_to_count_are_accepted(flags: str, tmp_path: Path) -> None:
    args = ["--module", "llama3", "--config", "llama3_jargon", f"--dump_folder={tmp_path}"]
    parse_or_exit([*args, *flags.split()])
