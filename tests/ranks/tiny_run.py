"""A trainer small enough to run dozens of times, and a record of every bit it produces.

``Recorded.run`` trains on this rank and returns a ``Trace``; two traces are equal exactly when the
runs saw the same samples, computed the same losses and hold the same state, bit for bit.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.data import GrainDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import BaseLogger
from torchtitan.components.optimizer import default_adamw, LRSchedulersContainer
from torchtitan.config import CommConfig, DebugConfig, TrainingConfig
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

NUM_STEPS = 12
CONTEXT = 32
NUM_DOCUMENTS = 23


class CrashError(Exception):
    """Stands for whatever ends a run in the middle."""


@dataclass
class Trace:
    """What a run did, step by step, and what it ended with."""

    samples: dict[int, list[str]] = field(default_factory=dict)
    """Digests of this rank's microbatches by step."""

    losses: dict[int, float] = field(default_factory=dict)
    learning_rates: dict[int, float] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    """Digest of every parameter and optimizer tensor, whole, and every plain value."""

    epochs: dict[int, int] = field(default_factory=dict)
    resumed_from: int = 0


class Recorded(Trainer):
    """A trainer that writes a trace and can be made to crash."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config, *, crash_after: int | None = None) -> None:
        super().__init__(config)
        self.trace = Trace()
        self.crash_after = crash_after
        self.metrics_processor.logger.add_logger(_Recorder(self.trace))

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> Any:
        digests = self.trace.samples.setdefault(self.step, [])
        digests.append(digest(input_dict["input"]) + digest(labels))
        return super().post_dataloading_process(input_dict, labels)

    def train_step(self, data_iterator: Any) -> None:
        if self.crash_after is not None and self.step > self.crash_after:
            raise CrashError
        if not self.trace.samples:
            self.trace.resumed_from = self.step - 1
        super().train_step(data_iterator)
        self.trace.epochs[self.step] = self.dataloader.state_dict()["epoch"]


class _Recorder(BaseLogger):
    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.trace.losses[step] = metrics["loss_metrics/global_avg_loss"]
        self.trace.learning_rates[step] = metrics["lr/AdamW"]


def digest(value: Any) -> str:
    """SHA-1 of a tensor's bytes (gathered if it is sharded), or of the text of anything else."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return hashlib.sha1(raw).hexdigest()
    return repr(value)


def write_corpus(folder: Path) -> str:
    """23 documents of different lengths, 20 rows in all; returns the path of the file."""
    path = folder / "corpus.jsonl"
    lines = [
        json.dumps({"text": f"document {number} " + "some words of it " * (3 + number % 4)})
        for number in range(NUM_DOCUMENTS)
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def make_config(folder: Path, name: str, **checkpoint: Any) -> Recorded.Config:
    """A run of 12 steps that dumps into ``folder/name``; ``checkpoint`` are fields of its config."""
    options: dict[str, Any] = {
        "enable": True,
        "interval": 1000,
        "last_save_model_only": False,
        "keep_latest_k": 0,
        **checkpoint,
    }
    config = Recorded.Config(
        model_spec=model_registry("jargon"),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=3, total_steps=NUM_STEPS),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=CONTEXT,
            num_tokens_per_train_step=4 * CONTEXT,
            max_context_length=CONTEXT,
            steps=NUM_STEPS,
            mixed_precision_param="float32",
        ),
        dataloader=GrainDataLoader.Config(
            files=[write_corpus(folder)], cache_dir=str(folder / "cache")
        ),
        dump_folder=str(folder / name),
        checkpoint=CheckpointManager.Config(**options),
        activation_checkpoint=None,
        debug=DebugConfig(seed=7, enable_structured_logging=False),
        comm=CommConfig(trace_buf_size=0),
    )
    config.metrics.log_freq = 1
    assert config.model_spec is not None
    model = config.model_spec.model
    assert isinstance(model, Decoder.Config)
    model.layers = model.layers[:2]
    return config


def run(config: Recorded.Config, *, crash_after: int | None = None) -> Trace:
    """Train on this rank, with a process group of its own, to the end or to the crash."""
    trainer = Recorded(config, crash_after=crash_after)
    try:
        trainer._train()
    except CrashError:
        pass
    trainer.close()
    assert isinstance(trainer.checkpointer, CheckpointManager)
    state = {
        **trainer.checkpointer.states["model"].state_dict(),
        **trainer.optimizers.state_dict(),
        **trainer.lr_schedulers.state_dict(),
        **trainer.dataloader.state_dict(),
        **trainer.state_dict(),
    }
    trainer.trace.state = {name: digest(value) for name, value in sorted(state.items())}
    trainer.peers.close()
    dist.destroy_process_group()
    return trainer.trace
