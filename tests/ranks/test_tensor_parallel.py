"""Ranks that share matrices, tokens and the vocabulary compute what one process computes alone.

Each case trains two steps beside the same model, whole and eager, in the same process, and compares
everything there is: first weights bit by bit, then losses, gradients, their norm and the weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.assembly import hand_over_head
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_, dist_sum
from torchtitan.models.common.config_utils import make_norm_config
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Flavor

from tests.ranks.pool import run_on_ranks
from tests.unit_tests.models.small import SMALL, small_config, SMALL_TIED

pytestmark = pytest.mark.ranks

NUM_TOKENS = 64
# Over two ranks 4 and 3 rows, over four 2, 2, 2 and 1; over two ranks and two shards each 2, 2, 2, 1.
UNEVEN = Flavor(dim=24, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=7, vocab_size=23)
# Two ranks have 2 rows and 1 row, so that of two shards each one stays empty.
SCARCE = Flavor(dim=8, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=3, vocab_size=3)


@dataclass(frozen=True, kw_only=True)
class Case:
    flavor: Flavor = SMALL
    replicate: int = 1
    shard: int = 1
    tensor: int = 2
    sequence_parallel: bool = True
    fused_qkv: bool = True
    head_norms: bool = False
    chunked: bool = True
    microbatches: int = 1
    implementation: Any = "fused"
    checkpointing: FullAC.Config | SelectiveAC.Config | None = None
    compile: CompileConfig = field(default_factory=CompileConfig)

    def config(self) -> Llama3Model.Config:
        config = small_config(self.flavor, fuse_qkv=self.fused_qkv)
        if self.head_norms:
            for layer in config.layers:
                for name in ("q_norm", "k_norm"):
                    norm = make_norm_config(layer.attention.head_dim)
                    setattr(layer.attention, name, norm)
        return config

    def dims(self) -> ParallelDims:
        return ParallelDims(
            dp_replicate=self.replicate,
            dp_shard=self.shard,
            cp=1,
            tp=self.tensor,
            pp=1,
            ep=1,
            world_size=dist.get_world_size(),
        )

    def loss(self) -> BaseLoss:
        if not self.chunked:
            return self.plain_loss()
        return ChunkedLossWrapper.Config(num_chunks=4).build(compile_config=self.compile)

    def plain_loss(self) -> BaseLoss:
        config = CrossEntropyLoss.Config(global_vocab_size=self.flavor.vocab_size)
        return config.build(compile_config=self.compile)


def parallel_model(case: Case, dims: ParallelDims, param_dtype: Any = "float32") -> Llama3Model:
    """As the trainer makes it: on meta, cut, sharded, given memory, filled from a fixed seed."""
    with torch.device("meta"):
        model = case.config().build()
    parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param=param_dtype),
        parallelism=ParallelismConfig(enable_sequence_parallel=case.sequence_parallel),
        compile_config=case.compile,
        ac_config=case.checkpointing,
        dump_folder="",
    )
    is_tied = model.lm_head.weight is model.tok_embeddings.weight
    assert is_tied == case.flavor.tied
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    model.init_weights()
    return model


def whole_model(case: Case) -> Llama3Model:
    model = case.config().build()
    torch.manual_seed(7)
    model.init_weights()
    return model


def whole_value(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def batch_of(step: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and positions; some labels do not count, more of them in the first half."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(0, vocab_size, (2, NUM_TOKENS), generator=generator)
    labels[: NUM_TOKENS // 2 : 3] = -100
    positions = torch.tensor([*range(10), *range(6), *range(16)] * (NUM_TOKENS // 32))
    return tokens, labels, positions


def _pieces(case: Case, dims: ParallelDims) -> Iterator[slice]:
    """The microbatches of this rank."""
    batch = dims.get_optional_mesh("batch")
    num_ranks, rank = (batch.size(), batch.get_local_rank()) if batch is not None else (1, 0)
    length = NUM_TOKENS // num_ranks // case.microbatches
    for index in range(rank * case.microbatches, (rank + 1) * case.microbatches):
        yield slice(index * length, (index + 1) * length)


def _pairs(model: nn.Module, other: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    named = zip(model.named_parameters(), other.named_parameters(), strict=True)
    for (name, one), (other_name, two) in named:
        assert other_name.replace("_checkpoint_wrapped_module.", "") == name
        yield name, one, two


def _close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    scale = max(expected.abs().max().item(), 1e-6)
    difference = (found - expected).abs().max().item() / scale
    # Sums of some dozens of float32 numbers in another order; the worst seen is 2e-5.
    assert difference < 1e-4, f"{what} is {difference:.1e} of its size away"


def _compare(case: Case) -> None:
    dims = case.dims()
    whole, model = whole_model(case), parallel_model(case, dims)
    for name, expected, found in _pairs(whole, model):
        assert isinstance(found, DTensor), name
        assert torch.equal(whole_value(found), expected), f"{name}, {found.placements}"
    whole_loss, loss = case.loss(), case.loss()
    hand_over_head(whole, whole_loss)
    hand_over_head(model, loss)
    settings = default_adamw(lr=1e-2)
    settings.implementation = case.implementation
    optimizers = [settings.build(model_parts=[each]) for each in (whole, model)]
    for step in range(2):
        tokens, labels, positions = batch_of(step, case.flavor.vocab_size)
        num_valid = (labels != -100).sum()
        expected_loss, _ = whole_loss(whole(tokens, positions), labels, num_valid)
        expected_loss.backward()
        total = torch.zeros(())
        for piece in _pieces(case, dims):
            pred = model(tokens[piece], positions[piece])
            share, _ = loss(pred, labels[piece], num_valid)
            share.backward()
            total += share.detach()
        found_loss = dist_sum(total, dims.get_optional_mesh("batch"))
        assert found_loss == pytest.approx(expected_loss.item(), rel=1e-6)
        for name, expected, found in _pairs(whole, model):
            assert isinstance(found.grad, DTensor) and isinstance(found, DTensor)
            assert found.grad.placements == found.placements, name
            _close(
                whole_value(found.grad),
                whole_value(expected.grad),
                f"gradient of {name}, step {step}",
            )
        expected_norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        norm = clip_grad_norm_(model.parameters(), 0.1, foreach=True)
        assert expected_norm > 0.1
        assert norm.item() == pytest.approx(expected_norm.item(), rel=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, expected, found in _pairs(whole, model):
            _close(whole_value(found), expected.detach(), f"{name} after step {step}")


def _compare_all(cases: list[Case]) -> None:
    for case in cases:
        try:
            _compare(case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def test_two_ranks_train_like_one() -> None:
    run_on_ranks(
        2,
        _compare_all,
        [
            Case(),
            Case(chunked=False, implementation="foreach"),
            Case(sequence_parallel=False, implementation="for-loop"),
            Case(sequence_parallel=False, chunked=False, microbatches=2),
            Case(flavor=SMALL_TIED, microbatches=2),
            Case(fused_qkv=False, head_norms=True),
            Case(fused_qkv=False, head_norms=True, sequence_parallel=False),
            Case(flavor=UNEVEN, checkpointing=FullAC.Config()),
            Case(checkpointing=SelectiveAC.Config()),
        ],
        timeout_seconds=180,
    )


def test_four_ranks_train_like_one() -> None:
    run_on_ranks(
        4,
        _compare_all,
        [
            Case(tensor=4, flavor=UNEVEN),
            Case(shard=2, microbatches=2),
            Case(shard=2, flavor=UNEVEN, chunked=False, sequence_parallel=False),
            Case(shard=2, flavor=SCARCE),
            Case(replicate=2, flavor=SMALL_TIED, implementation="foreach"),
        ],
        timeout_seconds=180,
    )


def test_eight_ranks_of_replicas_shards_and_tensor_parallel_train_like_one() -> None:
    run_on_ranks(
        8,
        _compare_all,
        [
            Case(replicate=2, shard=2),
            Case(replicate=2, shard=2, flavor=UNEVEN, sequence_parallel=False, chunked=False),
        ],
        timeout_seconds=240,
    )


def test_compiled_blocks_train_like_eager_ones() -> None:
    compiled = CompileConfig(enable=True, components=["model", "loss"], backend="aot_eager")
    cases = [Case(shard=2, compile=compiled, checkpointing=SelectiveAC.Config())]
    run_on_ranks(4, _compare_all, cases, timeout_seconds=240)
