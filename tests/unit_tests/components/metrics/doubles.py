"""Stand-ins for what a metrics processor works with, and a reader of what it wrote."""

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchtitan.components.metrics import BaseLogger, MetricsProcessor
from torchtitan.distributed.parallel_dims import ParallelDims


class Recorder(BaseLogger):
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.closed = False

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.logged.append((step, metrics))

    def close(self) -> None:
        self.closed = True


class Clock:
    """Stands in for ``time`` in the module, so that no test waits or depends on a fast machine."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def perf_counter(self) -> float:
        return self.seconds


def dims(pp: int = 1, tp: int = 1, world_size: int = 1) -> ParallelDims:
    return ParallelDims(
        dp_replicate=1, dp_shard=-1, cp=1, tp=tp, pp=pp, ep=1, world_size=world_size
    )


def begin(folder: Path, step: int = 0, *, rank_dims: ParallelDims | None = None, **settings: Any):
    """A processor as the trainer makes it, about to train the step after ``step``."""
    built = MetricsProcessor.Config(**settings).build(
        parallel_dims=rank_dims or dims(), dump_folder=str(folder), config_dict={"a": 1}
    )
    built.total_steps = 1000
    built.start_step = step
    return built


def log_steps(built: MetricsProcessor, steps: range, offset: float = 0.0) -> None:
    """Log the loss ``step + offset`` at each of ``steps``."""
    for step in steps:
        built.log(step, step + offset, step + offset, 1.0)


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of the only run below ``folder``: (step, value) by tag."""
    (run,) = {path.parent for path in folder.rglob("events.*")}
    events = EventAccumulator(str(run))
    events.Reload()
    return {
        tag: [(event.step, round(event.value, 4)) for event in events.Scalars(tag)]
        for tag in events.scalars.Keys()
    }
