"""Trade compute for memory: which activations of a block are kept for backward.

    full           keep a block's input only; run the whole block again in backward
    selective      also keep what is dear to compute: attention, communication, every second matmul
    memory-budget  let the compiler choose what to keep for a share of the memory
    none           keep everything

Applied after the model's own sharding and before compile and FSDP. The one fact to know: blocks are wrapped in place,
``named_parameters`` then shows a wrapper segment, but the keys of ``state_dict`` do not, so a
checkpoint can be written with one setting and read with another.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
import torch._functorch.config as functorch_config
import tyro
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan.config import Configurable
from torchtitan.config.violations import reject

# By name, because several exist only on some builds of torch or after an import that a CPU has no use for.
_SAVED_OPS = (
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "torch_attn._varlen_attn.default",
    "higher_order.flex_attention",
    "_c10d_functional.all_to_all_single.default",
    # The sums of tensor parallelism, with and without that of sequences. What is gathered is kept nowhere:
    # it is as many times larger as there are ranks.
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_reduce.default",
    # The scale of a low-precision cast: tiny, but it costs a pass over the whole tensor.
    "aten.max.default",
)
_MATMULS = ("aten.mm.default", "aten.addmm.default", "aten.linear.default")


class ActivationCheckpointing(ABC, Configurable):
    """One way to decide what the blocks of a model keep for backward."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        preserve_rng_state: bool = True
        """Give the recomputation the random numbers of the first run; needed with dropout, costs a little time."""

        determinism_check: Literal["default", "none"] = "default"
        """Whether the recomputed tensors are compared with the first ones by shape, dtype and device."""

        debug: bool = False
        """Record every operator, to show both runs when they differ. Very slow."""

    def __init__(self, config: Config, *, dump_folder: str = "") -> None:
        self.config = config
        self.dump_folder = dump_folder

    @abstractmethod
    def apply(self, model: nn.Module) -> None:
        """Change ``model`` in place; its ``layers`` are the blocks."""

    def _wrap_blocks(
        self, model: nn.Module, context_fn_of: Callable[[nn.Module], dict[str, Any]]
    ) -> None:
        layers = model.get_submodule("layers")
        for name, block in list(layers.named_children()):
            wrapped = checkpoint_wrapper(
                block,
                preserve_rng_state=self.config.preserve_rng_state,
                determinism_check=self.config.determinism_check,
                debug=self.config.debug,
                **context_fn_of(block),
            )
            layers.register_module(name, wrapped)


class FullAC(ActivationCheckpointing):
    """Keep nothing inside a block: least memory, one more forward pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        pass

    def apply(self, model: nn.Module) -> None:
        self._wrap_blocks(model, lambda block: {})


class SelectiveAC(ActivationCheckpointing):
    """Keep what costs much to compute for its size, compute the rest again."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        force_recompute_mm_shapes_by_fqns: list[str] = field(
            default_factory=lambda: ["moe.router.gate"]
        )
        """Linear layers, by the end of their name inside a block, whose matmul (and any of the same shape) is
        never kept. An empty list forces none."""

        def __post_init__(self) -> None:
            if self.debug:
                reject(
                    "activation_checkpoint.debug is on together with selective checkpointing, which torch "
                    "cannot trace. Turn it off, or choose activation-checkpoint:full."
                )

    def __init__(self, config: Config, *, dump_folder: str = "") -> None:
        super().__init__(config, dump_folder=dump_folder)
        self._forced_fqns = config.force_recompute_mm_shapes_by_fqns

    def get_save_ops(self) -> set[Any]:
        """The operators whose results are kept, besides every second matmul. A subclass may add its own."""
        return _resolve(_SAVED_OPS)

    def apply(self, model: nn.Module) -> None:
        save_ops = self.get_save_ops()

        def context_fn_of(block: nn.Module) -> dict[str, Any]:
            forced = self._forced_shapes(block)

            def contexts() -> Any:
                return create_selective_checkpoint_contexts(_policy(save_ops, forced))

            return {"context_fn": contexts}

        self._wrap_blocks(model, context_fn_of)

    def _forced_shapes(self, block: nn.Module) -> set[tuple[int, ...]]:
        """Shapes (in, out) of the second operand of the matmuls that are never kept."""
        shapes: set[tuple[int, ...]] = set()
        for name, module in block.named_modules():
            if not any(name == fqn or name.endswith(f".{fqn}") for fqn in self._forced_fqns):
                continue
            weight = getattr(module, "weight", None)
            if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
                raise ValueError(
                    f"activation_checkpoint.force_recompute_mm_shapes_by_fqns names {name}, a "
                    f"{type(module).__name__} without a matrix as its weight. Name linear layers only."
                )
            shapes.add((weight.shape[1], weight.shape[0]))
        return shapes


class MemoryBudgetAC(ActivationCheckpointing):
    """Let the compiler keep what saves most time within a share of the memory. Needs ``compile`` of the model."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        memory_budget: float = 0.5
        """Share of the activation memory to use: 0 keeps as little as full, 1 as much as none."""

        visualize_memory_budget_pareto: bool = False
        """Write a picture of memory against recomputation to ``memory_budget_pareto`` in the dump folder."""

        def __post_init__(self) -> None:
            if not 0 <= self.memory_budget <= 1:
                reject(
                    f"activation_checkpoint.memory_budget is {self.memory_budget}, which is no share of the memory. "
                    "Set it between 0 and 1."
                )

    def __init__(self, config: Config, *, dump_folder: str = "") -> None:
        super().__init__(config, dump_folder=dump_folder)
        self._memory_budget = config.memory_budget
        self._visualize = config.visualize_memory_budget_pareto

    def apply(self, model: nn.Module) -> None:
        # Settings of the whole process: the compiler reads them when it meets the blocks.
        functorch_config.activation_memory_budget = self._memory_budget
        if self._visualize:
            folder = os.path.join(self.dump_folder, "memory_budget_pareto")
            os.makedirs(folder, exist_ok=True)
            functorch_config.memory_budget_pareto_dir = folder
            functorch_config.visualize_memory_budget_pareto = True


ActivationCheckpointingConfig = (
    Annotated[SelectiveAC.Config, tyro.conf.subcommand("selective")]
    | Annotated[FullAC.Config, tyro.conf.subcommand("full")]
    | Annotated[MemoryBudgetAC.Config, tyro.conf.subcommand("memory-budget")]
    | Annotated[None, tyro.conf.subcommand("none")]
)


def _policy(save_ops: set[Any], forced: set[tuple[int, ...]]) -> Callable[..., CheckpointPolicy]:
    """What to do with the result of an operator, for one pass through one block."""
    matmuls = _resolve(_MATMULS)
    # The first run and the recomputation must count alike, each for itself.
    num_matmuls = {False: 0, True: 0}

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in matmuls:
            if forced and tuple(_second_operand(op, args).shape) in forced:
                return CheckpointPolicy.PREFER_RECOMPUTE
            num_matmuls[context.is_recompute] += 1
            # Half of them: with all kept, little memory is saved at all.
            kept = num_matmuls[context.is_recompute] % 2 == 1
        else:
            kept = op in save_ops
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def _second_operand(op: Any, args: tuple[Any, ...]) -> torch.Tensor:
    if op is torch.ops.aten.mm.default:
        return args[1]
    return args[2] if op is torch.ops.aten.addmm.default else args[1].T


def _resolve(names: tuple[str, ...]) -> set[Any]:
    found = set()
    for name in names:
        op: Any = torch.ops
        for part in name.split("."):
            op = getattr(op, part, None)
        if op is not None:
            found.add(op)
    return found
