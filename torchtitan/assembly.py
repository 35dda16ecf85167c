"""Build the parts of a run: its model and optimizers, its data, and what saves it.

A model is constructed on the meta device, so that no rank ever holds all of it, then sharded, and
only then given memory and its first values, which do not depend on the sharding.
"""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.data import BaseDataLoader
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.config import (
    apply_overrides,
    CommConfig,
    CompileConfig,
    OverrideConfig,
    ParallelismConfig,
    TORCH_DTYPE_MAP,
    TrainingConfig,
)
from torchtitan.config.violations import collecting
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.summary import summary
from torchtitan.observability import structured_logger as sl
from torchtitan.protocols import BaseModel, ModelSpec
from torchtitan.tools import utils
from torchtitan.tools.logging import logger


class RunConfig(Protocol):
    """The sections of a run's config that shape its parts."""

    model_spec: ModelSpec | None
    training: TrainingConfig
    parallelism: ParallelismConfig
    compile: CompileConfig
    override: OverrideConfig
    optimizer: OptimizersContainer.Config
    lr_scheduler: LRSchedulersContainer.Config
    activation_checkpoint: Any
    checkpoint: Any
    comm: CommConfig
    dataloader: BaseDataLoader.Config
    validator: Validator.Config
    hf_assets_path: str
    dump_folder: str


C = TypeVar("C", bound=RunConfig)


def fitted(config: C) -> C:
    """A copy of ``config`` with its model fitted to the run and its overrides carried out.

    The original stays as it was: one recipe may build several trainers.

    Raises:
        ValueError: the model cannot be run with these settings, or an override is for nothing.
        ImportError: the module of an override cannot be imported.
    """
    config = copy.deepcopy(config)
    assert config.model_spec is not None, "a recipe sets model_spec"
    config.model_spec.model.update_from_config(config=config)
    for place in apply_overrides(config.override, config):
        logger.info(f"Override: replaced {place}")
    return config


def build_model(config: RunConfig) -> BaseModel:
    """The model of a ``fitted`` config on the meta device, so without memory.

    Raises:
        RuntimeError: a submodule cannot initialise itself.
    """
    assert config.model_spec is not None, "a recipe sets model_spec"
    dtype = TORCH_DTYPE_MAP[config.training.dtype]
    with torch.device("meta"), utils.set_default_dtype(dtype):
        model = config.model_spec.model.build()
    model.verify_module_protocol()
    return model


def batch_sizes(training: TrainingConfig, dp_degree: int) -> tuple[int, int]:
    """Tokens per update over all ranks, and the microbatches each rank makes of its share.

    Raises:
        ValueError: the tokens per update are no multiple of what the ranks take at once.
    """
    per_pass = training.num_tokens_per_microbatch_per_dp_rank * dp_degree
    wanted = training.num_tokens_per_train_step
    num_tokens = per_pass if wanted == -1 else wanted
    if num_tokens % per_pass:
        raise ValueError(
            f"training.num_tokens_per_train_step={wanted} is not a multiple of the {per_pass} "
            f"tokens that {dp_degree} data-parallel ranks take at once "
            f"({training.num_tokens_per_microbatch_per_dp_rank} each, set by "
            "training.num_tokens_per_microbatch_per_dp_rank). Change one of the two."
        )
    return num_tokens, num_tokens // per_pass


def step_size_warning(step: int, num_tokens_seen: int, num_tokens_per_step: int) -> str | None:
    """What to say when a step takes more or fewer tokens than the ``step`` before it did, which is at least 1."""
    if num_tokens_seen == step * num_tokens_per_step:
        return None
    return (
        f"The {step} steps so far took {num_tokens_seen / step:,.0f} tokens on average, the next ones "
        f"take {num_tokens_per_step:,}, while learning rate and schedule stay. Without "
        "--training.num_tokens_per_train_step a step grows with the data-parallel ranks; set it to "
        "keep its size."
    )


