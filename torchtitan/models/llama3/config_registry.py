"""Recipes of the llama3 models: each function returns a fresh config to train one of them.

``--module llama3 --config <function name>`` selects one; flags then change single settings.
"""

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.data import (
    ChatProcessor,
    FirstFitPackingConfig,
    GrainDataLoader,
    IndexedJsonlSource,
    packed_text,
    SingleDatasetConfig,
)
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw, LRSchedulersContainer
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer

_TEST_VOCAB_SIZE = 2048


def _jargon(*, shuffle: bool) -> GrainDataLoader.Config:
    """The Jargon File, which comes with the repository."""
    return GrainDataLoader.Config(
        dataset=packed_text(["tests/assets/jargon/jargon.jsonl"]), shuffle=shuffle
    )


def llama3_jargon() -> Trainer.Config:
    """A model of 4.2 million parameters that learns real text on two CPU cores in about a minute and a half."""
    return Trainer.Config(
        model_spec=model_registry("jargon"),
        loss=ChunkedLossWrapper.Config(
            num_chunks=4, loss_fn=CrossEntropyLoss.Config(global_vocab_size=_TEST_VOCAB_SIZE)
        ),
        optimizer=default_adamw(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=20, decay_ratio=0.5, decay_type="cosine", min_lr_factor=0.1
        ),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=4 * 256,
            max_context_length=256,
            steps=150,
            # bfloat16 is emulated on most CPUs, at a tenth of the speed.
            mixed_precision_param="float32",
        ),
        dataloader=_jargon(shuffle=True),
        metrics=MetricsProcessor.Config(log_freq=10),
        activation_checkpoint=None,
        checkpoint=CheckpointManager.Config(
            enable=True, interval=50, async_mode="async", last_save_model_only=False
        ),
    )


def llama3_debugmodel() -> Trainer.Config:
    """A small model for trying things out: 6 million parameters, ten steps."""
    return Trainer.Config(
        model_spec=model_registry("debugmodel"),
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=_TEST_VOCAB_SIZE)
        ),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=2, decay_ratio=0.8, decay_type="linear", min_lr_factor=0.0
        ),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=8 * 2048, max_context_length=2048, steps=10
        ),
        dataloader=_jargon(shuffle=False),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(pipeline_parallel_schedule="Interleaved1F1B"),
        checkpoint=CheckpointManager.Config(interval=10, last_save_model_only=False),
        activation_checkpoint=SelectiveAC.Config(),
        validator=Validator.Config(freq=5, steps=10, dataloader=_jargon(shuffle=False)),
    )


def llama3_debugmodel_ce_loss() -> Trainer.Config:
    """``llama3_debugmodel`` with the loss over all tokens at once."""
    config = llama3_debugmodel()
    config.loss = CrossEntropyLoss.Config(global_vocab_size=_TEST_VOCAB_SIZE)
    return config


def sft_debugmodel() -> Trainer.Config:
    """``llama3_debugmodel`` on questions and answers; only the answers are learned."""
    config = llama3_debugmodel()
    chats = SingleDatasetConfig(
        source=IndexedJsonlSource.Config(patterns=("tests/assets/sft_test/data.json",)),
        processor=ChatProcessor.Config(),
    )
    # Packed by first fit: a conversation that is cut in two has an answer without its question.
    config.dataloader = GrainDataLoader.Config(dataset=FirstFitPackingConfig(dataset=chats))
    config.training.max_context_length = 512
    config.training.num_tokens_per_microbatch_per_dp_rank = 8 * 512
    return config


def llama3_8b() -> Trainer.Config:
    """Llama 3.1 8B. Give the text with --dataloader.files."""
    return Trainer.Config(
        model_spec=model_registry("8B"),
        loss=ChunkedLossWrapper.Config(),
        hf_assets_path="./assets/hf/Llama-3.1-8B",
        profiler=Profiler.Config(enable_profiling=True, profile_freq=100),
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=8192, max_context_length=8192, steps=1000
        ),
        dataloader=GrainDataLoader.Config(),
        metrics=MetricsProcessor.Config(enable_tensorboard=True),
        checkpoint=CheckpointManager.Config(interval=500),
        activation_checkpoint=SelectiveAC.Config(),
    )


def llama3_70b() -> Trainer.Config:
    """Llama 3.1 70B. Give the text with --dataloader.files."""
    config = llama3_8b()
    config.model_spec = model_registry("70B")
    config.hf_assets_path = "./assets/hf/Llama-3.1-70B"
    config.optimizer = default_adamw(lr=1.5e-4)
    config.activation_checkpoint = FullAC.Config()
    return config


def llama3_405b() -> Trainer.Config:
    """Llama 3.1 405B. Give the text with --dataloader.files."""
    config = llama3_8b()
    config.model_spec = model_registry("405B")
    config.hf_assets_path = "./assets/hf/Llama-3.1-405B"
    config.optimizer = default_adamw(lr=8e-5)
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=600)
    config.training.num_tokens_per_microbatch_per_dp_rank = 2 * 8192
    config.training.steps = 3000
    config.activation_checkpoint = FullAC.Config()
    return config
