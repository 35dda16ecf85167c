"""Compile the blocks of a model, and the loss, with torch.compile.

A block is compiled where it stands: ``nn.Module.compile`` changes how it is called and neither its class
nor its name, so parameters, checkpoints and hooks do not notice. All blocks run the same code, so one of
them is compiled and the others find its result. Everything between the blocks stays eager.

    tensor parallelism -> activation checkpointing -> apply_compile -> FSDP

That order is the one to use: the compiler then sees the checkpoint wrapper and arranges the
recomputation itself. With any other order of the last three the model computes the same. What enters a
compiled block must not be an asynchronous tensor of a collective, whose gradient could come out wrong
without an error; tests compare the gradients of every layout with those of the plain model.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule

from torchtitan.config import CompileConfig
from torchtitan.distributed.parallel_dims import ParallelDims

COMPONENTS = ("loss", "model")
"""What ``compile.components`` may name."""

P = ParamSpec("P")
R = TypeVar("R")


def is_compiled(compile_config: CompileConfig | None, component: str) -> bool:
    """Whether ``component`` ("model" or "loss") is to be compiled."""
    return (
        compile_config is not None
        and compile_config.enable
        and component in compile_config.components
    )


def apply_compile(
    model: nn.Module, *, compile_config: CompileConfig, parallel_dims: ParallelDims
) -> None:
    """Compile each child of ``model.layers`` in place, when its first batch comes."""
    for block in model.get_submodule("layers").children():
        # Graph breaks are allowed. Without them (fullgraph) a run would end at the first batch
        # whose shapes exceed torch's limit of recompilations; so that batch runs uncompiled.
        part = _part_to_compile(block, tp_enabled=parallel_dims.tp_enabled)
        part.compile(backend=compile_config.backend)


def compiled(
    function: Callable[P, R], compile_config: CompileConfig | None, component: str = "loss"
) -> Callable[P, R]:
    """``function``, compiled if ``compile_config`` says so for ``component``."""
    if compile_config is None or not is_compiled(compile_config, component):
        return function
    return torch.compile(function, backend=compile_config.backend)


def _part_to_compile(block: nn.Module, *, tp_enabled: bool) -> nn.Module:
    """``block``, wrapper and all, or what is inside of a checkpoint wrapper that cannot be compiled.

    Inside, nothing is lost but that the compiler does not see what is computed again.
    """
    if not isinstance(block, CheckpointWrapper):
        return block
    inner = block.get_submodule("_checkpoint_wrapped_module")
    # The hooks of FSDP in a checkpointed region cannot be traced: where FSDP came first, torch would
    # run the whole block uncompiled without a word.
    sharded_first = isinstance(inner, FSDPModule)
    # A region that keeps nothing makes torch 2.13 keep the mesh of its DTensors as if it were a tensor,
    # and fail. One that keeps chosen results does not.
    keeps_nothing = "context_fn" not in getattr(block.checkpoint_fn, "keywords", {})
    return inner if sharded_first or (tp_enabled and keeps_nothing) else block
