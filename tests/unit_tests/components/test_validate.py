"""A validation reports the mean loss per token, and the training does not notice it."""

import random
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torchtitan.components.data import BaseDataLoader, GrainDataLoader, TrainerBatch
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.config import ParallelismConfig
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.observability import structured_logger as sl

from tests.ranks.pool import run_on_ranks

VOCAB, TOKENS = 7, 8


def draw() -> tuple[float, float, float]:
    """The next number of each generator that a loader may use."""
    return torch.rand(1).item(), random.random(), np.random.rand()


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


class Batches(BaseDataLoader):
    """Three microbatches, each rank its own; counts what is opened and closed."""

    opened: ClassVar[list["Batches"]] = []

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        repeat: bool = False
        masked: bool = False
        fails: bool = False

    def __init__(self, config: Config, *, dp_rank: int, **kwargs: Any) -> None:
        self.config, self.dp_rank, self.kwargs = config, dp_rank, kwargs
        self.num_fetched = 0
        self.is_closed = False
        self.opened.append(self)

    def __iter__(self) -> Iterator[TrainerBatch]:
        # Loaders may draw from any generator while they start.
        draw()
        while self.config.repeat or self.num_fetched < 3:
            if self.config.fails and self.num_fetched == 1:
                raise OSError("disk gone")
            self.num_fetched += 1
            yield microbatch(self.dp_rank, (self.num_fetched - 1) % 3, self.config.masked)

    def close(self) -> None:
        self.is_closed = True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def microbatch(rank: int, index: int, masked: bool = False) -> TrainerBatch:
    generator = torch.Generator().manual_seed(10 * rank + index)
    tokens, labels = torch.randint(0, VOCAB, (2, TOKENS), generator=generator)
    # A different number of valid tokens everywhere: a mean of means would be another number.
    labels[: TOKENS if masked else index + 3 * rank] = -100
    return {"input": tokens, "positions": torch.arange(TOKENS)}, labels


class Model(nn.Module):
    def __init__(self, vocab: int = VOCAB) -> None:
        super().__init__()
        generator_state = torch.get_rng_state()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(vocab, 4)
        self.layers = nn.ModuleDict({"0": nn.Dropout(0.5)})
        self.norm = nn.RMSNorm(4)
        self.lm_head = nn.Linear(4, vocab, bias=False)
        torch.set_rng_state(generator_state)

    def get_attention_masks(self, positions: torch.Tensor) -> torch.Tensor:
        return positions == 0

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention_masks: torch.Tensor
    ) -> torch.Tensor:
        assert attention_masks.equal(positions == 0)
        return self.lm_head(self.norm(self.layers["0"](self.tok_embeddings(tokens))))


@dataclass
class Reports:
    """What a metrics processor gets to know."""

    logged: list[tuple[float, int]] = field(default_factory=list)
    throughput: list[float] = field(default_factory=list)
    validation_seconds_since_last_log: float = 0.0

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, float]) -> None:
        self.logged.append((loss, step))
        self.throughput.append(extra_metrics["validation_metrics/throughput(tps)"])


def validator_of(
    reports: Reports, *, world_size: int = 1, rank: int = 0, steps: int = -1, **data: Any
) -> Validator:
    dims = ParallelDims(
        dp_replicate=1, dp_shard=world_size, cp=1, tp=1, pp=1, ep=1, world_size=world_size
    )
    # One process has no group to build meshes with, and needs none.
    alone: Any = SimpleNamespace(get_optional_mesh=lambda name: None, non_data_parallel_size=1)
    config = Validator.Config(enable=True, steps=steps, dataloader=Batches.Config(**data))
    return config.build(
        parallelism=ParallelismConfig(),
        dp_world_size=world_size,
        dp_rank=rank,
        tokenizer=None,
        parallel_dims=dims if world_size > 1 else alone,
        loss_fn=CrossEntropyLoss.Config().build(),
        validation_context=nullcontext,
        metrics_processor=reports,
        seq_len=TOKENS,
        num_tokens_per_batch=TOKENS,
    )


def expected_loss(model: nn.Module, ranks: int = 1, indices: tuple[int, ...] = (0, 1, 2)) -> float:
    loss_sum, count = 0.0, 0
    model.eval()
    for rank in range(ranks):
        for index in indices:
            inputs, labels = microbatch(rank, index)
            positions = inputs["positions"]
            logits = model(inputs["input"], positions, positions == 0)
            loss_sum += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            count += int((labels != -100).sum())
    model.train()
    return loss_sum / count


@pytest.fixture(autouse=True)
def no_loader_left_over() -> Iterator[None]:
    Batches.opened.clear()
    yield
    assert all(loader.is_closed for loader in Batches.opened)


def test_the_first_step_and_every_nth_are_validated() -> None:
    validator = BaseValidator.Config(freq=3).build()
    assert [step for step in range(1, 10) if validator.should_validate(step)] == [1, 3, 6, 9]


def test_settings_that_cannot_work_are_errors() -> None:
    with pytest.raises(ValueError, match="validation frequency must be positive"):
        BaseValidator.Config(freq=0)
    with pytest.raises(ValueError, match="validation frequency must be positive"):
        Validator.Config(freq=-1)
    with pytest.raises(ValueError, match="validator.steps is 0"):
        Validator.Config(steps=0)


