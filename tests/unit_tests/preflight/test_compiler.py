"""What torch.compile cannot do here is said before a run starts, not by its first step."""

import sysconfig
from pathlib import Path

import pytest
import torch._inductor.config as inductor_config
from torchtitan.config import CompileConfig
from torchtitan.preflight import parse_or_exit, problems
from torchtitan.preflight.compiler import compiler_problems
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

from tests.unit_tests.preflight.conftest import RECIPE, Refusal

on_cpu = pytest.mark.skipif(device_type != "cpu", reason="there is an accelerator")


@pytest.mark.parametrize(
    "flags",
    [
        "--compile.components loss",
        "activation-checkpoint:selective",
        "activation-checkpoint:memory-budget",
    ],
)
def test_what_needs_no_compiler_is_accepted(flags: str, tmp_path: Path) -> None:
    compiled = ["--compile.enable", "--compile.backend=aot_eager"]
    parse_or_exit([*RECIPE, f"--dump_folder={tmp_path}", *compiled, *flags.split()])


def test_a_loss_that_is_not_compiled_is_refused(
    monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    monkeypatch.setenv("NGPU", "2")
    flags = "--compile.enable --compile.backend eager --compile.components loss"
    [message] = refusal(f"{flags} --parallelism.tensor_parallel_degree 2")
    assert (
        "--compile.components loss has no effect with --parallelism.tensor_parallel_degree 2"
        in message
    )


def test_names_of_components_and_back_end_are_checked_together(refusal: Refusal) -> None:
    components, backend = refusal(
        "--compile.enable --compile.backend tensorrt --compile.components Model"
    )
    assert "--compile.components names Model, which cannot be compiled" in components
    assert "--compile.backend tensorrt is no back end of torch.compile here" in backend


def test_nothing_to_compile_is_refused() -> None:
    [message] = compiler_problems(CompileConfig(enable=True, components=[], backend="eager"))
    assert "--compile.components is empty" in message


def test_switched_off_nothing_is_looked_at() -> None:
    assert list(compiler_problems(CompileConfig(backend="tensorrt", components=["x"]))) == []


@on_cpu
def test_inductor_without_a_compiler_is_refused() -> None:
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}):
        [message] = compiler_problems(CompileConfig(enable=True))
    assert "with a C++ compiler, but there is none" in message
    assert "--compile.backend aot_eager or eager" in message


@on_cpu
def test_inductor_without_the_headers_of_python_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with inductor_config.patch({"cpp.cxx": ("true",)}):
        [message] = compiler_problems(CompileConfig(enable=True))
    assert f"Python.h, but it is not in {tmp_path}" in message


def test_a_memory_budget_needs_the_compiled_model(refusal: Refusal) -> None:
    budget = "activation-checkpoint:memory-budget"
    for flags in (budget, f"--compile.enable --compile.components loss {budget}"):
        [message] = refusal(flags)
        assert (
            "memory-budget is carried out by the compiler, but the model is not compiled" in message
        )


@pytest.mark.parametrize(
    ("replicate", "shard", "tensor", "num_ranks", "taken_at_once"),
    [(2, -1, 1, 4, 4), (4, 1, 1, 4, 4), (1, 2, 2, 4, 2), (2, 1, 2, 4, 2), (1, -1, 2, 2, 1)],
)
def test_a_step_is_divided_among_the_ranks_that_read_other_rows(
    replicate: int,
    shard: int,
    tensor: int,
    num_ranks: int,
    taken_at_once: int,
    config: Trainer.Config,
) -> None:
    parallelism, training = config.parallelism, config.training
    parallelism.data_parallel_replicate_degree = replicate
    parallelism.data_parallel_shard_degree = shard
    parallelism.tensor_parallel_degree = tensor
    at_once = training.num_tokens_per_microbatch_per_dp_rank * taken_at_once
    training.num_tokens_per_train_step = at_once
    assert problems(config, num_ranks) == []
    training.num_tokens_per_train_step = at_once // 2 * 3
    [message] = problems(config, num_ranks)
    assert f"not a multiple of the {at_once} tokens that {taken_at_once} data-parallel" in message


def test_degrees_that_do_not_fit_are_reported_once(config: Trainer.Config) -> None:
    config.parallelism.tensor_parallel_degree = 2
    config.training.num_tokens_per_train_step = 1000
    [message] = problems(config, 3)
    assert "no multiple of that" in message
