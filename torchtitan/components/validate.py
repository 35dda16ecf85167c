"""Decide when the model is tried on held-out data, and leave no trace of it in the training.

Each validation reads the same data from its beginning with a loader of its own, so two losses of a
run are comparable. The one fact to know: a run with validation computes the same training steps, bit
for bit, as one without. Gradients, modes, random numbers and FSDP's shards are as before afterwards.

    trainer (after the save) -> should_validate -> validate -> MetricsProcessor.log_validation
"""

import random
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtitan.components.data import BaseDataLoader, GrainDataLoader
from torchtitan.components.loss import BaseLoss, IGNORE_INDEX
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import Configurable, ParallelismConfig
from torchtitan.config.violations import reject
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.observability import structured_logger as sl
from torchtitan.protocols.model import split_inputs
from torchtitan.tools.utils import get_local_device

__all__ = ["BaseValidator", "Validator"]


class BaseValidator(Configurable):
    """Says at which steps a validation is due."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        freq: int = 10
        """Steps between two validations; the first step is always validated."""

        def __post_init__(self) -> None:
            if self.freq <= 0:
                reject(
                    f"validation frequency must be positive, but validator.freq is {self.freq}. Leave out "
                    "--validator.enable to train without validation."
                )

    def __init__(self, config: Config, **kwargs: Any) -> None:
        self.config = config

    def should_validate(self, step: int) -> bool:
        return step == 1 or step % self.config.freq == 0

    def validate(self, model_parts: Sequence[nn.Module], step: int) -> None:
        """Try the model; what comes of it is for subclasses to say."""


class Validator(BaseValidator):
    """The mean loss per token on held-out data."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseValidator.Config):
        enable: bool = False
        """Validate during training; needs data of its own."""

        steps: int = -1
        """Microbatches of each validation, with the data repeated if it has fewer; -1 takes all data
        once."""

        dataloader: BaseDataLoader.Config = field(default_factory=GrainDataLoader.Config)
        """The held-out data; never the training data by default."""

        def __post_init__(self) -> None:
            # super() without arguments does not work in a class that slots=True has rebuilt.
            BaseValidator.Config.__post_init__(self)
            if self.steps <= 0 and self.steps != -1:
                reject(
                    f"validator.steps is {self.steps}; set it to a positive number of microbatches, or to "
                    "-1 for all of the data."
                )
            if self.enable and _names_no_data(self.dataloader):
                reject(
                    "validation was asked for with --validator.enable, but no data was named for it. Give "
                    "--validator.dataloader.files with the paths of held-out text, or leave it disabled."
                )

        def check(
            self,
            *,
            max_context_length: int,
            num_tokens_per_batch: int,
            tokenizer: BaseTokenizer | None = None,
        ) -> list[str]:
            """What would keep an enabled validation from running, one message each; changes nothing."""
            if not self.enable or _names_no_data(self.dataloader):
                return []
            found = self._data().check(
                max_context_length=max_context_length,
                num_tokens_per_batch=num_tokens_per_batch,
                tokenizer=tokenizer,
            )
            return [f"validation: {message}" for message in found]

        def _data(self) -> BaseDataLoader.Config:
            """The loader's config, repeating if and only if the number of steps is given."""
            if any(item.name == "repeat" for item in fields(self.dataloader)):
                changes: dict[str, Any] = {"repeat": self.steps != -1}
                return replace(self.dataloader, **changes)
            return self.dataloader

    def __init__(
        self,
        config: Config,
        *,
        parallelism: ParallelismConfig,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        parallel_dims: ParallelDims,
        loss_fn: BaseLoss,
        validation_context: Callable[[], AbstractContextManager[Any]],
        metrics_processor: MetricsProcessor,
        seq_len: int,
        num_tokens_per_batch: int,
        **kwargs: Any,
    ) -> None:
        """``seq_len`` is the length of a row, ``num_tokens_per_batch`` the tokens of a rank's microbatch."""
        super().__init__(config)
        self._loader_config = config._data()
        self._num_steps = config.steps
        self.parallelism = parallelism
        self.parallel_dims = parallel_dims
        self.loss_fn = loss_fn
        self.validation_context = validation_context
        self.metrics_processor = metrics_processor
        self.device = get_local_device()
        self._loader_kwargs = {
            "dp_world_size": dp_world_size,
            "dp_rank": dp_rank,
            "tokenizer": tokenizer,
            "max_context_length": seq_len,
            "num_tokens_per_batch": num_tokens_per_batch,
        }

    def validate(self, model_parts: Sequence[nn.Module], step: int) -> None:
        """Report the loss of ``model_parts`` at ``step``. Collective over all ranks.

        Raises ``ValueError`` when the data has no token to compute a loss on.
        """
        started = time.perf_counter()
        sl.add_step_tag("eval")
        with _untouched(model_parts, self.device), torch.no_grad(), self.validation_context():
            loss_sum, num_valid_tokens, num_tokens = self._evaluate(model_parts)
        loss_mesh = self.parallel_dims.get_optional_mesh("loss")
        global_loss_sum = dist_utils.dist_sum(loss_sum, loss_mesh)
        global_valid_tokens = dist_utils.dist_sum(num_valid_tokens, loss_mesh)
        if global_valid_tokens == 0:
            raise ValueError(
                f"the validation at step {step} found no token with a label: its data makes no full batch, "
                "or all labels are masked. Give --validator.dataloader more data, or smaller batches."
            )
        seconds = time.perf_counter() - started
        tps = num_tokens / (seconds * self.parallel_dims.non_data_parallel_size)
        self.metrics_processor.log_validation(
            loss=global_loss_sum / global_valid_tokens,
            step=step,
            extra_metrics={"validation_metrics/throughput(tps)": tps},
        )
        self.metrics_processor.validation_seconds_since_last_log += seconds

    def post_dataloading_process(
        self,
        model: nn.Module,
        input_dict: dict[str, torch.Tensor],
        labels: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Inputs, labels and further arguments of ``model`` for one microbatch on the device."""
        on_device = {key: value.to(self.device) for key, value in input_dict.items()}
        inputs, extra_kwargs = split_inputs(model, on_device)
        return inputs, labels.to(self.device), extra_kwargs

    def _evaluate(self, model_parts: Sequence[nn.Module]) -> tuple[torch.Tensor, torch.Tensor, int]:
        """This rank's summed loss and number of valid tokens (0-d tensors), and all its tokens."""
        (model,) = model_parts
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        num_valid_tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        num_tokens = 0
        with closing(self._loader_config.build(**self._loader_kwargs)) as loader:
            for index, (input_dict, labels) in enumerate(loader):
                inputs, labels, extra_kwargs = self.post_dataloading_process(
                    model, input_dict, labels
                )
                batch_loss, _ = self.loss_fn(model(inputs, **extra_kwargs), labels)
                loss_sum += batch_loss
                num_valid_tokens += (labels != IGNORE_INDEX).sum()
                num_tokens += labels.numel()
                # Not by counting in the loop's head: that would fetch a batch too many.
                if index + 1 == self._num_steps:
                    break
        return loss_sum, num_valid_tokens, num_tokens


def _names_no_data(dataloader: BaseDataLoader.Config) -> bool:
    if isinstance(dataloader, GrainDataLoader.Config):
        return dataloader.dataset is None and not dataloader.files
    return type(dataloader) is BaseDataLoader.Config


@contextmanager
def _untouched(model_parts: Sequence[nn.Module], device: torch.device) -> Generator[None]:
    """Evaluate inside; modes, random states and shards are as before afterwards."""
    modules = [module for part in model_parts for module in part.modules()]
    modes = [module.training for module in modules]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    accelerators = [] if device.type == "cpu" else [device]
    kind = {"device_type": device.type} if accelerators else {}
    with torch.random.fork_rng(devices=accelerators, **kind):
        try:
            for part in model_parts:
                part.eval()
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
                # Without a backward pass FSDP leaves the last group gathered, and its parameters are
                # then other objects than the optimizer's: Module.zero_grad would miss the gradients.
                if isinstance(module, FSDPModule):
                    module.reshard()
            random.setstate(python_state)
            np.random.set_state(numpy_state)