def materialize(
    model: BaseModel,
    config: RunConfig,
    parallel_dims: ParallelDims,
    device: torch.device,
) -> Any:
    """Shard the model over the ranks, then give it memory and its first values."""
    assert config.model_spec is not None, "a recipe sets model_spec"
    # A seed checkpoint is made in one process whose model may be larger than its accelerator.
    is_seed = config.checkpoint.create_seed_checkpoint
    offloads = config.training.enable_cpu_offload
    with sl.log_trace_span("model_parallelism_init"):
        if not is_seed:
            model = config.model_spec.parallelize_fn(
                model,
                parallel_dims=parallel_dims,
                training=config.training,
                parallelism=config.parallelism,
                compile_config=config.compile,
                ac_config=config.activation_checkpoint,
                dump_folder=config.dump_folder,
            )
            logger.info(
                summary(
                    parallel_dims, config.parallelism, config.activation_checkpoint, config.compile
                )
            )
        model.to_empty(device="cpu" if is_seed or offloads else device)
        with torch.no_grad():
            model.init_weights(buffer_device=device if offloads else None)
    return model.train()


def hand_over_head(model: Any, loss_fn: BaseLoss) -> None:
    """Let a loss that works in chunks apply the model's head itself.

    The logits of a whole microbatch then never exist at once.
    """
    if isinstance(loss_fn, ChunkedLossWrapper):
        loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True


def build_optimizers(
    config: RunConfig, model_parts: list[Any], parallel_dims: ParallelDims
) -> tuple[OptimizersContainer, LRSchedulersContainer]:
    """The optimizers of ``model_parts``, with what the model adds to them, and their schedules."""
    optimizers = config.optimizer.build(model_parts=model_parts)
    spec = config.model_spec
    if spec is not None and spec.post_optimizer_build_fn is not None:
        spec.post_optimizer_build_fn(optimizers, model_parts, parallel_dims)
    lr_schedulers = config.lr_scheduler.build(
        optimizers=optimizers, training_steps=config.training.steps
    )
    return optimizers, lr_schedulers


@dataclass(frozen=True, kw_only=True, slots=True)
class DataShare:
    """What a rank reads of the data, and through which tokenizer."""

    dp_world_size: int
    dp_rank: int
    tokenizer: BaseTokenizer
    num_tokens_per_batch: int
    """Tokens of one microbatch of this rank."""

    def options(self) -> dict[str, Any]:
        """As keyword arguments of whatever reads data."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}


def build_dataloader(config: RunConfig, share: DataShare) -> BaseDataLoader:
    """The loader of this rank's microbatches."""
    return config.dataloader.build(
        max_context_length=config.training.max_context_length, **share.options()
    )


def build_checkpointer(config: RunConfig, **parts: Any) -> BaseCheckpointManager:
    """The manager that saves and loads ``parts``, named as its constructor names them.

    Where it will do neither, that is said once: what is lost with it is found out too late.
    """
    spec = config.model_spec
    assert spec is not None, "a recipe sets model_spec"
    checkpoint = config.checkpoint
    formats = checkpoint.last_save_in_hf, checkpoint.initial_load_in_hf
    adapter = spec.state_dict_adapter if any(formats) else None
    is_simulated = config.comm.mode != "default"
    if is_simulated and checkpoint.enable:
        # One process plays one rank of many: what it would save is not what a run computes.
        logger.info(f"Checkpoints are off, because --comm.mode is {config.comm.mode}")
        with collecting():  # the copy has nothing new to warn of
            checkpoint = dataclasses.replace(checkpoint, enable=False)
    elif not checkpoint.enable and not is_simulated and _is_rank_zero():
        logger.warning(
            "Checkpoints are off: a run that is stopped starts over. --checkpoint.enable saves them."
        )
    return checkpoint.build(
        **parts,
        sd_adapter=adapter(spec.model, config.hf_assets_path) if adapter else None,
        base_folder=config.dump_folder,
    )


def _is_rank_zero() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def build_validator(
    config: RunConfig,
    share: DataShare,
    parallel_dims: ParallelDims,
    loss_fn: BaseLoss,
    metrics_processor: MetricsProcessor,
) -> BaseValidator | None:
    """What measures the loss on held-out text, or None when that is switched off."""
    if not config.validator.enable:
        return None
    return config.validator.build(
        parallelism=config.parallelism,
        parallel_dims=parallel_dims,
        loss_fn=loss_fn,
        validation_context=torch.no_grad,
        metrics_processor=metrics_processor,
        seq_len=config.training.max_context_length,
        **share.options(),
    )
