"""Each tensor-parallel rank holds its share and no more, and a step sends what it must and no more.

A plan that cut nothing would compute the right numbers as well, and so would one that gathers the logits.
"""

import logging
import warnings
from collections import Counter
from typing import Any

import pytest
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.assembly import hand_over_head
from torchtitan.components.loss import BaseLoss
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.utils import clip_grad_norm_

from tests.ranks.pool import run_on_ranks
from tests.ranks.test_tensor_parallel import batch_of, Case, NUM_TOKENS, parallel_model

pytestmark = pytest.mark.ranks

Message = tuple[str, tuple[int, ...]]
"""A collective, and the shape of what a rank puts in."""

WIDTH, NUM_LAYERS, NUM_CHUNKS = 32, 2, 4
WHOLE, SHARE = (NUM_TOKENS, WIDTH), (NUM_TOKENS // 2, WIDTH)


class _Sent(TorchDispatchMode):
    """Counts the collectives that run inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: Counter[Message] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # It comes by again, with what the DTensor does.
        name = func.name().removeprefix("_c10d_functional::")
        if name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
            self.messages[name, tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def _local_shapes() -> dict[str, tuple[int, ...]]:
    model = parallel_model(Case(), Case().dims())
    params = {name: param for name, param in model.named_parameters() if isinstance(param, DTensor)}
    return {name: tuple(param.to_local().shape) for name, param in params.items()}


def test_a_rank_holds_its_part_of_every_matrix() -> None:
    # Two of the four query heads of 8 elements with their key-value head, half of the other widths.
    block = {
        "attention.qkv_linear.wqkv.weight": (32, 32),
        "attention.wo.weight": (32, 16),
        "feed_forward.w1.weight": (24, 32),
        "feed_forward.w2.weight": (32, 24),
        "feed_forward.w3.weight": (24, 32),
        "attention_norm.weight": (32,),
        "ffn_norm.weight": (32,),
    }
    expected = {
        "tok_embeddings.weight": (32, 32),
        **{f"layers.{i}.{name}": shape for i in range(NUM_LAYERS) for name, shape in block.items()},
        "norm.weight": (32,),
        "lm_head.weight": (32, 32),
    }
    for found in run_on_ranks(2, _local_shapes):
        assert found == expected


def _sent_in(case: Case) -> tuple[Counter[Message], Counter[Message], Counter[Message]]:
    """In forward with the loss, in backward, and for the norm of the gradients."""
    model, loss_fn = parallel_model(case, case.dims()), case.loss()
    assert isinstance(loss_fn, BaseLoss)
    hand_over_head(model, loss_fn)
    tokens, labels, positions = batch_of(0, case.flavor.vocab_size)
    with _Sent() as forward:
        loss, _ = loss_fn(model(tokens, positions), labels, 1.0)
    with _Sent() as backward:
        loss.backward()
    with _Sent() as clipping:
        clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    return forward.messages, backward.messages, clipping.messages


def _sent_in_all(cases: list[Case]) -> list[tuple[Counter[Message], ...]]:
    return [_sent_in(case) for case in cases]


def test_a_step_sends_activations_and_two_numbers_a_token() -> None:
    selective = SelectiveAC.Config()
    cases = [
        Case(),
        Case(sequence_parallel=False),
        Case(sequence_parallel=False, checkpointing=selective),
        Case(chunked=False, checkpointing=selective),
    ]
    # Two sums and two gatherings a block; one sum behind the embedding, one gathering behind the norm.
    stream = 2 * NUM_LAYERS + 1
    shared: Counter[Message] = Counter(
        {("reduce_scatter_tensor", WHOLE): stream, ("all_gather_into_tensor", SHARE): stream}
    )
    whole: Counter[Message] = Counter({("all_reduce", WHOLE): stream})
    length = NUM_TOKENS // NUM_CHUNKS
    chunked: Counter[Message] = Counter(
        {("all_reduce", (length,)): NUM_CHUNKS, ("all_reduce", (2, length)): NUM_CHUNKS}
    )
    at_once: Counter[Message] = Counter(
        {("all_reduce", (NUM_TOKENS,)): 1, ("all_reduce", (2, NUM_TOKENS)): 1}
    )
    norms: Counter[Message] = Counter({("all_reduce", (WIDTH,)): stream})
    # What is kept of a block are its sums, which are small, and not what was gathered for it.
    again: Counter[Message] = Counter({("all_gather_into_tensor", SHARE): 2 * NUM_LAYERS})
    for plain, without, without_selective, selected in run_on_ranks(2, _sent_in_all, cases):
        assert plain[:2] == (shared + chunked, shared + norms)
        assert without[:2] == without_selective[:2] == (whole + chunked, whole)
        assert selected[:2] == (shared + at_once, shared + norms + again)
        for _, _, clipping in (plain, without):
            assert clipping.total() == 1


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _warned_of(cases: list[Case]) -> list[str]:
    records = _Records()
    logging.getLogger("torch.distributed.tensor._redistribute").addHandler(records)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for case in cases:
            _sent_in(case)
    return [str(warning.message) for warning in caught] + records.messages


def test_torch_has_nothing_to_warn_of() -> None:
    # FSDP would of units that return views, DTensor of the norm over two axes.
    cases = [Case(shard=2), Case(shard=2, chunked=False, sequence_parallel=False)]
    assert run_on_ranks(4, _warned_of, cases) == [[]] * 4
