"""Gradients of a small Llama in any layout, against those of the plain model on one process.

Every rank computes the reference for itself, so a case is a name, degrees of parallelism and settings, and an answer
is how far off it was. The model is made as the trainer makes it: on meta, fitted, given memory, filled.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch._dynamo as dynamo
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.loss import BaseLoss, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.llama3 import Llama3Model, parallelize_llama

from tests.unit_tests.models.small import ROW_LENGTH, small_config

NUM_ROWS = 4
Fit = Callable[[Llama3Model, ParallelDims], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Degrees, and what is done to the blocks; the other ranks shard."""

    replicate: int = 1
    tensor: int = 1
    checkpointing: ActivationCheckpointing.Config | None = None
    compile: CompileConfig = field(default_factory=CompileConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)

    def dims(self) -> ParallelDims:
        return ParallelDims(
            dp_replicate=self.replicate,
            dp_shard=-1,
            cp=1,
            tp=self.tensor,
            pp=1,
            ep=1,
            world_size=dist.get_world_size(),
        )

    def fit(self, model: Llama3Model, dims: ParallelDims) -> None:
        parallelize_llama(
            model,
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=self.parallelism,
            compile_config=self.compile,
            ac_config=self.checkpointing,
            dump_folder="",
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of a case on one rank."""

    worst: float
    """Largest difference of a gradient, relative to the largest element of that gradient."""
    loss_difference: float
    num_graphs: int
    """Graphs that torch.compile made."""
    num_breaks: int
    saved_names: list[str]
    optimizer_names: list[str]
    """What the state of an optimizer of the model is saved under."""
    live_names: list[str]


def answer(case: Case, fit: Fit | None = None) -> Answer:
    """Gradients of all ranks together against the plain model. A collective."""
    dynamo.reset()
    counters.clear()
    dims = case.dims()
    with torch.device("meta"):
        model = small_config().build()
    (fit or case.fit)(model, dims)
    model.to_empty(device="cpu")
    _fill(model)
    plain = small_config().build()
    _fill(plain)
    loss_fn = CrossEntropyLoss.Config().build(compile_config=case.compile)
    tokens, positions, labels = _batch()
    expected_loss = _backward(plain, CrossEntropyLoss.Config().build(), tokens, positions, labels)
    batch = dims.get_optional_mesh("batch")
    num_shares, share = (batch.size(), batch.get_local_rank()) if batch is not None else (1, 0)
    rows = [part.chunk(num_shares)[share] for part in (tokens, positions, labels)]
    loss = _backward(model, loss_fn, *rows)
    if batch is not None:
        dist.all_reduce(loss, group=batch.get_group())
    return Answer(
        worst=_worst(plain, model),
        loss_difference=abs(loss.item() - expected_loss.item()),
        num_graphs=counters["stats"]["unique_graphs"],
        num_breaks=sum(counters["graph_break"].values()),
        saved_names=list(model.state_dict()),
        optimizer_names=optimizer_names(model),
        live_names=[name for name, _ in model.named_parameters()],
    )


def optimizer_names(model: nn.Module) -> list[str]:
    model.zero_grad()  # with gradients at hand, asking for its state does not create it
    return sorted(default_adamw(lr=1e-3).build(model_parts=[model]).state_dict())


def answers(cases: dict[str, Case]) -> dict[str, Answer]:
    return {name: answer(case) for name, case in cases.items()}


def _fill(model: Llama3Model) -> None:
    torch.manual_seed(7)
    model.init_weights()


def _batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of two documents each; some labels do not count, and not as many in each row."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, 64, (2, NUM_ROWS * ROW_LENGTH), generator=generator)
    labels[: ROW_LENGTH // 2] = -100
    positions = torch.tensor([*range(10), *range(ROW_LENGTH - 10)] * NUM_ROWS)
    return tokens, positions, labels


def _backward(
    model: nn.Module,
    loss_fn: BaseLoss,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    """As a training step: each row a microbatch, so that gradients must add up."""
    num_valid = NUM_ROWS * ROW_LENGTH - ROW_LENGTH // 2
    total = torch.zeros(())
    rows = (part.split(ROW_LENGTH) for part in (tokens, positions, labels))
    for row_tokens, row_positions, row_labels in zip(*rows, strict=True):
        loss, _ = loss_fn(model(row_tokens, row_positions), row_labels, num_valid)
        loss.backward()
        total += loss.detach()
    return total


def _worst(plain: nn.Module, model: nn.Module) -> float:
    expected = dict(plain.named_parameters())
    worst = 0.0
    for name, param in model.named_parameters():
        wanted = expected.pop(canonical_fqn(name)).grad
        assert wanted is not None and isinstance(param.grad, DTensor), name
        difference = (param.grad.full_tensor() - wanted).abs().max() / wanted.abs().max()
        worst = max(worst, difference.item())
    assert not expected, f"no such parameters: {sorted(expected)}"
    return worst
