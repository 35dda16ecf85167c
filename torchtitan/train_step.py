"""One update of the parameters: batches -> loss -> clip -> (staging done?) -> update.

What is summed is divided once, by the valid tokens of the whole step over all ranks, so neither
the number of ranks nor of microbatches changes what a step computes.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer.rank_state import preserved_generators
from torchtitan.components.data import DataloaderExhaustedError, TrainerBatch
from torchtitan.components.loss import BaseLoss, IGNORE_INDEX
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.observability import structured_logger as sl
from torchtitan.protocols.model import split_inputs


class TrainStep:
    """The part of a trainer that computes; ``Trainer`` assembles what it works on."""

    config: Any
    step: int
    ntokens_seen: int
    device: Any  # a torch.device, whose stub is a read-only descriptor to type checkers
    dp_degree: int
    gradient_accumulation_steps: int
    parallel_dims: ParallelDims
    model_parts: list[Any]
    loss_fn: BaseLoss
    optimizers: OptimizersContainer
    lr_schedulers: LRSchedulersContainer
    checkpointer: BaseCheckpointManager
    metrics_processor: MetricsProcessor

    def batch_generator(self, data_iterable: Iterable[TrainerBatch]) -> Iterator[TrainerBatch]:
        """Batches one after the other, with their cost measured.

        Raises:
            DataloaderExhaustedError: no batch is left. (A generator may not raise StopIteration.)
        """
        # Iterating over some loaders draws a random number. A resumed run begins to iterate once
        # more, with generators that were restored already.
        with preserved_generators(self.device):
            data_iterator = iter(data_iterable)
        while True:
            started_at = time.perf_counter()
            with sl.log_trace_span("fetching_batch"):
                batch = next(data_iterator, None)
            if batch is None:
                raise DataloaderExhaustedError("The data is used up and is not repeated.")
            self.metrics_processor.ntokens_since_last_log += batch[1].numel()
            self.metrics_processor.data_loading_times.append(time.perf_counter() - started_at)
            yield batch

    @sl.log_trace_span("post_dataloading_process")
    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Inputs, labels and further arguments of the model for one microbatch on the device."""
        inputs, extra_kwargs = split_inputs(self.model_parts[0], input_dict)
        # Every rank takes as many tokens, so the count of the whole run needs no reduction and
        # does not depend on how many ranks there are.
        self.ntokens_seen += labels.numel() * self.dp_degree
        return inputs, labels, extra_kwargs

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, torch.Tensor],
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Loss of one microbatch, as its share of the whole step's mean; gradients accumulate."""
        inputs, labels, extra_kwargs = self.post_dataloading_process(input_dict, labels)
        with sl.log_trace_span("fwd_bwd"):
            pred = self.model_parts[0](inputs, **extra_kwargs)
            loss, _ = self.loss_fn(pred, labels, global_valid_tokens)
            del pred  # its memory is needed by the backward pass
            loss.backward()
        return loss

    def train_step(self, data_iterator: Iterator[TrainerBatch]) -> None:
        """One update of the parameters.

        Raises:
            DataloaderExhaustedError: the data ran out; nothing was computed.
            RuntimeError: the loss or the gradient norm is not finite; nothing was updated.
        """
        self.optimizers.zero_grad(set_to_none=self.config.training.disable_cuda_graphs)
        # All microbatches first: a step whose data ends in the middle must not run at all.
        microbatches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        valid_tokens = sum((labels != IGNORE_INDEX).sum() for _, labels in microbatches)
        local_valid_tokens = torch.as_tensor(valid_tokens).to(self.device)
        global_valid_tokens = local_valid_tokens.float()
        if self.parallel_dims.dp_enabled:
            global_valid_tokens = dist_utils.dist_sum_tensor(
                global_valid_tokens, self.parallel_dims.get_optional_mesh("batch")
            )
        loss = torch.zeros((), device=self.device)
        for input_dict, labels in microbatches:
            on_device = {
                key: value.to(self.device, non_blocking=True) for key, value in input_dict.items()
            }
            microbatch_loss = self.forward_backward_step(
                input_dict=on_device,
                labels=labels.to(self.device, non_blocking=True),
                global_valid_tokens=global_valid_tokens,
            )
            loss = loss + microbatch_loss.detach()

        with sl.log_trace_span("optim"):
            grad_norm = dist_utils.clip_grad_norm_(
                [p for part in self.model_parts for p in part.parameters()],
                self.config.training.max_norm,
                foreach=True,
                pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
                ep_enabled=self.parallel_dims.ep_enabled,
            )
            _require_finite(self, loss, grad_norm)
            # A snapshot of the parameters may still be under way; they change from here on.
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.lr_schedulers.step()
        if self.metrics_processor.should_log(self.step):
            _log_step(self, loss, local_valid_tokens, global_valid_tokens, grad_norm)


# Functions rather than methods: a step must run on anything that has the trainer's attributes.


def _require_finite(trainer: TrainStep, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
    finite = (loss.isfinite() & grad_norm.isfinite()).to(torch.int32)
    for axis in ("loss", "pp"):
        mesh = trainer.parallel_dims.get_optional_mesh(axis)
        if mesh is not None:
            finite = dist_utils.dist_min_tensor(finite, mesh)
    # Checked on the device, so that a GPU need not be waited for in every step.
    torch._assert_async(
        finite.bool(),
        f"The loss or the gradient norm of step {trainer.step} is not finite; the parameters were "
        "not updated. Either training diverged (resume from an earlier checkpoint with a lower "
        "learning rate or other data; --debug.detect_anomaly finds the operation), or no token of "
        "the step counts in the loss.",
    )


def _log_step(
    trainer: TrainStep,
    loss: torch.Tensor,
    local_valid_tokens: torch.Tensor,
    global_valid_tokens: torch.Tensor,
    grad_norm: torch.Tensor,
) -> None:
    sl.log_trace_scalar(
        {
            "local_valid_tokens": local_valid_tokens.item(),
            "global_valid_tokens": global_valid_tokens.item(),
        }
    )
    average = largest = loss.item()
    if trainer.parallel_dims.dp_cp_enabled:
        loss_mesh = trainer.parallel_dims.get_optional_mesh("loss")
        # A rank's loss is its share of the global mean; over its own tokens it is this much.
        local_average = loss * global_valid_tokens / local_valid_tokens.clamp(min=1)
        with sl.log_trace_span("collect_dist_metrics"):
            average = dist_utils.dist_sum(loss, loss_mesh)
            largest = dist_utils.dist_max(local_average, loss_mesh)
    trainer.metrics_processor.log(
        trainer.step,
        average,
        largest,
        grad_norm.item(),
        extra_metrics={
            "n_tokens_seen": trainer.ntokens_seen,
            **trainer.lr_schedulers.get_metrics(),
        },
    )
