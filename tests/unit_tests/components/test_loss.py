"""Losses are sums over valid tokens, and the chunked one is the plain one in value and gradient."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torchtitan.components.loss import (
    BaseLoss,
    ChunkedLossWrapper,
    cross_entropy_loss,
    CrossEntropyLoss,
    GradAccumulator,
    mse_loss,
    MSELoss,
)
from torchtitan.config import CompileConfig
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

from tests.ranks.pool import run_on_ranks

VOCAB, WIDTH, TOKENS = 11, 8, 16


class Decoder(nn.Module):
    """As little of a decoder as the loss and FSDP see."""

    def __init__(self, *, skip_lm_head: bool, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({"0": nn.Linear(WIDTH, WIDTH)})
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight
        self._skip_lm_head = skip_lm_head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.layers["0"](self.tok_embeddings(tokens)))
        return hidden if self._skip_lm_head else self.lm_head(hidden)


def loss_for(model: Decoder, num_chunks: int) -> BaseLoss:
    """The chunked loss of ``model``, or the plain one for 0 chunks."""
    if num_chunks == 0:
        return CrossEntropyLoss.Config().build()
    loss_fn = ChunkedLossWrapper.Config(num_chunks=num_chunks).build()
    loss_fn.set_lm_head(model.lm_head)
    return loss_fn


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[3] = -100
    return tokens, labels


def logits_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(TOKENS, VOCAB), batch(0)[1]


def test_cross_entropy_sums_valid_tokens_in_float32() -> None:
    logits, labels = logits_and_labels()
    chosen = logits.log_softmax(-1)[torch.arange(TOKENS), labels.clamp(min=0)]
    expected = -chosen[labels != -100].sum()
    torch.testing.assert_close(cross_entropy_loss(logits, labels), expected)
    low = cross_entropy_loss(logits.bfloat16(), labels)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, cross_entropy_loss(logits.bfloat16().float(), labels))


def test_tokens_without_labels_alone_cost_nothing() -> None:
    logits, _ = logits_and_labels()
    assert cross_entropy_loss(logits, torch.full((TOKENS,), -100)) == 0


def test_squared_distance_is_a_sum() -> None:
    pred, labels = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    assert mse_loss(pred.bfloat16(), labels) == 13
    loss, metrics = MSELoss.Config().build()(pred, labels, 2)
    assert loss == 6.5 and metrics == {}


@pytest.mark.parametrize("count", [4, 4.0, torch.tensor(4)])
def test_the_sum_is_divided_by_the_global_count_if_there_is_one(count: Any) -> None:
    logits, labels = logits_and_labels()
    loss_fn = CrossEntropyLoss.Config().build(compile_config=CompileConfig())
    whole, metrics = loss_fn(logits, labels)
    torch.testing.assert_close(whole, cross_entropy_loss(logits, labels))
    torch.testing.assert_close(loss_fn(logits, labels, count)[0], whole / 4)
    assert metrics == {}


def test_another_vocabulary_than_the_configured_one_is_an_error() -> None:
    logits, labels = logits_and_labels()
    CrossEntropyLoss.Config(global_vocab_size=VOCAB).build()(logits, labels)
    with pytest.raises(ValueError, match="vocabulary of 12 tokens, but the model predicts 11"):
        CrossEntropyLoss.Config(global_vocab_size=12).build()(logits, labels)


def run(num_chunks: int, steps: int = 2, **kwargs: Any) -> list[torch.Tensor]:
    """Losses and gradients of a few steps with accumulation, and a validation after each step."""
    sharded = kwargs.pop("sharded", {})
    model = Decoder(skip_lm_head=num_chunks > 0, **kwargs)
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        apply_fsdp_to_decoder(model, mesh, pp_enabled=False, reduce_dtype=torch.float32, **sharded)
    loss_fn = loss_for(model, num_chunks)
    params = list(model.parameters())
    rank = dist.get_rank() if sharded else 0
    found = []
    for step in range(steps):
        for microbatch in range(2):
            tokens, labels = batch(100 * step + 10 * microbatch + rank)
            loss, _ = loss_fn(model(tokens), labels, torch.tensor(30.0))
            (2 * loss).backward()
            found.append(loss.detach())
        with torch.no_grad():
            found.append(loss_fn(model(tokens), labels)[0])
        if num_chunks:
            # Nothing is left gathered: these would be other objects than the optimizer's.
            assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        for param in params:
            grad = param.grad
            assert grad is not None
            found.append((grad.full_tensor() if isinstance(grad, DTensor) else grad).clone())
            param.grad = None
    return found


@pytest.mark.parametrize("num_chunks", [1, 4, TOKENS])
@pytest.mark.parametrize("tied", [False, True])
def test_chunks_change_neither_loss_nor_gradients(num_chunks: int, tied: bool) -> None:
    torch.testing.assert_close(run(num_chunks, tied=tied), run(0, tied=tied))


Runs = dict[tuple[str, torch.dtype, bool], list[torch.Tensor]]


def sharded_runs() -> tuple[Runs, Runs]:
    """Plain and chunked runs by policy, dtype and tying; module-level, so that ranks can import it."""
    plain: Runs = {}
    chunked: Runs = {}
    for policy in ("default", "always"):
        for dtype in (torch.float32, torch.bfloat16):
            for tied in (False, True):
                sharded = {"reshard_after_forward_policy": policy, "param_dtype": dtype}
                plain[policy, dtype, tied] = run(0, tied=tied, sharded=sharded)
                chunked[policy, dtype, tied] = run(4, tied=tied, sharded=sharded)
    return plain, chunked


@pytest.mark.ranks
def test_chunks_change_nothing_under_fsdp() -> None:
    for plain, chunked in run_on_ranks(2, sharded_runs):
        for case, expected in plain.items():
            # The gradient of lm_head is a sum over chunks, and bfloat16 rounds each addition.
            rtol, atol = (1e-5, 1e-6) if case[1] == torch.float32 else (0.05, 0.01)
            torch.testing.assert_close(chunked[case], expected, rtol=rtol, atol=atol, msg=str(case))


def communication(policy: Literal["default", "always"]) -> tuple[int, int]:
    """Collectives of one training step, plain and chunked."""
    counts = []
    for num_chunks in (0, 4):
        model = Decoder(skip_lm_head=num_chunks > 0)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        apply_fsdp_to_decoder(
            model,
            mesh,
            torch.float32,
            torch.float32,
            pp_enabled=False,
            reshard_after_forward_policy=policy,
        )
        tokens, labels = batch(0)
        with CommDebugMode() as comms:
            loss_for(model, num_chunks)(model(tokens), labels)[0].backward()
        counts.append(comms.get_total_counts())
    return counts[0], counts[1]


@pytest.mark.ranks
@pytest.mark.parametrize("policy", ["default", "always"])
def test_chunks_cost_no_communication(policy: str) -> None:
    for plain, chunked in run_on_ranks(2, communication, policy):
        assert plain == chunked > 0


def test_only_one_chunk_of_logits_exists_at_a_time() -> None:
    model = Decoder(skip_lm_head=True)
    sizes: list[tuple[int, ...]] = []
    model.lm_head.register_forward_hook(lambda module, args, out: sizes.append(tuple(out.shape)))
    tokens, labels = batch(0)
    loss, _ = loss_for(model, 4)(model(tokens), labels)
    loss.backward()
    assert sizes == [(TOKENS // 4, VOCAB)] * 4


def test_a_frozen_decoder_or_head_gets_no_gradient() -> None:
    for frozen, trained in (("lm_head", "norm"), ("norm", "lm_head")):
        model = Decoder(skip_lm_head=True)
        model.requires_grad_(False)
        model.get_submodule(trained).requires_grad_(True)
        tokens, labels = batch(0)
        loss_for(model, 4)(model(tokens), labels)[0].backward()
        assert model.get_parameter(f"{trained}.weight").grad is not None
        assert model.get_parameter(f"{frozen}.weight").grad is None


def test_tokens_that_do_not_divide_are_an_error() -> None:
    model = Decoder(skip_lm_head=True)
    with pytest.raises(RuntimeError, match="16 tokens.*divisible by num_chunks"):
        loss_for(model, 5)(model(batch(0)[0]), batch(0)[1])


def test_a_chunked_loss_needs_its_head_and_positive_chunks() -> None:
    with pytest.raises(RuntimeError, match="set_lm_head"):
        ChunkedLossWrapper.Config().build()(torch.zeros(8, 2), torch.zeros(8, dtype=torch.long))
    with pytest.raises(ValueError, match="num_chunks is 0"):
        ChunkedLossWrapper.Config(num_chunks=0)


def test_a_second_backward_pass_is_an_error_not_a_wrong_gradient() -> None:
    model = Decoder(skip_lm_head=True)
    loss, _ = loss_for(model, 4)(model(batch(0)[0]), batch(0)[1])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        loss.backward()


class CountingLoss(CrossEntropyLoss):
    """Reports how many labels it saw."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        pass

    def compute(self, pred: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> Any:
        loss, _ = super().compute(pred, labels, **kwargs)
        return loss, {"labels": (labels != -100).sum()}


def test_metrics_of_chunks_add_up() -> None:
    model = Decoder(skip_lm_head=True)
    loss_fn = ChunkedLossWrapper.Config(num_chunks=4, loss_fn=CountingLoss.Config()).build()
    loss_fn.set_lm_head(model.lm_head)
    _, metrics = loss_fn(model(batch(0)[0]), batch(0)[1])
    assert metrics == {"labels": TOKENS - 1}


def test_gradients_of_chunks_are_put_in_order() -> None:
    reference = torch.zeros(2, 6)
    accumulator = GradAccumulator(reference, num_chunks=3, seq_dim=1, dtype=torch.float64)
    for value in range(3):
        with pytest.raises(ValueError, match=f"only {value} came"):
            accumulator.result()
        accumulator.add(torch.full((2, 2), float(value)))
    assert accumulator.result().tolist() == [[0, 0, 1, 1, 2, 2]] * 2
    assert accumulator.result().dtype == torch.float64
    with pytest.raises(ValueError, match="one more came"):
        accumulator.add(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="divisible by num_chunks"):
        GradAccumulator(reference, num_chunks=4, seq_dim=1, dtype=torch.float32)


def accumulate_sharded() -> tuple[bool, str]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(16.0).reshape(4, 4)
    reference = distribute_tensor(whole, mesh, [Shard(1)])
    accumulator = GradAccumulator(reference, num_chunks=2, dtype=torch.float32)
    for rows in whole.chunk(2):
        accumulator.add(distribute_tensor(rows, mesh, [Shard(1)]))
    result = accumulator.result()
    assert isinstance(result, DTensor) and result.placements == (Shard(1),)
    other = GradAccumulator(reference, num_chunks=2, dtype=torch.float32)
    try:
        other.add(distribute_tensor(whole[:2], mesh, [Replicate()]))
    except ValueError as error:
        return torch.equal(result.full_tensor(), whole), str(error)
    return False, "no error"


@pytest.mark.ranks
def test_sharded_gradients_keep_their_placements_and_refuse_others() -> None:
    for equal, message in run_on_ranks(2, accumulate_sharded):
        assert equal and "placements (Replicate(),)" in message


def test_a_loss_says_beforehand_what_it_would_fail_at() -> None:
    chunked = ChunkedLossWrapper.Config(
        num_chunks=3, loss_fn=CrossEntropyLoss.Config(global_vocab_size=5)
    )
    vocabulary, chunks = chunked.check(num_tokens_per_batch=8, vocab_size=7)
    assert "vocabulary of 5 tokens, but the model predicts 7" in vocabulary
    assert "3 chunks, but the microbatch has 8 tokens" in chunks
    assert chunked.check(num_tokens_per_batch=9, vocab_size=5) == []
    assert chunked.check(num_tokens_per_batch=9, vocab_size=None) == []
    assert MSELoss.Config().check(num_tokens_per_batch=8, vocab_size=7) == []
