"""What one rank did in one start: where its time went, its steps, its numbers, its saves.

The time of a rank is that of its main thread. Whatever passes between two records of that thread
belongs to the innermost span that is open, so the parts add up to the whole, also where a run was
killed in the middle of a span.

    records of one file -> RankLog.add, one after the other -> totals
"""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.observability.run_log.records import BrokenLines, read_records
from torchtitan.observability.structured_logger.records import span_and_phase

START_UP = "start-up"
REST = "rest of the step"
OUTSIDE = "outside of the steps"

# Span -> what it counts as. A span that is not listed counts under its own name within a step, and as
# start-up before the first one.
_PARTS = {
    "step": REST,
    "fetching_batch": "data",
    "post_dataloading_process": "data",
    "fwd_bwd": "forward and backward",
    "optim": "update",
    "checkpoint_save": "checkpoint save",
    "checkpoint_wait_staging": "checkpoint wait",
    "checkpoint_wait_saving": "checkpoint wait",
    "checkpoint_load": "checkpoint load",
    "eval": "validation",
    "collect_dist_metrics": "metrics",
    "gc_collect": "garbage collection",
    "kineto_profiler_step_call": "profiler",
    "memory_profiler_step_call": "profiler",
}


@dataclass(kw_only=True, slots=True)
class Save:
    """One checkpoint, as rank 0 reported it."""

    step: int
    reported_at: float
    """Seconds since 1970 at which it was durable, or had failed."""

    blocked_seconds: float | None = None
    durable_seconds: float | None = None
    size_mebibytes: float | None = None
    failed: bool = False


_FAILED = "checkpoint/failed"
_SAVE_FIELDS = {
    "checkpoint/blocked(s)": "blocked_seconds",
    "checkpoint/durable(s)": "durable_seconds",
    "checkpoint/size(MiB)": "size_mebibytes",
}


@dataclass(slots=True)
class RankLog:
    """The totals of one file."""

    path: Path
    source: str = ""
    rank: int = 0
    begin: float = 0.0
    """Seconds since 1970 of the first record; ``end`` is that of the main thread's last one."""

    end: float = 0.0
    resumed_after: int | None = None
    """The step before the first one that began; None if none did."""

    seconds_by_part: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    step_seconds: dict[int, float] = field(default_factory=dict)
    """Duration of each step that updated the parameters."""

    step_tags: dict[int, list[str]] = field(default_factory=dict)
    ready_at: dict[int, float] = field(default_factory=dict)
    """When the rank had the data of a step, seconds since 1970: from then on it needs the others."""

    scalars: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    """Values by name and step."""

    saves: list[Save] = field(default_factory=list)
    open_spans: list[str] = field(default_factory=list)
    """What was going on at the last record, outermost first."""

    error: str | None = None
    """The first error since the last step began, and the span it came from."""

    closed_in_order: bool = False
    num_records: int = 0
    broken: BrokenLines = field(default_factory=BrokenLines)
    _main_thread: Any = None
    _saves_by_thread: dict[Any, Save] = field(default_factory=dict)
    _step_begin: float = 0.0
    _has_updated: bool = False

    def add(self, record: dict[str, Any]) -> None:
        """Take the next record of the file into account."""
        self.num_records += 1
        now, thread = float(record["time"]), record.get("tid")
        if self.num_records == 1:
            self.source = str(record.get("source") or "")
            self.rank = int(record.get("rank") or 0)
            self.begin = self.end = now
            self._main_thread = thread
        kind = str(record.get("log_type_name"))
        if thread == self._main_thread:
            self._pass_time(now)
            # Instants may be named like the start of a span.
            is_span = record.get("log_type") == "event"
            name, phase = span_and_phase(kind) if is_span else ("", "")
            if phase == "start":
                self._enter(name, record, now)
            elif phase == "end":
                self._leave(name, record, now)
            elif phase == "error" and self.error is None:
                # It passes through the outer spans as well; the innermost one comes first.
                _, _, what = str(record.get("message")).partition(" error ")
                self.error = f"{what} (in {name})"
        if kind == "metric_value":
            self._take_value(record, thread, now)

    @property
    def seconds(self) -> float:
        """How long the main thread was at work."""
        return self.end - self.begin

    def _pass_time(self, now: float) -> None:
        # A clock that is set back must not make a part negative.
        self.seconds_by_part[self._part()] += max(now - self.end, 0.0)
        self.end = max(now, self.end)

    def _part(self) -> str:
        unlisted = None
        for name in reversed(self.open_spans):
            if name in _PARTS:
                # What an unlisted span does within a listed one belongs to that, but "step" says little.
                return unlisted if name == "step" and unlisted else _PARTS[name]
            unlisted = name
        return START_UP if self.resumed_after is None else OUTSIDE

    def _enter(self, name: str, record: dict[str, Any], now: float) -> None:
        self.open_spans.append(name)
        step = record.get("step")
        if name == "step" and isinstance(step, int):
            self._step_begin, self._has_updated, self.error = now, False, None
            if self.resumed_after is None:
                self.resumed_after = step - int(record.get("relative_step") or 1)

    def _leave(self, name: str, record: dict[str, Any], now: float) -> None:
        if name in self.open_spans:
            # Spans opened within it never ended, if any: an error passed through code without them.
            while self.open_spans.pop() != name:
                pass
        step = record.get("step")
        if name == "torch_distributed_teardown":
            self.closed_in_order = True
        elif not isinstance(step, int):
            return
        elif name == "optim":
            self._has_updated = self.error is None
        elif name == "step" and self._has_updated:
            self.step_seconds[step] = max(now - self._step_begin, 0.0)
            if tags := record.get("step_tags"):
                self.step_tags[step] = [str(tag) for tag in tags]
        elif name == "fetching_batch":
            self.ready_at[step] = now

    def _take_value(self, record: dict[str, Any], thread: Any, now: float) -> None:
        name, value, step = str(record.get("event_name")), record.get("value"), record.get("step")
        if not isinstance(value, (int, float)):
            return  # not a number: a loss that was not finite
        if name == "checkpoint/step":
            self._saves_by_thread[thread] = Save(step=int(value), reported_at=now)
            self.saves.append(self._saves_by_thread[thread])
        elif name == _FAILED and thread in self._saves_by_thread:
            self._saves_by_thread[thread].failed = True
        elif name in _SAVE_FIELDS and thread in self._saves_by_thread:
            setattr(self._saves_by_thread[thread], _SAVE_FIELDS[name], float(value))
        elif isinstance(step, int):
            self.scalars[name][step] = float(value)


def read_rank_log(path: Path) -> RankLog:
    """The totals of the file ``path``."""
    log = RankLog(path)
    for record in read_records(path, log.broken):
        log.add(record)
    return log
