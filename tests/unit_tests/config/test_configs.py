"""The sections refuse what cannot work, one message for each setting."""

import dataclasses
import math
from typing import Any, get_type_hints

import pytest
from torchtitan.config import (
    CommConfig,
    CompileConfig,
    DebugConfig,
    OverrideConfig,
    ParallelismConfig,
    TORCH_DTYPE_MAP,
    TrainingConfig,
)
from torchtitan.config.violations import collecting
from torchtitan.tools.utils import has_cuda_capability

SECTIONS = (
    CommConfig,
    CompileConfig,
    DebugConfig,
    OverrideConfig,
    ParallelismConfig,
    TrainingConfig,
)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_has_keyword_only_fields_slots_and_known_types(section: type):
    assert all(field.kw_only for field in dataclasses.fields(section))
    assert "__slots__" in section.__dict__
    assert get_type_hints(section, include_extras=True)
    section()


@pytest.mark.parametrize(
    ("section", "settings", "text"),
    [
        (
            TrainingConfig,
            {"num_tokens_per_microbatch_per_dp_rank": 0},
            "num_tokens_per_microbatch_per_dp_rank.* must be greater than 0",
        ),
        (TrainingConfig, {"num_tokens_per_train_step": 0}, "must be -1 or greater than 0"),
        (TrainingConfig, {"num_tokens_per_train_step": -2}, "must be -1 or greater than 0"),
        (TrainingConfig, {"max_context_length": -1}, "max_context_length.* must be greater than 0"),
        (TrainingConfig, {"gc_freq": 0}, "gc_freq.* must be greater than 0"),
        (TrainingConfig, {"steps": -1}, "steps.* must be at least 0"),
        (TrainingConfig, {"max_norm": 0}, "max_norm.* must be greater than 0"),
        (TrainingConfig, {"max_norm": math.nan}, "max_norm is nan"),
        (
            ParallelismConfig,
            {"tensor_parallel_degree": 0},
            "tensor_parallel_degree.* greater than 0",
        ),
        (ParallelismConfig, {"data_parallel_shard_degree": 0}, "must be -1 or greater than 0"),
        (ParallelismConfig, {"context_parallel_load_balancer": ""}, "is ''; it must be headtail"),
        (CompileConfig, {"enable_async_tensor_parallel": True}, "Use --compile.enable"),
        (
            CompileConfig,
            {"enable": True, "enable_async_tensor_parallel": True, "components": ["loss"]},
            "with 'model' among the components",
        ),
        (CommConfig, {"train_timeout_seconds": 0}, "must be greater than 0"),
    ],
)
def test_an_impossible_setting_is_refused(section: type, settings: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        section(**settings)


def test_settings_at_the_edge_of_the_possible_are_taken():
    TrainingConfig(num_tokens_per_train_step=-1, max_norm=math.inf, steps=0)
    ParallelismConfig(data_parallel_shard_degree=-1, context_parallel_load_balancer=None)
    CompileConfig(enable=True, enable_async_tensor_parallel=True)


@pytest.mark.skipif(has_cuda_capability(9, 0), reason="symmetric memory exists here")
def test_symmetric_memory_is_refused_on_a_device_without_it():
    with pytest.raises(ValueError, match="enable_fsdp_symm_mem is on"):
        ParallelismConfig(enable_fsdp_symm_mem=True)


def test_every_broken_setting_of_a_section_is_reported_together():
    with collecting() as found:
        TrainingConfig(steps=-1, max_norm=-1, num_tokens_per_train_step=0)
    assert len(found) == 3


def test_cuda_graphs_and_a_second_spmd_backend_are_not_offered():
    assert TrainingConfig().disable_cuda_graphs is True
    assert not hasattr(ParallelismConfig(), "spmd_backend")
    assert not hasattr(DebugConfig(), "spmd_typechecking")


def test_the_type_map_names_three_types():
    assert sorted(TORCH_DTYPE_MAP) == ["bfloat16", "float16", "float32"]
    assert all(str(dtype) == f"torch.{name}" for name, dtype in TORCH_DTYPE_MAP.items())
