"""The trainer: builds the parts of a run in their order, and turns batches into updates.

Wiring only; what a part does is in its own module.

    __init__: ranks -> seeds -> model (meta) -> shard -> init -> optimizer -> data -> checkpointer
    train:    load -> [ batches -> loss -> clip -> (staging done?) -> update -> save -> validate ]*

A checkpoint is taken after the update and before validation, so it holds exactly what the next
step starts from.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import tyro
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan import assembly
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager, TRAIN_STATE
from torchtitan.components.checkpointer.integrity.manifest import RunDescription
from torchtitan.components.checkpointer.rank_state import RankState
from torchtitan.components.checkpointer.state import RANK_STATE
from torchtitan.components.data import BaseDataLoader, DataloaderExhaustedError, TrainerBatch
from torchtitan.components.loss import BaseLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import (
    CommConfig,
    CompileConfig,
    Configurable,
    DebugConfig,
    OverrideConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.config.violations import reject
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointingConfig,
    MemoryBudgetAC,
    SelectiveAC,
)
from torchtitan.distributed.failure import PeerFailureWatch
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.observability import structured_logger as sl
from torchtitan.protocols import ModelSpec
from torchtitan.tools import utils
from torchtitan.tools.logging import logger
from torchtitan.tools.profiler import Profiler
from torchtitan.train_step import TrainStep


class Trainer(TrainStep, Stateful, Configurable):
    """One run on this rank. Its own entry in a checkpoint is the step and the tokens seen."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        model_spec: Annotated[ModelSpec | None, tyro.conf.Suppress] = None
        """The model; recipes set it."""

        hf_assets_path: str = "./tests/assets/tokenizer"
        """Folder with the tokenizer (and, for Hugging Face formats, the weights)."""

        dump_folder: str = "./outputs"
        """Everything a run writes goes in here."""

        profiler: Profiler.Config = field(default_factory=Profiler.Config)
        """Traces of chosen steps."""

        metrics: MetricsProcessor.Config = field(default_factory=MetricsProcessor.Config)
        """What is reported, how often and where."""

        tokenizer: BaseTokenizer.Config = field(default_factory=HuggingFaceTokenizer.Config)
        """How text becomes tokens."""

        dataloader: BaseDataLoader.Config = field(default_factory=BaseDataLoader.Config)
        """What to train on; recipes set it."""

        optimizer: OptimizersContainer.Config = field(default_factory=OptimizersContainer.Config)
        """Which optimizer updates which parameters."""

        lr_scheduler: LRSchedulersContainer.Config = field(
            default_factory=LRSchedulersContainer.Config
        )
        """How the learning rate rises and falls."""

        training: TrainingConfig = field(default_factory=TrainingConfig)
        """Batch, length and precision."""

        parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
        """How the model and the data are divided among the ranks."""

        checkpoint: BaseCheckpointManager.Config = field(default_factory=CheckpointManager.Config)
        """When to save and what to resume from."""

        activation_checkpoint: ActivationCheckpointingConfig = field(
            default_factory=SelectiveAC.Config
        )
        """Which activations to compute again instead of keeping them."""

        compile: CompileConfig = field(default_factory=CompileConfig)
        """Which parts torch.compile compiles."""

        comm: CommConfig = field(default_factory=CommConfig)
        """How ranks talk to each other."""

        validator: Validator.Config = field(default_factory=Validator.Config)
        """Loss on held-out text during training."""

        debug: DebugConfig = field(default_factory=DebugConfig)
        """Seeds, determinism, and what helps to find a fault."""

        override: OverrideConfig = field(default_factory=OverrideConfig)
        """Functions that replace parts of this config."""

        loss: BaseLoss.Config = field(default_factory=BaseLoss.Config)
        """What is minimised; recipes set it."""

        def __post_init__(self) -> None:
            if self.debug.batch_invariant:
                reject("debug.batch_invariant is not available; switch it off.")
            if self.parallelism.num_pp_microbatches <= 0:
                reject(
                    f"parallelism.num_pp_microbatches={self.parallelism.num_pp_microbatches} must "
                    "be greater than 0."
                )
            self._validate_cuda_graphs()
            uses_budget = isinstance(self.activation_checkpoint, MemoryBudgetAC.Config)
            if uses_budget and not (self.compile.enable and "model" in self.compile.components):
                reject(
                    "activation_checkpoint memory-budget is carried out by the compiler, but the "
                    "model is not compiled; choose activation-checkpoint:selective or compile it."
                )

        def _validate_cuda_graphs(self) -> None:
            uses_graphs = not self.training.disable_cuda_graphs
            if uses_graphs and self.parallelism.pipeline_parallel_degree > 1:
                reject(
                    "training.disable_cuda_graphs is off, but CUDA graphs do not support pipeline "
                    "parallelism; switch it on."
                )

        def to_dict(self) -> dict[str, Any]:
            """The whole config as JSON types; the model as its name, flavor and config."""
            spec = self.model_spec
            assert spec is not None, "a recipe sets model_spec"
            # super() without arguments does not work in a class that slots=True has rebuilt.
            plain = Configurable.Config.to_dict(self)
            plain["model_spec"] = {
                "name": spec.name,
                "flavor": spec.flavor,
                "model": spec.model.to_dict(),
            }
            return plain

        def maybe_log(self) -> None:
            """Print the config and keep a copy, as far as the debug section asks for it."""
            text = json.dumps(self.to_dict(), indent=2)
            if self.debug.print_config:
                logger.info(f"Config: {text}")
            if self.debug.save_config_file and dist.get_rank() == 0:
                path = Path(self.dump_folder, self.debug.save_config_file)
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text)
                except OSError as error:  # whatever can be told before a run was
                    logger.warning(
                        f"Could not write the config to {path}: {error}. Training goes on."
                    )
                else:
                    logger.info(f"Wrote the config to {path}")

    def __init__(self, config: Config) -> None:
        self.config = config = assembly.fitted(config)
        config._validate_cuda_graphs()  # overrides may have changed what it looks at
        self.step = 0
        self.ntokens_seen = 0
        self._saved_step = 0
        self.device = utils.get_local_device()
        if self.device.type != "cpu":
            utils.device_module.set_device(self.device)
        self.parallel_dims = self.init_distributed()
        # Whoever has state of its own on each rank registers it here, before training starts.
        self.rank_state = RankState(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            layout=self.parallel_dims.describe(),
            device=self.device,
        )
        self.peers = self._watch_peers()
        try:
            self._build(config)
        except BaseException as error:
            # Ranks that built their part wait for this one in the next collective.
            self.peers.publish(error)
            raise

    def init_distributed(self) -> ParallelDims:
        """Join the other ranks and divide them among the parallel axes."""
        config = self.config
        with sl.log_trace_span("torch_distributed_init"):
            world_size = dist_utils.init_distributed(
                config.comm,
                enable_cpu_backend=config.training.enable_cpu_offload,
                base_folder=config.dump_folder,
            )
            return ParallelDims.from_config(config.parallelism, world_size)

    def _watch_peers(self) -> PeerFailureWatch:
        store = dist_utils.job_store()
        world_size = dist.get_world_size() if store is not None else 1
        return PeerFailureWatch(
            store or dist.HashStore(),
            dist.get_rank(),
            world_size,
            grace_seconds=self.config.comm.train_timeout_seconds,
        )

    def _build(self, config: Config) -> None:
        config.maybe_log()
        dims, training = self.parallel_dims, config.training
        batch_mesh = dims.get_optional_mesh("batch") if dims.dp_enabled else None
        self.dp_degree = batch_mesh.size() if batch_mesh is not None else 1
        self.dp_rank = batch_mesh.get_local_rank() if batch_mesh is not None else 0
        self.num_pp_microbatches = 1
        self.num_tokens_per_train_step, self.gradient_accumulation_steps = assembly.batch_sizes(
            training, self.dp_degree
        )
        self.gc_handler = utils.GarbageCollection(training.gc_freq, training.gc_debug)
        dist_utils.set_determinism(dims, self.device, config.debug, distinct_seed_mesh_dims=["pp"])
        self.metrics_processor = config.metrics.build(
            parallel_dims=dims, dump_folder=config.dump_folder, config_dict=config.to_dict()
        )
        self.metrics_processor.total_steps = training.steps
        self.loss_fn = config.loss.build(compile_config=config.compile)
        self._build_model_and_optimizers(config)
        self._build_data_and_checkpointer(config)

    def _build_model_and_optimizers(self, config: Config) -> None:
        spec, dims, training = config.model_spec, self.parallel_dims, config.training
        assert spec is not None
        self.model_config = spec.model
        model: Any = assembly.build_model(config)
        num_parameters, flops_per_token = spec.model.get_nparams_and_flops(
            model, training.max_context_length
        )
        logger.info(f"Built {spec.name} {spec.flavor}: {num_parameters:,} parameters")
        model = assembly.materialize(model, config, dims, self.device)
        self.model_parts = [model]
        assembly.hand_over_head(model, self.loss_fn)
        self.optimizers, self.lr_schedulers = assembly.build_optimizers(
            config, self.model_parts, dims
        )
        self.metrics_processor.num_flops_per_token = flops_per_token
        self.metrics_processor.optimizers = self.optimizers
        self.metrics_processor.model_parts = self.model_parts

    def _build_data_and_checkpointer(self, config: Config) -> None:
        share = assembly.DataShare(
            dp_world_size=self.dp_degree,
            dp_rank=self.dp_rank,
            tokenizer=config.tokenizer.build(tokenizer_path=config.hf_assets_path),
            num_tokens_per_batch=config.training.num_tokens_per_microbatch_per_dp_rank,
        )
        self.tokenizer = share.tokenizer
        self.dataloader = assembly.build_dataloader(config, share)
        self.checkpointer = assembly.build_checkpointer(
            config,
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={TRAIN_STATE: self, RANK_STATE: self.rank_state},
        )
        self.checkpointer.describe_run(
            RunDescription(config.to_dict(), self.parallel_dims.degrees())
        )
        self.metrics_processor.checkpointer = self.checkpointer
        self.validator = assembly.build_validator(
            config, share, self.parallel_dims, self.loss_fn, self.metrics_processor
        )

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.step = state_dict["step"]
        self.ntokens_seen = state_dict["ntokens_seen"]

    def should_continue_training(self) -> bool:
        """Whether steps are left."""
        return self.step < self.config.training.steps

    def train(self) -> None:
        """Resume if there is something to resume from, then train to the last step."""
        try:
            self._train()
        except BaseException as error:
            # The other ranks wait for this one in a collective; tell them why it does not come.
            self.peers.publish(error, self.step)
            raise

    def _train(self) -> None:
        config = self.config
        sl.log_trace_instant("training_start")
        steps = config.training.steps
        if config.checkpoint.load_step == -1 and self.checkpointer.is_finished(steps):
            # Its last save holds only weights: going back to a full one would train its end again.
            logger.info(
                f"The weights after step {steps} or later are saved already; nothing to do."
            )
            return
        self.checkpointer.load(step=config.checkpoint.load_step)
        loaded_step = self.metrics_processor.start_step = self.step
        if loaded_step:
            logger.info(f"Resuming after step {loaded_step} of {config.training.steps}")
            warning = assembly.step_size_warning(
                loaded_step, self.ntokens_seen, self.num_tokens_per_train_step
            )
            if warning and (not dist.is_initialized() or dist.get_rank() == 0):
                logger.warning(warning)
        if not self.should_continue_training():
            logger.info(
                f"Step {loaded_step} is the last one already (--training.steps "
                f"{config.training.steps}); nothing to do."
            )
        data_iterator = self.batch_generator(self.dataloader)
        with config.profiler.build(
            global_step=self.step, base_folder=config.dump_folder
        ) as profiler:
            while self.should_continue_training():
                if not self._advance(data_iterator, loaded_step):
                    return
                profiler.step()
        logger.info("Training completed")

    def _advance(self, data_iterator: Iterator[TrainerBatch], loaded_step: int) -> bool:
        """The next step with all that follows it; False when the data ended before it."""
        self.step += 1
        num_steps_here = self.step - loaded_step
        sl.set_step(self.step, relative_step=num_steps_here)
        with sl.log_trace_span("step"):
            self.gc_handler.run(self.step)
            position = self.dataloader.state_dict()
            try:
                self.train_step(data_iterator)
            except DataloaderExhaustedError as error:
                # Microbatches of a step that never ran were not trained on.
                self.dataloader.load_state_dict(position)
                self._end_early(error, loaded_step)
                return False
            self._save_and_validate()
        if num_steps_here == 1:
            # The first step compiled and allocated; from now on a slow rank is a lost one.
            seconds = self.config.comm.train_timeout_seconds
            dist_utils.set_pg_timeouts(timedelta(seconds=seconds), self.parallel_dims)
        return True

    def _save_and_validate(self) -> None:
        is_last = self.step == self.config.training.steps
        if self.checkpointer.save(self.step, last_step=is_last):
            self._saved_step = self.step
        if self.validator is not None and self.validator.should_validate(self.step):
            with sl.log_trace_span("eval"):
                self.validator.validate(self.model_parts, self.step)

    def _end_early(self, error: DataloaderExhaustedError, loaded_step: int) -> None:
        """The step in hand never ran; keep the one before it, which may not have been saved."""
        self.step -= 1
        logger.warning(f"{error} Training ends after step {self.step}.")
        is_lost = self.checkpointer.has_lost(self.step)  # on any rank, so all are asked
        if self.step > loaded_step and (is_lost or self.step > self._saved_step):
            self.checkpointer.save(self.step, last_step=True)

    def close(self) -> None:
        """Close every part, the checkpointer with its save in flight among them.

        Raises:
            Exception: the first error of a part, once all parts were closed.
        """
        errors = []
        for name in ("dataloader", "checkpointer", "metrics_processor"):
            if hasattr(self, name):
                try:
                    getattr(self, name).close()
                except Exception as error:  # raised below, once the other parts are closed
                    errors.append(error)
                    logger.error(f"Closing the {name} failed: {error}")
        if errors:
            self.peers.publish(errors[0], self.step)
            raise errors[0]
