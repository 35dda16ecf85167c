from dataclasses import dataclass
from math import prod

import pytest
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    MemoryBudgetAC,
    SelectiveAC,
)
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.summary import summary


class OwnAC(FullAC):
    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        pass


@pytest.mark.parametrize(
    ("degrees", "parallelism", "checkpointing", "compile_config", "expected"),
    [
        (
            {},
            ParallelismConfig(),
            None,
            CompileConfig(),
            "1 rank; activation checkpointing: none; compiled: nothing",
        ),
        (
            {"dp_replicate": 2, "dp_shard": 2},
            ParallelismConfig(),
            FullAC.Config(),
            CompileConfig(enable=True, backend="eager"),
            "4 ranks = 2 replicas x 2 shards; activation checkpointing: full; "
            "compiled: loss and model with eager",
        ),
        (
            {"dp_shard": 2, "tp": 2},
            ParallelismConfig(),
            MemoryBudgetAC.Config(),
            CompileConfig(enable=True),
            "4 ranks = 2 shards x 2 tensor parallel, sequences too; "
            "activation checkpointing: memory-budget; compiled: model with inductor",
        ),
        (
            {"tp": 2},
            ParallelismConfig(enable_sequence_parallel=False),
            SelectiveAC.Config(),
            CompileConfig(components=["model"]),
            "2 ranks = 2 tensor parallel; activation checkpointing: selective; compiled: nothing",
        ),
        (
            {"dp_replicate": 3},
            ParallelismConfig(),
            OwnAC.Config(),
            CompileConfig(),
            "3 ranks = 3 replicas; activation checkpointing: OwnAC.Config; compiled: nothing",
        ),
    ],
)
def test_the_line_tells_layout_recomputation_and_compilation(
    degrees: dict[str, int],
    parallelism: ParallelismConfig,
    checkpointing: ActivationCheckpointing.Config | None,
    compile_config: CompileConfig,
    expected: str,
) -> None:
    ones = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1} | degrees
    line = summary(
        ParallelDims(**ones, world_size=prod(ones.values())),
        parallelism,
        checkpointing,
        compile_config,
    )
    assert line == expected
