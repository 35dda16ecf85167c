"""A trainer small enough to run dozens of times, and a record of every bit it produces.

``run`` trains on this rank and returns a ``Trace``; two traces are equal exactly when the runs saw
the same samples, computed the same losses and hold the same state, bit for bit.
"""

import hashlib
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.data import GrainDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import BaseLogger
from torchtitan.components.optimizer import default_adamw, LRSchedulersContainer
from torchtitan.config import CommConfig, DebugConfig, TrainingConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.model import Flavor
from torchtitan.trainer import Trainer

from tests.unit_tests.components.checkpointer.ways import saves_in_background, stager_of

NUM_STEPS = 12
CONTEXT = 32
NUM_DOCUMENTS = 23
# The vocabulary of the tokenizer, and heads for up to four tensor-parallel ranks.
TINY = Flavor(dim=32, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=48, vocab_size=2048)


class CrashError(Exception):
    """Stands for whatever ends a run in the middle."""


@dataclass
class Trace:
    """What a run did, step by step, and what it ended with."""

    samples: dict[int, list[list[str]]] = field(default_factory=dict)
    """Digests of the rows of each of this rank's microbatches, by step."""

    losses: dict[int, float] = field(default_factory=dict)
    learning_rates: dict[int, float] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    """Digest of every parameter and optimizer tensor, whole, and every plain value."""

    loaded: dict[str, str] = field(default_factory=dict)
    """The same before the first step of this run."""

    validation_losses: dict[int, float] = field(default_factory=dict)
    rng: dict[str, str] = field(default_factory=dict)
    """Digests of the generators of this rank at the end."""

    epochs: dict[int, int] = field(default_factory=dict)
    resumed_from: int = 0
    is_background: bool = False
    """Whether saves went on beside training in the end, which a run may give up."""

    has_writer: bool = False
    """Whether a process of its own wrote checkpoints in the end."""


class Recorded(Trainer):
    """A trainer that writes a trace and can be made to crash."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config, *, crash_after: int | None = None) -> None:
        super().__init__(config)
        self.trace = Trace()
        self.crash_after = crash_after
        self.draws = False
        self.metrics_processor.logger.add_logger(_Recorder(self.trace))

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> Any:
        rows = zip(input_dict["input"].split(CONTEXT), labels.split(CONTEXT), strict=True)
        digests = [digest(row) + digest(row_labels) for row, row_labels in rows]
        self.trace.samples.setdefault(self.step, []).append(digests)
        return super().post_dataloading_process(input_dict, labels)

    def train_step(self, data_iterator: Any) -> None:
        _note_how_it_saves(
            self
        )  # with the saves before the last one, which no background is left for
        if self.crash_after is not None and self.step > self.crash_after:
            self.step -= 1  # the one in hand never ran
            raise CrashError
        if not self.trace.samples:
            self.trace.resumed_from = self.step - 1
            if self.trace.resumed_from:
                # Not in a fresh run: asking an optimizer for its state creates it. And the step in
                # hand is counted already.
                self.trace.loaded = state_of(self) | {"step": digest(self.step - 1)}
        super().train_step(data_iterator)
        for _ in range(1 + dist.get_rank() if self.draws else 0):
            random.random()
            np.random.random()
            torch.rand(())
        self.trace.epochs[self.step] = self.dataloader.state_dict()["epoch"]


class _Recorder(BaseLogger):
    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if "validation_metrics/loss" in metrics:
            self.trace.validation_losses[step] = metrics["validation_metrics/loss"]
            return
        self.trace.losses[step] = metrics["loss_metrics/global_avg_loss"]
        # Several groups have several entries, of which the first is as good as any.
        self.trace.learning_rates[step] = next(
            rate for name, rate in metrics.items() if name.startswith("lr/")
        )


def digest(value: Any) -> str:
    """SHA-1 of a tensor's bytes (gathered if it is sharded), or of the text of anything else."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return hashlib.sha1(raw).hexdigest()
    return repr(value)


def state_of(trainer: Trainer) -> dict[str, str]:
    """Digests of everything that a checkpoint of ``trainer`` holds; a collective."""
    manager: Any = trainer.checkpointer
    state = {
        **manager.states["model"].state_dict(),
        **trainer.optimizers.state_dict(),
        **trainer.lr_schedulers.state_dict(),
        **trainer.dataloader.state_dict(),
        **trainer.state_dict(),
    }
    return {name: digest(value) for name, value in sorted(state.items())}


def _note_how_it_saves(trainer: Recorded) -> None:
    manager = trainer.checkpointer
    if manager.enable:
        trainer.trace.is_background = saves_in_background(manager)
        trainer.trace.has_writer = getattr(stager_of(manager), "writer_pid", None) is not None


def generators() -> dict[str, str]:
    """Digests of the random number generators that a model may draw from."""
    numpy_state = np.random.get_state(legacy=True)
    assert isinstance(numpy_state, tuple)
    name, keys, *rest = numpy_state
    states = {"python": random.getstate(), "numpy": (name, keys.tolist(), *rest)}
    return {
        **{name: hashlib.sha1(repr(state).encode()).hexdigest() for name, state in states.items()},
        "torch": digest(torch.get_rng_state()),
    }


def write_corpus(folder: Path, num_documents: int = NUM_DOCUMENTS) -> str:
    """Documents of different lengths, by default 20 rows in all; returns the path of the file."""
    path = folder / f"corpus-{num_documents}.jsonl"
    lines = [
        json.dumps({"text": f"document {number} " + "some words of it " * (3 + number % 4)})
        for number in range(num_documents)
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def make_config(
    folder: Path,
    name: str,
    *,
    manager: type[BaseCheckpointManager] = CheckpointManager,
    **checkpoint: Any,
) -> Recorded.Config:
    """A run of 12 steps that dumps into ``folder/name``; ``checkpoint`` are fields of its config."""
    options: dict[str, Any] = {
        "enable": True,
        "interval": 1000,
        "last_save_model_only": False,
        "keep_latest_k": 0,
        **checkpoint,
    }
    spec = model_registry("jargon")
    spec.model = TINY.build_config()
    config = Recorded.Config(
        model_spec=spec,
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
        checkpoint=manager.Config(**options),
        activation_checkpoint=None,
        debug=DebugConfig(seed=7, enable_structured_logging=False),
        comm=CommConfig(trace_buf_size=0),
    )
    config.metrics.log_freq = 1
    return config


def run(
    config: Recorded.Config,
    *,
    crash_after: int | None = None,
    with_state: bool = True,
    draws: bool = False,
) -> Trace:
    """Train on this rank, with a process group of its own, to the end or to the crash.

    ``with_state`` off leaves out the state at the end, whose gathering takes a while. ``draws``
    makes each rank draw, in each step, as many numbers from every generator as no other rank.
    """
    trainer = Recorded(config, crash_after=crash_after)
    trainer.draws = draws
    try:
        trainer._train()
    except CrashError:
        pass
    trainer.trace.rng = generators()
    trainer.close()
    if with_state:
        trainer.trace.state = state_of(trainer)
    trainer.peers.close()
    dist.destroy_process_group()
    return trainer.trace
