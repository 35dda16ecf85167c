"""Sharded training must compute what one process computes on all the data."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder, ReshardPolicy, resolve_fsdp_mesh
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_

from tests.ranks.pool import run_on_ranks

pytestmark = pytest.mark.ranks

NUM_TOKENS = 8
VOCABULARY = 17


class TinyDecoder(nn.Module):
    """The parts of a decoder that sharding looks for, at odd sizes so that shards are uneven."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, 9)
        self.layers = nn.ModuleDict(
            {str(i): nn.Sequential(nn.Linear(9, 13), nn.SiLU(), nn.Linear(13, 9)) for i in range(2)}
        )
        self.norm = nn.LayerNorm(9)
        self.lm_head = nn.Linear(9, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tok_embeddings(tokens)
        for block in self.layers.values():
            hidden = hidden + block(hidden)
        return self.lm_head(self.norm(hidden))


def _model_and_tokens(tied: bool = False) -> tuple[TinyDecoder, torch.Tensor]:
    torch.manual_seed(1)
    return TinyDecoder(tied=tied), torch.randint(0, VOCABULARY, (4, NUM_TOKENS))


def _loss(model: nn.Module, tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    logits = model(tokens).float()
    return (
        nn.functional.cross_entropy(logits, (tokens + 1) % VOCABULARY, reduction="sum") / num_tokens
    )


def _dims(dp_replicate: int = 1) -> ParallelDims:
    return ParallelDims(
        dp_replicate=dp_replicate,
        dp_shard=-1,
        cp=1,
        tp=1,
        pp=1,
        ep=1,
        world_size=dist.get_world_size(),
    )


def _shard(
    model: nn.Module,
    dims: ParallelDims,
    param_dtype: torch.dtype = torch.float32,
    policy: ReshardPolicy = "default",
) -> None:
    apply_fsdp_to_decoder(
        model,
        resolve_fsdp_mesh(dims),
        param_dtype,
        torch.float32,
        pp_enabled=False,
        reshard_after_forward_policy=policy,
    )


def _compare_with_one_process(
    dp_replicate: int, tied: bool, policy: ReshardPolicy, checkpointing: str | None
) -> tuple[float, float, list[str]]:
    """Largest gradient difference, largest gradient, and the names in the state dict."""
    reference, tokens = _model_and_tokens(tied)
    _loss(reference, tokens.flatten(), tokens.numel()).backward()
    model, _ = _model_and_tokens(tied)
    if checkpointing:
        config = {"full": FullAC.Config(), "selective": SelectiveAC.Config()}[checkpointing]
        config.build(dump_folder="").apply(model)
    dims = _dims(dp_replicate)
    _shard(model, dims, policy=policy)
    batch = dims.get_optional_mesh("batch")
    share = tokens.chunk(batch.size())[batch.get_local_rank()] if batch is not None else tokens
    for row in share:  # one microbatch a row: gradients must add up
        _loss(model, row, tokens.numel()).backward()
    difference = largest = 0.0
    for expected, actual in zip(reference.parameters(), model.parameters(), strict=True):
        assert isinstance(actual.grad, DTensor) and expected.grad is not None
        error = (actual.grad.full_tensor() - expected.grad).abs().max()
        difference, largest = max(difference, error.item()), max(
            largest, expected.grad.abs().max().item()
        )
    return difference, largest, list(model.state_dict())


def _clipped(norm_type: float) -> list[tuple[float, float, float]]:
    reference, tokens = _model_and_tokens()
    _loss(reference, tokens.flatten(), 1).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, norm_type)
    model, _ = _model_and_tokens()
    dims = _dims()
    _shard(model, dims)
    _loss(model, tokens.chunk(dims.world_size)[dist.get_rank()].flatten(), 1).backward()
    norm = clip_grad_norm_(model.parameters(), 0.5, norm_type)
    assert not isinstance(norm, DTensor)
    answers = []
    for one, other in zip(reference.parameters(), model.parameters(), strict=True):
        assert one.grad is not None and isinstance(other.grad, DTensor)
        answers.append(
            (expected.item(), norm.item(), (other.grad.full_tensor() - one.grad).abs().max().item())
        )
    return answers


def _clip_not_finite() -> str:
    model, tokens = _model_and_tokens()
    _shard(model, _dims())
    _loss(model, tokens[0], 1).backward()
    if dist.get_rank() == 1:
        next(p.grad for p in model.parameters() if isinstance(p.grad, DTensor)).to_local().fill_(
            float("nan")
        )
    try:
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return str(error)
    return "clipped"


def _dtypes_on_one_rank() -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    model, tokens = _model_and_tokens()
    _shard(model, _dims(), param_dtype=torch.bfloat16)
    logits = model(tokens[0])
    logits.float().sum().backward()
    parameter = next(model.parameters())
    assert parameter.grad is not None
    return logits.dtype, parameter.dtype, parameter.grad.dtype


@pytest.mark.parametrize(
    ("num_ranks", "dp_replicate", "tied", "policy", "checkpointing"),
    [
        (1, 1, False, "default", None),
        (2, 1, False, "default", None),
        (2, 1, True, "never", None),
        (2, 1, False, "always", "selective"),
        (2, 1, False, "default", "full"),
        (4, 2, True, "always", None),
    ],
)
def test_gradients_equal_those_of_the_unsharded_model(
    num_ranks: int, dp_replicate: int, tied: bool, policy: ReshardPolicy, checkpointing: str | None
) -> None:
    names = list(TinyDecoder(tied=tied).state_dict())
    for difference, largest, sharded_names in run_on_ranks(
        num_ranks, _compare_with_one_process, dp_replicate, tied, policy, checkpointing
    ):
        assert largest > 0.01
        assert difference < 1e-6
        assert sharded_names == names


@pytest.mark.parametrize("norm_type", [2.0, 3.0, float("inf")])
def test_clipping_uses_the_norm_of_the_whole_model(norm_type: float) -> None:
    for answers in run_on_ranks(2, _clipped, norm_type):
        for expected, norm, difference in answers:
            assert expected > 0.5 and norm == pytest.approx(expected, rel=1e-5)
            assert difference < 1e-6


def test_a_norm_that_is_not_finite_on_one_rank_is_an_error_on_all() -> None:
    assert all("nan, not finite" in answer for answer in run_on_ranks(2, _clip_not_finite))


def test_mixed_precision_is_there_on_a_single_rank_too() -> None:
    assert run_on_ranks(1, _dtypes_on_one_rank) == [(torch.bfloat16, torch.float32, torch.float32)]
