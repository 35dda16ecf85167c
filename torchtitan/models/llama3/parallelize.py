"""Fit a Llama 3 model, still on the meta device, to the ranks of the job.

model on meta -> tensor parallelism -> activation checkpointing -> compile -> FSDP -> to_empty -> init_weights
"""

from torchtitan.config import CompileConfig, ParallelismConfig, TORCH_DTYPE_MAP, TrainingConfig
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.distributed.compile import apply_compile, is_compiled
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder, resolve_fsdp_mesh
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.common.decoder_sharding import shard_decoder
from torchtitan.models.llama3.model import Llama3Model


def parallelize_llama(
    model: Llama3Model,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointing.Config | None,
    dump_folder: str,
) -> Llama3Model:
    """Wrap and shard ``model`` in place and return it; None for ``ac_config`` keeps all activations."""
    if parallel_dims.tp_enabled:
        shard_decoder(
            model,
            parallel_dims.get_mesh("tp"),
            sequence_parallel=parallelism.enable_sequence_parallel,
        )
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if is_compiled(compile_config, "model"):
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    # On a single rank too: it is FSDP that brings mixed precision.
    apply_fsdp_to_decoder(
        model,
        resolve_fsdp_mesh(parallel_dims),
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=parallel_dims.pp_enabled,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
        enable_symm_mem=parallelism.enable_fsdp_symm_mem,
    )
    return model
