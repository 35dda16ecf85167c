"""Cut a module's weights over the tensor-parallel ranks, and convert what enters and leaves it.

Inside a module that is cut, tensors are DTensors, so one forward serves any number of ranks; between
modules they are plain tensors with this rank's share. Each conversion has a counterpart in backward:

    forward                         backward
    split by rows  -> whole         add up, split by rows     (into attention and feed-forward)
    add up, split by rows           whole <- split by rows    (out of them)
    whole -> whole                  add up                    (the same two without sequence
    add up                          whole                      parallelism)

The one fact to know: a conversion wraps ``forward`` itself rather than hanging in a module hook, so that
the chunked loss, which calls the output projection past all hooks, passes through it too. Collectives
are waited for where they are made: an asynchronous result that enters compiled code gets a wrong gradient.

    plan {name: style} -> apply_tensor_parallel (meta) -> activation checkpointing -> compile -> FSDP
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor, DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module, ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from torchtitan.distributed.vocab_parallel import look_up

__all__ = [
    "NoParallel",
    "TensorParallel",
    "VocabParallel",
    "apply_tensor_parallel",
    "reaches_every_rank",
]


class TensorParallel(ParallelStyle):
    """How one module lies on the tensor-parallel ranks.

    Its first argument comes in as ``input_layout`` (None leaves it alone) and is used as
    ``compute_layout`` (None: as it came); its result goes out as ``output_layout`` (None: as it is), a plain
    tensor unless ``use_local_output`` is off. Parameters of its own lie as ``param_layouts`` says, the others
    whole on every rank.

    ``partial_input_grad`` hands the gradient of the input back without adding it up over the ranks, and
    ``partial_output_grad`` takes such a gradient of the output: together they move the sum from one module to
    the one before it. ``input_width`` is the whole length of the input's last dimension, for an input cut there
    into shares that may differ. ``fresh_output`` returns a tensor that is no view, as FSDP wants it from its units.
    """

    def __init__(
        self,
        *,
        input_layout: Placement | None = None,
        compute_layout: Placement | None = None,
        output_layout: Placement | None = None,
        use_local_output: bool = True,
        param_layouts: Mapping[str, Placement] | None = None,
        partial_input_grad: bool = False,
        partial_output_grad: bool = False,
        input_width: int | None = None,
        fresh_output: bool = False,
    ) -> None:
        super().__init__()
        self.input_layout = input_layout
        self.compute_layout = compute_layout
        self.output_layout = output_layout
        self.use_local_output = use_local_output
        self.param_layouts = dict(param_layouts or {})
        self.partial_input_grad = partial_input_grad
        self.partial_output_grad = partial_output_grad
        self.input_width = input_width
        self.fresh_output = fresh_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute_own_parameters(module, device_mesh, self.param_layouts)
        forward: Callable[..., Any] = module.forward

        def converting_forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return self._leave(forward(self._enter(x, device_mesh), *args, **kwargs))

        module.forward = converting_forward
        return module

    def _enter(self, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        if self.input_layout is None:
            return x
        if not isinstance(x, DTensor):
            x = DTensor.from_local(
                x,
                mesh,
                [self.input_layout],
                run_check=False,
                grad_placements=[Partial()] if self.partial_input_grad else None,
                **_whole_shape(x, self.input_width),
            )
        if self.compute_layout is None:
            return x
        return x.redistribute(placements=[self.compute_layout])

    def _leave(self, result: Any) -> Any:
        if self.output_layout is None:
            return result
        # Also where the layout is this one already: backward then adds up what is still partial.
        result = result.redistribute(placements=[self.output_layout])
        if not self.use_local_output:
            return result
        grad_layout = [Partial()] if self.partial_output_grad else None
        local = result.to_local(grad_placements=grad_layout)
        return local.clone() if self.fresh_output else local


class NoParallel(TensorParallel):
    """Keep a module whole on every tensor-parallel rank, among others that are cut.

    Its parameters become DTensors like all others: an optimizer takes no mixture. ``input_layout`` and
    ``output_layout`` None mean whole on every rank.
    """

    def __init__(
        self,
        *,
        input_layout: Placement | None = None,
        output_layout: Placement | None = None,
        use_local_output: bool = False,
    ) -> None:
        super().__init__(
            input_layout=input_layout or Replicate(),
            compute_layout=Replicate(),
            output_layout=output_layout or Replicate(),
            use_local_output=use_local_output,
        )


class VocabParallel(ParallelStyle):
    """Cut an embedding by token ids; its result goes out as ``output_layout``, a plain tensor."""

    def __init__(self, *, output_layout: Placement) -> None:
        super().__init__()
        self.output_layout = output_layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute_own_parameters(module, device_mesh, {"weight": Shard(0)})

        def look_up_own_rows(tokens: torch.Tensor) -> torch.Tensor:
            num_tokens, num_ranks = tokens.shape[0], device_mesh.size()
            if self.output_layout.is_shard() and num_tokens % num_ranks:
                raise ValueError(
                    f"{num_tokens} tokens cannot be split over {num_ranks} tensor-parallel ranks. Pass a multiple "
                    "of them, or set parallelism.enable_sequence_parallel to False."
                )
            # Read at each call: FSDP puts another object there for the time of a pass.
            weight = module.get_parameter("weight")
            assert isinstance(weight, DTensor)
            return look_up(tokens, weight, self.output_layout)

        module.forward = look_up_own_rows
        return module


def apply_tensor_parallel(
    model: nn.Module, tp_mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]
) -> None:
    """Cut ``model``, on the meta device or equal on all ranks, in place; ``plan`` goes by module names.

    Raises ``ValueError`` for names that are no modules of ``model``, and for parameters that no style places.
    """
    modules = dict(model.named_modules())
    if unknown := sorted(plan.keys() - modules.keys()):
        raise ValueError(
            f"the tensor-parallel plan names modules that {type(model).__name__} does not have: {unknown}. "
            f"Take them out of the plan; its children are {sorted(dict(model.named_children()))}."
        )
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_is_worth_telling)
    for name, style in plan.items():
        # No rank sends anything: every weight is on meta, or the same everywhere.
        parallelize_module(modules[name], tp_mesh, style, src_data_rank=None)
    plain = sorted(
        name for name, param in model.named_parameters() if not isinstance(param, DTensor)
    )
    if plain:
        raise ValueError(
            f"the tensor-parallel plan does not place the parameters {plain} of {type(model).__name__}, and an "
            "optimizer takes no mixture of placed and plain ones. Add their modules, with NoParallel to keep "
            "them whole on every rank."
        )


def reaches_every_rank(length: int, num_ranks: int) -> bool:
    """Whether a dimension cut as torch does it, by the rounded-up share, leaves no rank without any."""
    share = -(-length // num_ranks)
    return (num_ranks - 1) * share < length


def _whole_shape(x: torch.Tensor, width: int | None) -> dict[str, Any]:
    if width is None:
        return {}  # the same share on every rank
    shape = torch.Size((*x.shape[:-1], width))
    return {"shape": shape, "stride": make_contiguous_strides_for(shape)}


def _is_worth_telling(record: logging.LogRecord) -> bool:
    # With FSDP as well, a reduction goes over one axis after the other. Here those are the norm of the
    # gradients, one number, and the gathering of a matrix for a checkpoint; torch advises one more
    # process group for them, on every rank.
    return "sequential" not in str(record.msg)


def _distribute_own_parameters(
    module: nn.Module, mesh: DeviceMesh, layouts: Mapping[str, Placement]
) -> None:
    for name, param in list(module.named_parameters(recurse=False)):
        layout = layouts.get(name, Replicate())
        if isinstance(layout, Shard) and not reaches_every_rank(
            length := param.shape[layout.dim], mesh.size()
        ):
            raise ValueError(
                f"{type(module).__name__}.{name} cannot be cut over {mesh.size()} tensor-parallel ranks: its "
                f"dimension {layout.dim} of {length} leaves some of them nothing, which FSDP refuses. Lower "
                "parallelism.tensor_parallel_degree or change the size of the model."
            )
        placed = distribute_tensor(param, mesh, [layout], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(placed, requires_grad=param.requires_grad))
