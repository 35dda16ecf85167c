"""Shard a decoder's parameters over the data-parallel ranks (FSDP2).

The unit of sharding is what is gathered, used and freed together: the embedding, each block, and
the norm with the output projection. The one fact to know: gradients are **summed** over the ranks,
never averaged, because the loss is already divided by the token count of the whole step.

    activation checkpointing -> compile -> apply_fsdp_to_decoder -> materialize and initialise
"""

from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    fully_shard,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

from torchtitan.distributed.parallel_dims import ParallelDims

ReshardPolicy = Literal["default", "always", "never"]


def resolve_fsdp_mesh(parallel_dims: ParallelDims) -> DeviceMesh:
    """The mesh to shard over: fsdp, or dp_replicate x fsdp when copies of the shards are kept.

    It exists on a single rank too, where sharding still installs the mixed precision.
    """
    axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    return parallel_dims.get_mesh(axes, include_singleton_axes=True)


def get_fsdp_reshard_after_forward_policy(policy: ReshardPolicy, pp_enabled: bool) -> bool:
    """Whether a block frees its gathered parameters after forward and gathers them again for backward.

    "default" does so except under pipeline parallelism, where each microbatch would pay another gather.
    """
    match policy:
        case "always":
            return True
        case "never":
            return False
        case "default":
            return not pp_enabled
    raise ValueError(
        f"asked for the reshard-after-forward policy {policy!r}. Set --parallelism.fsdp_reshard_after_forward "
        "to one of: always, default, never."
    )


def apply_fsdp_to_decoder(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    pp_enabled: bool,
    cpu_offload: bool = False,
    reshard_after_forward_policy: ReshardPolicy = "default",
    enable_symm_mem: bool = False,
) -> None:
    """Shard ``model`` in place over ``dp_mesh``; parameters become DTensors under the same names.

    ``model`` has ``tok_embeddings``, ``layers`` (a ModuleDict), ``norm`` and ``lm_head``, any of which may be None
    on a pipeline stage. Compute runs in ``param_dtype``, gradients are summed in ``reduce_dtype``. Parameters
    without elements are frozen.
    """
    _freeze_empty_parameters(model)
    reshard = get_fsdp_reshard_after_forward_policy(reshard_after_forward_policy, pp_enabled)
    mixed_precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    # Pinned memory exists only where there is a device to copy it to.
    offload = (
        CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
        if cpu_offload
        else OffloadPolicy()
    )

    def shard(unit: nn.Module | list[nn.Module], reshard_after_forward: bool) -> None:
        fully_shard(
            unit,
            mesh=dp_mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=mixed_precision,
            offload_policy=offload,
        )

    embedding, norm, head = (
        getattr(model, name, None) for name in ("tok_embeddings", "norm", "lm_head")
    )
    # Backward starts with the output projection: freeing it after forward would only mean to
    # gather it again at once.
    reshard_last = reshard_after_forward_policy == "always"
    if _is_tied(embedding, head):
        # One parameter cannot belong to two units.
        shard([module for module in (embedding, norm, head) if module is not None], reshard_last)
    else:
        if embedding is not None:
            shard(embedding, reshard)
        if last := [module for module in (norm, head) if module is not None]:
            shard(last, reshard_last)
    for block in model.get_submodule("layers").children():
        shard(block, reshard)
    shard(model, reshard)
    disable_fsdp_gradient_division(model)
    if enable_symm_mem:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_symm_mem_for_comm()


def disable_fsdp_gradient_division(model: nn.Module) -> None:
    """Make every sharded unit of ``model`` sum its gradients over the ranks."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Any set factor otherwise turns the reduction into PREMUL_SUM, which gloo refuses.
            module.set_force_sum_reduction_for_comms(True)


def _freeze_empty_parameters(model: nn.Module) -> None:
    # There is nothing to learn, and FSDP fails where the gradient of no elements arrives.
    for parameter in model.parameters():
        if parameter.numel() == 0:
            parameter.requires_grad_(False)


def _is_tied(embedding: nn.Module | None, head: nn.Module | None) -> bool:
    if embedding is None or head is None:
        return False
    shared = {id(parameter) for parameter in embedding.parameters()}
    return any(id(parameter) in shared for parameter in head.parameters())
