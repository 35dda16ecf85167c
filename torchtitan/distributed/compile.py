"""Compile the blocks of a model, and the loss, with torch.compile.

A block is compiled where it stands: ``nn.Module.compile`` changes how it is called and neither its class
nor its name, so parameters, checkpoints and hooks do not notice. All blocks run the same code, so one of
them is compiled and the others find its result. Everything between the blocks stays eager.

    tensor parallelism -> activation checkpointing -> apply_compile -> FSDP

That order is the one to use: the compiler then sees the checkpoint wrapper and decides about
recomputation itself. Others compute the same.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
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
        _outermost_to_compile(block).compile(backend=compile_config.backend)
    if parallel_dims.tp_enabled:
        embedding = getattr(model, "tok_embeddings", None)
        if isinstance(embedding, nn.Module):
            embedding.register_forward_hook(_complete)


def compiled(
    function: Callable[P, R], compile_config: CompileConfig | None, component: str = "loss"
) -> Callable[P, R]:
    """``function``, compiled if ``compile_config`` says so for ``component``."""
    if compile_config is None or not is_compiled(compile_config, component):
        return function
    return torch.compile(function, backend=compile_config.backend)


def _outermost_to_compile(block: nn.Module) -> nn.Module:
    """``block``, or what it wraps where FSDP came first.

    The hooks of FSDP inside a checkpointed region cannot be traced: torch would give up and run
    the whole block uncompiled without a word.
    """
    if isinstance(block, CheckpointWrapper):
        inner = block.get_submodule("_checkpoint_wrapped_module")
        if isinstance(inner, FSDPModule):
            return inner
    return block


def _complete(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    """``output`` once the communication behind it is done.

    A tensor that is still under way would enter compiled code as it is, and its gradient would be wrong
    there, silently. Not ``wait()``: that would cut it off from autograd.
    """
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output
