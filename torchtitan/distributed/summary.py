"""Say in one line how a model was fitted to the ranks: its layout, what it recomputes, what is compiled."""

from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    MemoryBudgetAC,
    SelectiveAC,
)
from torchtitan.distributed.compile import COMPONENTS, is_compiled
from torchtitan.distributed.parallel_dims import ParallelDims

_CHECKPOINTING: dict[type, str] = {
    FullAC.Config: "full",
    MemoryBudgetAC.Config: "memory-budget",
    SelectiveAC.Config: "selective",
    type(None): "none",
}


def summary(
    parallel_dims: ParallelDims,
    parallelism: ParallelismConfig,
    ac_config: ActivationCheckpointing.Config | None,
    compile_config: CompileConfig,
) -> str:
    """Such as ``4 ranks = 2 replicas x 2 shards; activation checkpointing: none; compiled: nothing``."""
    return "; ".join(
        [
            _layout(parallel_dims, parallelism),
            f"activation checkpointing: {_checkpointing(ac_config)}",
            f"compiled: {_compilation(compile_config, parallel_dims)}",
        ]
    )


def _layout(dims: ParallelDims, parallelism: ParallelismConfig) -> str:
    tensor = (
        "tensor parallel, sequences too"
        if parallelism.enable_sequence_parallel
        else "tensor parallel"
    )
    factors = [
        (dims.pp, "pipeline stages"),
        (dims.dp_replicate, "replicas"),
        (dims.dp_shard, "shards"),
        (dims.cp, "context parallel"),
        (dims.tp, tensor),
    ]
    product = " x ".join(f"{degree} {what}" for degree, what in factors if degree > 1)
    return f"{dims.world_size} ranks = {product}" if product else "1 rank"


def _checkpointing(ac_config: ActivationCheckpointing.Config | None) -> str:
    # A kind that a user added has no word on the command line.
    return _CHECKPOINTING.get(type(ac_config), type(ac_config).__qualname__)


def _compilation(compile_config: CompileConfig, dims: ParallelDims) -> str:
    parts = [name for name in COMPONENTS if is_compiled(compile_config, name)]
    if dims.tp_enabled and "loss" in parts:
        parts.remove("loss")  # over a shared vocabulary it stays eager
    return f"{' and '.join(parts)} with {compile_config.backend}" if parts else "nothing"