def test_an_enabled_validation_needs_data_of_its_own(tmp_path: Path) -> None:
    for nothing in (GrainDataLoader.Config(), BaseDataLoader.Config()):
        with pytest.raises(ValueError, match="--validator.dataloader.files"):
            Validator.Config(enable=True, dataloader=nothing)
        assert not Validator.Config(dataloader=nothing).check(
            max_context_length=8, num_tokens_per_batch=8
        )
    missing = GrainDataLoader.Config(
        files=[str(tmp_path / "absent.jsonl")], cache_dir=str(tmp_path)
    )
    config = Validator.Config(enable=True, dataloader=missing)
    (problem,) = config.check(max_context_length=8, num_tokens_per_batch=8)
    assert problem.startswith("validation: ") and "absent.jsonl" in problem


def test_the_mean_is_taken_over_tokens() -> None:
    reports, model = Reports(), Model()
    validator_of(reports).validate([model], 5)
    ((loss, step),) = reports.logged
    assert step == 5 and loss == pytest.approx(expected_loss(model))
    assert reports.throughput[0] > 0 and reports.validation_seconds_since_last_log > 0
    (loader,) = Batches.opened
    assert loader.kwargs["num_tokens_per_batch"] == loader.kwargs["max_context_length"] == TOKENS


@pytest.mark.parametrize(("steps", "indices"), [(2, (0, 1)), (4, (0, 1, 2, 0))])
def test_a_number_of_steps_repeats_the_data(steps: int, indices: tuple[int, ...]) -> None:
    reports, model = Reports(), Model()
    validator_of(reports, steps=steps).validate([model], 1)
    assert reports.logged[0][0] == pytest.approx(expected_loss(model, indices=indices))
    assert Batches.opened[0].num_fetched == steps


def test_without_a_number_of_steps_the_data_is_read_once() -> None:
    validator_of(Reports(), repeat=True).validate([Model()], 1)
    assert Batches.opened[0].num_fetched == 3


def test_each_validation_starts_from_the_beginning() -> None:
    reports, model = Reports(), Model()
    validator = validator_of(reports, steps=2)
    validator.validate([model], 1)
    validator.validate([model], 2)
    assert reports.logged[0][0] == reports.logged[1][0]
    assert len(Batches.opened) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_the_training_does_not_notice(fails: bool) -> None:
    model = Model()
    model.norm.eval()
    modes = [module.training for module in model.modules()]
    seed()
    expected = draw()
    seed()
    if fails:
        with pytest.raises(OSError, match="disk gone"):
            validator_of(Reports(), fails=True).validate([model], 1)
    else:
        validator_of(Reports()).validate([model], 1)
    assert draw() == expected
    assert [module.training for module in model.modules()] == modes
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("workers", [0, 1])
def test_real_data_moves_neither_the_generators_nor_the_training_data(
    tmp_path: Path, workers: int
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("all the words of a text that fills some rows " * 9)
    tokenizer = HuggingFaceTokenizer(tokenizer_path="tests/assets/tokenizer")
    data = GrainDataLoader.Config(
        files=[str(text)], cache_dir=str(tmp_path / "cache"), num_workers=workers
    )
    layout: dict[str, Any] = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": tokenizer}
    sizes = {"max_context_length": TOKENS, "num_tokens_per_batch": TOKENS}
    with closing(data.build(**layout, **sizes)) as training:
        next(training)
        position = training.state_dict()
        expected = next(training)[1]
        training.load_state_dict(position)
        seed()
        states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
        config = Validator.Config(enable=True, dataloader=data)
        validator = config.build(
            parallelism=ParallelismConfig(),
            parallel_dims=SimpleNamespace(
                get_optional_mesh=lambda name: None, non_data_parallel_size=1
            ),
            loss_fn=CrossEntropyLoss.Config().build(),
            validation_context=nullcontext,
            metrics_processor=Reports(),
            seq_len=TOKENS,
            num_tokens_per_batch=TOKENS,
            **layout,
        )
        validator.validate([Model(vocab=2048)], 1)
        assert torch.get_rng_state().equal(states[0])
        assert (random.getstate(), str(np.random.get_state())) == states[1:]
        assert training.state_dict() == position
        assert next(training)[1].equal(expected)
    # What is no Stateful is in no checkpoint.
    assert not isinstance(validator, Stateful) and not hasattr(validator, "state_dict")


def test_data_without_labels_is_an_error() -> None:
    with pytest.raises(ValueError, match="step 9 found no token with a label"):
        validator_of(Reports(), masked=True).validate([Model()], 9)


def test_a_validating_step_is_tagged() -> None:
    sl.set_step(1)
    validator_of(Reports()).validate([Model()], 1)
    assert "eval" in sl.get_step_tags()
    sl.clear_step_tags()


def validate_on_shards() -> tuple[float, list[bool], list[float]]:
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, pp_enabled=False)
    reports, rank = Reports(), dist.get_rank()
    validator = validator_of(reports, world_size=2, rank=rank)
    model.layers.eval()  # no dropout: the gradients must be the same
    norms = []
    before = list(model.parameters())
    for validates in (False, True, False):
        model.zero_grad()
        inputs, labels = microbatch(rank, 0)
        positions = inputs["positions"]
        logits = model(inputs["input"], positions, positions == 0)
        nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
        grads = [param.grad for param in before if isinstance(param.grad, DTensor)]
        norms.append(sum(grad.full_tensor().norm().item() for grad in grads))
        if validates:
            validator.validate([model], 1)
    same = [one is other for one, other in zip(before, model.parameters(), strict=True)]
    return reports.logged[0][0], same, norms


@pytest.mark.ranks
def test_ranks_report_one_loss_and_keep_their_shards() -> None:
    for loss, same, norms in run_on_ranks(2, validate_on_shards):
        assert loss == pytest.approx(expected_loss(Model(), ranks=2), rel=1e-5)
        assert all(same)
        assert norms == pytest.approx([norms[0]] * 3, rel=1e-6)
