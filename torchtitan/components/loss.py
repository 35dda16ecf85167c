"""Decide how far a prediction is from its label, as a sum over tokens.

Sums, not means: a rank cannot know how many valid tokens the other ranks and microbatches hold, so the
trainer passes the global count and the gradients of all of them simply add up. Position ``t`` of
``labels`` belongs to position ``t`` of ``pred``: the data shifted them already.

    plain     logits_TV ---------------------------------------> loss -> backward
    chunked   hidden_TD -> [lm_head + loss + backward] x chunks -> loss -> backward into the decoder

Shapes: T tokens of a microbatch, D model width, V vocabulary.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchtitan.config import CompileConfig, Configurable
from torchtitan.config.violations import reject
from torchtitan.distributed import vocab_parallel
from torchtitan.distributed.compile import compiled

__all__ = [
    "BaseLoss",
    "ChunkedLossWrapper",
    "CrossEntropyLoss",
    "GradAccumulator",
    "IGNORE_INDEX",
    "LossFunction",
    "LossOutput",
    "MSELoss",
    "cross_entropy_loss",
    "mse_loss",
]

IGNORE_INDEX = -100
"""Label of a token that has no loss."""

LossOutput = tuple[torch.Tensor, dict[str, torch.Tensor]]
LossFunction = Callable[..., LossOutput]

ValidTokens = torch.Tensor | int | float | None


def cross_entropy_loss(
    pred: torch.Tensor, labels: torch.Tensor, *, global_vocab_size: int | None = None
) -> torch.Tensor:
    """Sum of the cross entropies of ``pred`` (T, V) against ``labels`` (T,), in float32.

    A DTensor ``pred`` is one whose vocabulary tensor-parallel ranks share; each gets the sum of it all.
    ``global_vocab_size`` must be the size of the whole vocabulary, if it is given.
    """
    if global_vocab_size is not None and pred.shape[-1] != global_vocab_size:
        raise ValueError(_other_vocabulary(global_vocab_size, pred.shape[-1]))
    if isinstance(pred, DTensor):
        return vocab_parallel.cross_entropy_sum(pred, labels, ignore_index=IGNORE_INDEX)
    return F.cross_entropy(pred.float(), labels, reduction="sum", ignore_index=IGNORE_INDEX)


def _other_vocabulary(asked: int | None, found: int) -> str:
    return (
        f"the loss was set up for a vocabulary of {asked} tokens, but the model predicts {found}. "
        "Set global_vocab_size of the loss to the vocabulary of the model, or leave it unset."
    )


def mse_loss(pred: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the squared differences, in float32."""
    return F.mse_loss(pred.float(), labels.float(), reduction="sum")


