"""Structured logs as a run writes them, at times that a test chooses."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, IO

MAIN, BACKGROUND = 100, 101
"""Thread ids."""


class Rank:
    """Writes the log of one rank in one start; time passes only when it is told to."""

    def __init__(
        self, folder: Path, rank: int = 0, *, at: float = 1000.0, source: str = "training"
    ) -> None:
        self.rank, self.now, self.source = rank, at, source
        self.step: int | None = None
        self.resumed_after = 0
        self.tags: list[str] = []
        logs = folder / "structured_logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.path = logs / f"{source}.global_rank_{rank}.{at:.3f}.jsonl"
        self._file: IO[str] = self.path.open("w")
        self.write("instant", "structured_logger_started")

    def write(self, log_type: str, kind: str, **fields: Any) -> None:
        relative = None if self.step is None else self.step - self.resumed_after
        record = {
            "time": self.now,
            "tid": MAIN,
            "task_name": "MainThread",
            "source": self.source,
            "rank": self.rank,
            "log_type": log_type,
            "log_type_name": kind,
            "event_name": kind,
            "value": None,
            "step": self.step,
            "relative_step": relative,
            "step_tags": self.tags,
            "message": kind,
            **fields,
        }
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    @contextmanager
    def span(self, name: str, seconds: float = 0.0) -> Generator[None]:
        """A span with ``seconds`` after whatever happens inside of it."""
        begin = self.now
        self.write("event", f"{name}_start", event_name=name)
        yield
        self.now += seconds
        self.write("event", f"{name}_end", value=1000 * (self.now - begin))

    def takes(self, name: str, seconds: float) -> None:
        with self.span(name, seconds):
            pass

    def scalar(self, name: str, value: float | None, *, thread: int = MAIN) -> None:
        self.write("event", "metric_value", event_name=name, value=value, tid=thread)

    def begin_step(self, step: int, *, after: int = 0) -> None:
        self.step, self.resumed_after, self.tags = step, after, []

    def save(self, step: int, *, thread: int = BACKGROUND, **values: float) -> None:
        """Report a save: ``blocked``, ``durable``, ``size``, or ``failed``."""
        units = {"blocked": "(s)", "durable": "(s)", "size": "(MiB)", "failed": ""}
        self.scalar("checkpoint/step", step, thread=thread)
        for name, value in values.items():
            self.scalar(f"checkpoint/{name}{units[name]}", value, thread=thread)

    def train(self, steps: range, *, loss: float = 0.0, data: float = 0.1) -> None:
        """Steps of 1 second and ``data``, with the metrics of the logging rank at each."""
        for step in steps:
            self.begin_step(step, after=steps.start - 1)
            with self.span("step", 0.2):
                self.takes("fetching_batch", data)
                self.takes("fwd_bwd", 0.5)
                self.takes("optim", 0.3)
                self.scalar("throughput(tps)", 100.0 + self.rank)
                if self.rank == 0:
                    self.scalar("loss_metrics/global_avg_loss", step + loss)
                    self.scalar("lr/AdamW", 0.1)

    def cut_off(self) -> None:
        """Leave the first half of a record, as a kill does."""
        self._file.write('{"time": 12')
        self._file.flush()

    def damage(self) -> None:
        self._file.write("#!\n\n[3]\n")
        self._file.flush()

    def end(self) -> None:
        self.takes("torch_distributed_teardown", 0.0)
        self._file.close()


def writer_of(folder: Path, rank: int = 0, *, at: float = 1000.0) -> None:
    """A process that writes checkpoints for ``rank``: 2 s for a model, after 1 s of its own."""
    log = Rank(folder, rank, at=at, source="training.writer")
    log.now += 1
    thread: dict[str, Any] = {"tid": BACKGROUND, "task_name": "ckpt-write_0"}
    log.write("event", "save_model_start", event_name="save_model", **thread)
    log.now += 2
    log.write("event", "save_model_end", event_name="model.latency_ms", value=2000, **thread)
    log.write("event", "log_metric", event_name="rename.latency_ms", value=3, step=4)


def two_starts(folder: Path) -> None:
    """Two ranks, killed after step 7 while they saved; resumed after step 4 up to step 10."""
    for rank in (0, 1):
        log = Rank(folder, rank, at=1000 + rank / 8)
        log.now += 2
        log.train(range(1, 8), data=0.1 + 0.2 * rank)
        if rank == 0:
            log.save(4, blocked=0.25, durable=2.0, size=48.0)
        log.write("event", "step_start")
        log.write("event", "checkpoint_save_start")
        log.cut_off()
        again = Rank(folder, rank, at=1100 + rank / 8)
        again.now += 1
        again.takes("checkpoint_load", 0.5)
        again.train(range(5, 11), loss=0.5)
        if rank == 0:
            again.save(8, failed=1)
            again.save(10, blocked=1.5, durable=1.5, size=49.0)
        again.end()
