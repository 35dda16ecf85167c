"""One step and the loop around it, on stand-ins for the parts."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints
from unittest.mock import MagicMock, patch

import pytest
import torch
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.data import DataloaderExhaustedError, TrainerBatch
from torchtitan.trainer import Trainer

from tests.unit_tests.components.metrics.doubles import begin, Clock, Recorder

PROCESSOR = "torchtitan.components.metrics.processor"


def batch(*labels: int) -> TrainerBatch:
    tokens = torch.arange(len(labels))
    return {"input": tokens, "positions": tokens}, torch.tensor(labels)


def stand_in(*losses: float, grad_norm: float = 4.0) -> Any:
    """What ``train_step`` touches; ``forward_backward_step`` gives ``losses`` one by one."""
    order: list[str] = []
    shared = torch.zeros(())

    def forward_backward_step(**kwargs: Any) -> torch.Tensor:
        order.append("forward_backward")
        # A compiled step reuses its output memory, so every call returns the same tensor.
        return shared.fill_(remaining.pop(0))

    remaining = list(losses)
    checkpointer = MagicMock()
    checkpointer.maybe_wait_for_staging.side_effect = lambda: order.append("wait_for_staging")
    optimizers = MagicMock()
    optimizers.step.side_effect = lambda: order.append("update")
    lr_schedulers = MagicMock()
    lr_schedulers.get_metrics.return_value = {}
    trainer = SimpleNamespace(
        config=SimpleNamespace(
            training=SimpleNamespace(disable_cuda_graphs=True, max_norm=1.0),
        ),
        optimizers=optimizers,
        lr_schedulers=lr_schedulers,
        parallel_dims=SimpleNamespace(
            dp_enabled=False,
            pp_enabled=False,
            dp_cp_enabled=False,
            ep_enabled=False,
            get_optional_mesh=lambda name: None,
        ),
        gradient_accumulation_steps=len(losses),
        num_pp_microbatches=1,
        device=torch.device("cpu"),
        forward_backward_step=forward_backward_step,
        model_parts=[torch.nn.Linear(2, 2)],
        checkpointer=checkpointer,
        metrics_processor=MagicMock(),
        step=1,
        ntokens_seen=3,
        order=order,
        grad_norm=grad_norm,
    )
    return trainer


def step(trainer: Any, batches: Iterator[TrainerBatch]) -> None:
    def clip(*args: Any, **kwargs: Any) -> torch.Tensor:
        trainer.order.append("clip")
        return torch.tensor(trainer.grad_norm)

    with patch("torchtitan.trainer.dist_utils.clip_grad_norm_", side_effect=clip):
        Trainer.train_step(trainer, batches)


def test_losses_of_microbatches_add_up_although_they_share_memory() -> None:
    trainer = stand_in(1.0, 2.0, 3.0)
    step(trainer, iter([batch(1, 2)] * 3))
    trainer.metrics_processor.log.assert_called_once_with(
        1, 6.0, 6.0, 4.0, extra_metrics={"n_tokens_seen": 3}
    )


def test_staging_is_awaited_between_clipping_and_the_update() -> None:
    trainer = stand_in(1.0, 1.0)
    step(trainer, iter([batch(1)] * 2))
    expected = ["forward_backward", "forward_backward", "clip", "wait_for_staging", "update"]
    assert trainer.order == expected


@pytest.mark.parametrize(
    ("loss", "grad_norm"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("nan"))]
)
def test_what_is_not_finite_stops_before_the_update(loss: float, grad_norm: float) -> None:
    trainer = stand_in(loss, grad_norm=grad_norm)
    trainer.metrics_processor.should_log.return_value = False
    with pytest.raises(RuntimeError, match="not finite"):
        step(trainer, iter([batch(1)]))
    trainer.optimizers.step.assert_not_called()
    trainer.lr_schedulers.step.assert_not_called()


def test_a_step_whose_data_ends_in_the_middle_computes_nothing() -> None:
    trainer = stand_in(1.0, 1.0)

    def one_then_end() -> Iterator[TrainerBatch]:
        yield batch(1)
        raise DataloaderExhaustedError("no more")

    with pytest.raises(DataloaderExhaustedError):
        step(trainer, one_then_end())
    assert trainer.order == []


def test_valid_tokens_are_counted_over_all_microbatches() -> None:
    trainer = stand_in(1.0, 1.0)
    seen = []
    inner = trainer.forward_backward_step
    trainer.forward_backward_step = lambda **kwargs: (seen.append(kwargs), inner(**kwargs))[1]
    step(trainer, iter([batch(5, -100, 6), batch(-100, -100, 7)]))
    assert [kwargs["global_valid_tokens"].item() for kwargs in seen] == [3, 3]


def test_beginning_to_iterate_over_the_data_advances_no_generator() -> None:
    class Loader:
        def __iter__(self) -> Iterator[TrainerBatch]:
            torch.rand(1)  # as torch's DataLoader does for its workers
            return iter([batch(1)])

    trainer = stand_in(1.0)
    before = torch.get_rng_state()
    next(Trainer.batch_generator(trainer, Loader()))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_time_that_the_data_takes_is_measured_and_nothing_else(tmp_path: Path) -> None:
    clock, recorder = Clock(), Recorder()

    def slow_loader() -> Iterator[TrainerBatch]:
        for seconds in (2.0, 4.0):
            clock.seconds += seconds
            yield batch(1, 2)

    with patch("torchtitan.train_step.time", clock), patch(f"{PROCESSOR}.time", clock):
        processor = begin(tmp_path)
        processor.logger.add_logger(recorder)
        trainer = stand_in(1.0)
        trainer.metrics_processor = processor
        for _ in islice(Trainer.batch_generator(trainer, slow_loader()), 2):
            clock.seconds += 7.0  # the rest of the step
        processor.log(2, 1.0, 1.0, 1.0)
    ((_, metrics),) = recorder.logged
    assert metrics["time_metrics/data_loading(s)"] == 3.0
    assert metrics["time_metrics/data_loading(%)"] == 30.0
    assert metrics["time_metrics/end_to_end(s)"] == 10.0
    assert metrics["throughput(tps)"] == 4 / 20


def loop(
    steps: int,
    *,
    data_ends_after: int = 99,
    loaded: int = 0,
    interval: int = 2,
    is_exported: bool = False,
    load_step: int = -1,
    tokens_before: int = 8,
    is_lost: bool = False,
) -> list[Any]:
    """The calls that ``train`` makes on its parts, in order."""
    calls: list[Any] = []
    trainer: Any = object.__new__(Trainer)
    trainer.step = trainer.ntokens_seen = trainer._saved_step = 0
    trainer.num_tokens_per_train_step = 8
    trainer.dataloader = MagicMock()
    trainer.dataloader.state_dict.side_effect = lambda: {"row": trainer.step}
    trainer.dataloader.load_state_dict.side_effect = lambda state: calls.append(("rewind", state))
    trainer.peers = trainer.gc_handler = MagicMock()
    trainer.metrics_processor = MagicMock()
    profiler = MagicMock()
    profiler.build.return_value = nullcontext(MagicMock())
    trainer.config = SimpleNamespace(
        training=SimpleNamespace(steps=steps),
        checkpoint=SimpleNamespace(load_step=load_step),
        comm=SimpleNamespace(train_timeout_seconds=1),
        profiler=profiler,
        dump_folder="",
    )
    trainer.parallel_dims, trainer.model_parts = None, []

    def load(step: int) -> bool:
        trainer.step, trainer.ntokens_seen = loaded, loaded * tokens_before
        return loaded > 0

    def save(step: int, last_step: bool = False) -> bool:
        calls.append(("save", step, last_step))
        return last_step or step % interval == 0

    def train_step(data_iterator: Any) -> None:
        if trainer.step > data_ends_after:
            raise DataloaderExhaustedError("no more")
        calls.append(("step", trainer.step))

    trainer.train_step = train_step
    trainer.checkpointer = SimpleNamespace(
        load=load,
        save=save,
        is_finished=lambda last_step: is_exported,
        has_lost=lambda step: is_lost,
    )
    trainer.validator = SimpleNamespace(
        should_validate=lambda step: step == 2,
        validate=lambda parts, step: calls.append(("validate", step)),
    )
    with patch("torchtitan.trainer.dist_utils.set_pg_timeouts"):
        trainer.train()
    return calls


def test_each_step_is_updated_then_saved_then_validated() -> None:
    assert loop(3) == [
        *[("step", 1), ("save", 1, False)],
        *[("step", 2), ("save", 2, False), ("validate", 2)],
        *[("step", 3), ("save", 3, True)],
    ]


def test_a_resumed_run_goes_on_with_the_next_step() -> None:
    assert loop(3, loaded=2) == [("step", 3), ("save", 3, True)]


def test_a_run_whose_steps_are_larger_now_is_warned_that_the_learning_rate_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def warnings() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.levelname == "WARNING"]

    loop(3, loaded=2)
    loop(3)
    assert warnings() == []
    loop(3, loaded=2, tokens_before=4)
    (warning,) = warnings()
    assert "2 steps so far took 4 tokens on average, the next ones take 8" in warning.getMessage()
    assert "--training.num_tokens_per_train_step" in warning.getMessage()


def test_a_finished_run_does_nothing() -> None:
    assert loop(3, loaded=3) == loop(3, loaded=5) == []


def test_a_run_whose_weights_were_exported_loads_and_trains_nothing() -> None:
    assert loop(3, loaded=2, is_exported=True) == []
    # Unless it is told where to go back to.
    assert loop(3, loaded=2, is_exported=True, load_step=2) == [("step", 3), ("save", 3, True)]


def test_when_the_data_ends_the_step_before_is_saved_and_the_broken_one_is_not() -> None:
    # Rewound to where step 4 began, before what it had fetched already.
    assert loop(9, data_ends_after=3)[-3:] == [
        *[("save", 3, False), ("rewind", {"row": 4}), ("save", 3, True)]
    ]


def test_when_the_data_ends_after_a_saved_step_it_is_not_saved_again() -> None:
    calls = loop(9, data_ends_after=2)
    assert [call for call in calls if call[0] == "save"] == [("save", 1, False), ("save", 2, False)]


def test_when_the_data_ends_and_the_save_in_flight_is_lost_the_step_is_saved_again() -> None:
    calls = loop(9, data_ends_after=2, is_lost=True)
    assert [call for call in calls if call[0] == "save"][-2:] == [
        ("save", 2, False),
        ("save", 2, True),
    ]
    # What was loaded is there.
    calls = loop(9, loaded=3, data_ends_after=3, is_lost=True)
    assert [call for call in calls if call[0] == "save"] == []


def test_the_checkpoint_section_is_typed_as_the_base_and_made_by_dcp() -> None:
    assert Trainer.Config.__annotations__["checkpoint"] is BaseCheckpointManager.Config
    made = Trainer.Config().checkpoint
    assert type(made) is CheckpointManager.Config and made.enable is False
    get_type_hints(Trainer.Config, include_extras=True)


def test_its_own_state_is_the_step_and_the_tokens() -> None:
    trainer = object.__new__(Trainer)
    trainer.load_state_dict({"step": 4, "ntokens_seen": 32})
    assert trainer.state_dict() == {"step": 4, "ntokens_seen": 32}
    with pytest.raises(KeyError):
        trainer.load_state_dict({"step": 4})


def test_closing_goes_on_after_an_error_and_raises_the_first() -> None:
    trainer = object.__new__(Trainer)
    trainer.step, trainer.peers = 3, MagicMock()
    trainer.dataloader, trainer.checkpointer = MagicMock(), MagicMock()
    trainer.metrics_processor = MagicMock()
    trainer.dataloader.close.side_effect = ValueError("first")
    trainer.checkpointer.close.side_effect = ValueError("second")
    with pytest.raises(ValueError, match="first"):
        trainer.close()
    trainer.metrics_processor.close.assert_called_once_with()


def test_a_trainer_whose_building_failed_can_be_closed() -> None:
    object.__new__(Trainer).close()