class BaseLoss(ABC, Configurable):
    """A loss over one microbatch, with metrics beside it.

    Calling it gives ``(loss, metrics)``: the sum over the tokens, divided by ``global_valid_tokens``
    where that is given.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        def check(self, *, num_tokens_per_batch: int, vocab_size: int | None) -> list[str]:
            """What does not fit a microbatch or a model of these sizes, one message each.

            ``vocab_size`` None is a model that does not tell.
            """
            return []

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        self.config = config

    @abstractmethod
    def compute(self, pred: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> LossOutput:
        """The sum over the tokens of this microbatch, and metrics that are sums as well."""

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: ValidTokens = None,
        **kwargs: Any,
    ) -> LossOutput:
        loss, metrics = self.compute(pred, labels, **kwargs)
        return (loss if global_valid_tokens is None else loss / global_valid_tokens), metrics


class CrossEntropyLoss(BaseLoss):
    """Cross entropy of logits (T, V) against token ids (T,)."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        global_vocab_size: int | None = None
        """Size of the vocabulary that the model must predict; None accepts any."""

        def check(self, *, num_tokens_per_batch: int, vocab_size: int | None) -> list[str]:
            if self.global_vocab_size in (None, vocab_size) or vocab_size is None:
                return []
            return [_other_vocabulary(self.global_vocab_size, vocab_size)]

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        super().__init__(config, compile_config=compile_config)
        self._global_vocab_size = config.global_vocab_size
        self._compiled = compiled(cross_entropy_loss, compile_config)

    def compute(self, pred: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> LossOutput:
        # A shared vocabulary is one of collectives, of which a compiler makes nothing better.
        function = cross_entropy_loss if isinstance(pred, DTensor) else self._compiled
        return function(pred, labels, global_vocab_size=self._global_vocab_size), {}


class MSELoss(BaseLoss):
    """Squared distance of predictions and labels of one shape."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        super().__init__(config, compile_config=compile_config)
        self._compiled = compiled(mse_loss, compile_config)

    def compute(self, pred: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> LossOutput:
        return self._compiled(pred, labels), {}


class GradAccumulator:
    """Collect the gradients of equal chunks, in order, into one tensor like ``reference``.

    With a DTensor as reference every chunk must be a DTensor with the same placements, and
    ``seq_dim`` may not be a sharded dimension. ``dtype`` is the dtype of the buffer.
    """

    def __init__(
        self, reference: torch.Tensor, *, num_chunks: int, seq_dim: int = 0, dtype: torch.dtype
    ) -> None:
        self._placements = _placements(reference)
        local = reference.to_local() if isinstance(reference, DTensor) else reference
        if local.shape[seq_dim] % num_chunks:
            raise ValueError(
                f"gradients of {num_chunks} equal chunks were announced for a dimension of "
                f"{local.shape[seq_dim]}; the length must be divisible by num_chunks."
            )
        self._reference = reference.detach()
        self._buffer = torch.empty_like(local, dtype=dtype, requires_grad=False)
        self._slots = self._buffer.chunk(num_chunks, dim=seq_dim)
        self._num_added = 0

    def add(self, grad: torch.Tensor) -> None:
        """Take the gradient of the next chunk."""
        if self._num_added == len(self._slots):
            raise ValueError(
                f"gradients of {len(self._slots)} chunks were announced, and one more came. Use one "
                "accumulator for each forward pass."
            )
        if _placements(grad) != self._placements:
            raise ValueError(
                f"the gradient of chunk {self._num_added} has placements {_placements(grad)}, but the "
                f"accumulator's reference has {self._placements}. Redistribute the gradient first."
            )
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        self._slots[self._num_added].copy_(local)
        self._num_added += 1

    def result(self) -> torch.Tensor:
        """The gradient of the whole, with the placements of the reference; all chunks must be in."""
        if self._num_added != len(self._slots):
            raise ValueError(
                f"gradients of {len(self._slots)} chunks were announced, but only {self._num_added} came."
            )
        if not isinstance(self._reference, DTensor):
            return self._buffer
        return DTensor.from_local(
            self._buffer,
            self._reference.device_mesh,
            self._reference.placements,
            run_check=False,
            shape=self._reference.shape,
            stride=self._reference.stride(),
        )


class ChunkedLossWrapper(BaseLoss):
    """Another loss, computed from hidden states a chunk of tokens at a time.

    Logits are the largest tensors of a language model; here only those of one chunk exist at any time,
    because the gradients of a chunk are computed before the next one is looked at. The model must
    return hidden states (T, D), and ``set_lm_head`` must have named the module that turns them into logits.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        num_chunks: int = 8
        """Number of equal chunks; the tokens of a microbatch must be divisible by it. 1 computes
        all logits at once."""

        loss_fn: BaseLoss.Config = field(default_factory=CrossEntropyLoss.Config)
        """The loss of a chunk."""

        def __post_init__(self) -> None:
            if self.num_chunks <= 0:
                reject(f"loss.num_chunks is {self.num_chunks}; it must be 1 or more.")

        def check(self, *, num_tokens_per_batch: int, vocab_size: int | None) -> list[str]:
            found = self.loss_fn.check(
                num_tokens_per_batch=num_tokens_per_batch, vocab_size=vocab_size
            )
            if self.num_chunks > 0 and num_tokens_per_batch % self.num_chunks:
                found.append(_uneven_chunks(self.num_chunks, num_tokens_per_batch))
            return found

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        super().__init__(config, compile_config=compile_config)
        self._num_chunks = config.num_chunks
        self._loss_fn: BaseLoss = config.loss_fn.build(compile_config=compile_config)
        self._lm_head: nn.Module | None = None

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Name the module that turns hidden states into logits; the model must not apply it too."""
        self._lm_head = lm_head

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: ValidTokens = None,
        **kwargs: Any,
    ) -> LossOutput:
        # Divided inside of each chunk, in float32: dividing finished bfloat16 gradients would round
        # each of them once more.
        return self.compute(pred, labels, global_valid_tokens=global_valid_tokens, **kwargs)

    def compute(self, pred: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> LossOutput:
        lm_head = self._lm_head
        if lm_head is None:
            raise RuntimeError(
                "the chunked loss was called before it was given an output layer: call set_lm_head() "
                "with the lm_head of the model first."
            )
        if pred.shape[0] % self._num_chunks:
            raise RuntimeError(_uneven_chunks(self._num_chunks, pred.shape[0]))
        metrics: dict[str, torch.Tensor] = {}
        with _whole_parameters(lm_head) as project:
            # Read only now: FSDP has put other Parameter objects in the place of its shards.
            params = [param for param in lm_head.parameters() if param.requires_grad]
            if params:
                # FSDP casts the input of a module; past its hooks nobody else does.
                pred = pred.to(params[0].dtype)
            chunk_loss = functools.partial(self._chunk_loss, project, metrics, kwargs)
            if torch.is_grad_enabled() and (params or pred.requires_grad):
                loss = _ChunkedLoss.apply(chunk_loss, self._num_chunks, labels, pred, *params)
            else:
                pairs = _chunks(pred, labels, self._num_chunks)
                loss = torch.stack([chunk_loss(*pair) for pair in pairs]).sum()
        return loss, metrics

    def _chunk_loss(
        self,
        project: Callable[[torch.Tensor], torch.Tensor],
        metrics: dict[str, torch.Tensor],
        kwargs: dict[str, Any],
        hidden_TD: torch.Tensor,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        loss, chunk_metrics = self._loss_fn(project(hidden_TD), labels, **kwargs)
        for name, value in chunk_metrics.items():
            value = value.detach()
            metrics[name] = metrics[name] + value if name in metrics else value
        return loss


def _uneven_chunks(num_chunks: int, num_tokens: int) -> str:
    return (
        f"the loss is computed in {num_chunks} chunks, but the microbatch has {num_tokens} tokens: "
        "the number of tokens must be divisible by num_chunks. Change loss.num_chunks or "
        "training.num_tokens_per_microbatch_per_dp_rank."
    )


class _ChunkedLoss(torch.autograd.Function):
    """The summed loss of all chunks; its gradients are known when the forward pass ends."""

    @staticmethod
    def forward(
        ctx: Any,
        chunk_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        num_chunks: int,
        labels: torch.Tensor,
        hidden_TD: torch.Tensor,
        *params: torch.Tensor,
    ) -> torch.Tensor:
        ctx.wants_hidden = ctx.needs_input_grad[3]
        ctx.is_used = False
        hidden_grad = GradAccumulator(hidden_TD, num_chunks=num_chunks, dtype=hidden_TD.dtype)
        param_grads: list[torch.Tensor] = []
        losses: list[torch.Tensor] = []
        for chunk_TD, chunk_labels in _chunks(hidden_TD, labels, num_chunks):
            leaf_TD = chunk_TD.detach().requires_grad_()
            with torch.enable_grad():
                loss = chunk_loss(leaf_TD, chunk_labels)
            losses.append(loss.detach())
            # Not loss.backward(): the parameters' .grad and its hooks (FSDP's reduction) belong to
            # the backward pass of the model, which comes later.
            chunk_grad, *grads = torch.autograd.grad(loss, [leaf_TD, *params])
            hidden_grad.add(chunk_grad)
            if param_grads:
                torch._foreach_add_(param_grads, grads)
            else:
                param_grads = grads
        ctx.save_for_backward(hidden_grad.result(), *param_grads)
        return torch.stack(losses).sum()

    @staticmethod
    # torch declares it for any number of gradients; this function has one output.
    def backward(ctx: Any, grad_loss: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        if ctx.is_used:
            raise RuntimeError(
                "backward() went through a chunked loss twice, but its gradients are kept for one pass "
                "only. Compute the loss again, or use the unchunked loss."
            )
        ctx.is_used = True
        # In place: the gradient of the output layer is one of the largest tensors there are.
        hidden_grad, *param_grads = [grad.mul_(grad_loss) for grad in ctx.saved_tensors]
        return None, None, None, hidden_grad if ctx.wants_hidden else None, *param_grads


def _chunks(
    hidden_TD: torch.Tensor, labels: torch.Tensor, num_chunks: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(hidden_TD.chunk(num_chunks), labels.chunk(num_chunks), strict=True)


@contextmanager
def _whole_parameters(lm_head: nn.Module) -> Generator[Callable[[torch.Tensor], torch.Tensor]]:
    """Give a way to apply ``lm_head`` any number of times while its parameters are whole.

    FSDP's hooks would gather the parameters for each chunk and free them after it. They also count calls:
    ``lm_head`` shares a group with ``norm``, whose second call never comes, so after a validation the
    group would stay gathered and in the middle of a pass. So the hooks are left out: gather once, and let
    the gradients be reduced with those of ``norm`` when the backward pass comes there.
    """
    if not isinstance(lm_head, FSDPModule):
        yield lm_head
        return
    lm_head.unshard()
    try:
        yield lm_head.forward
    finally:
        # In training the backward pass follows at once; it needs them whole and reshards them.
        if not torch.is_grad_enabled():
            lm_head.reshard()


def _placements(tensor: torch.Tensor) -> Any:
    return tensor.placements if isinstance(tensor, DTensor) else None
