"""Decide which steps are traced, and where the traces go.

Two recorders, each optional: torch.profiler (what ran when, on the CPU and the accelerator) and the
history of CUDA's allocator (who holds the memory). The one fact to know: steps are counted over the
whole run, not over this process, so a resumed run traces the steps the uninterrupted one would have.
A file that cannot be written is one warning; the run and the next files go on.

    with Profiler -> step() after every training step
        traces     <save_traces_folder>/iteration_<step>/rank<r>_trace.json.gz
        snapshots  <save_memory_snapshot_folder>/step_<12 digits>[_exit]/<rank>_step_<n>.pickle
"""

import os
import pickle
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Self

import torch
import torch.distributed as dist
import tyro

from torchtitan.config import Configurable
from torchtitan.config.violations import reject
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import logger

__all__ = ["MemoryProfiler", "Profiler"]

# The only one whose history torch records.
_allocator = torch.cuda.memory
_has_allocator = torch.cuda.is_available


class MemoryProfiler:
    """Snapshots of CUDA's allocator every ``freq`` steps, with the events that led there."""

    def __init__(
        self, *, global_step: int, freq: int, max_entries: int, folder: str, leaf: str
    ) -> None:
        self.step_num = global_step
        self._freq = freq
        self._folder = folder
        self._leaf = leaf
        self._files = _Files("memory snapshot")
        _allocator._record_memory_history(max_entries=max_entries)

    def step(self, exit_ctx: bool = False) -> None:
        """Count a step and take a snapshot if one is due, or if this is the end (``exit_ctx``)."""
        if not exit_ctx:
            self.step_num += 1
            if self.step_num % self._freq != 0:
                return
        step = f"step_{self.step_num:012d}" + ("_exit" if exit_ctx else "")
        folder = os.path.join(self._folder, step, self._leaf)
        path = os.path.join(folder, f"{_rank():06d}_step_{self.step_num}.pickle")
        self._files.write(path, _dump_snapshot)

    def stop(self) -> None:
        _allocator._record_memory_history(enabled=None)


class Profiler(Configurable):
    """Records chosen steps of a run; a context manager whose ``step`` follows every training step."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enable_profiling: bool = False
        """Write traces of chosen steps."""

        save_traces_folder: str = "profiling/traces"
        """Folder for traces, inside of the dump folder."""

        profile_freq: int = 10
        """Length of a cycle in steps; each ends with warm-up and traced steps."""

        profiler_repeat: int | None = None
        """Number of cycles; None goes on to the end."""

        profiler_skip_first: int | None = None
        """Steps of the run before the first cycle; None is 0."""

        profiler_skip_first_wait: int | None = None
        """1 leaves out the waiting steps of the first cycle, so that it traces earlier; None is 0."""

        profiler_active: int = 1
        """Traced steps of a cycle."""

        profiler_warmup: int = 3
        """Steps before the traced ones in which the profiler runs, but nothing is kept."""

        enable_memory_snapshot: bool = False
        """Write snapshots of CUDA's memory, also when the memory runs out; only on CUDA."""

        memory_snapshot_freq: int | None = None
        """Steps between two memory snapshots; None is profile_freq."""

        save_memory_snapshot_folder: str = "profiling/memory_snapshot"
        """Folder for memory snapshots, inside of the dump folder."""

        memory_snapshot_max_entries: int = 1_000_000
        """Allocator events a snapshot holds; the oldest are dropped."""

        trace_post_processor: Annotated[Callable[[str], None] | None, tyro.conf.Suppress] = None
        """Called with the path of each trace once it is written; None does nothing."""

        def __post_init__(self) -> None:
            least = {"profiler_active": 1, "profiler_warmup": 0, "memory_snapshot_max_entries": 1}
            least |= {"profile_freq": 1, "memory_snapshot_freq": 1, "profiler_repeat": 0}
            least |= {"profiler_skip_first": 0, "profiler_skip_first_wait": 0}
            for name, smallest in sorted(least.items()):
                value = getattr(self, name)
                if value is not None and value < smallest:
                    reject(f"profiler.{name} is {value}; it must be {smallest} or more.")
            needed = self.profiler_warmup + self.profiler_active
            if self.enable_profiling and self.profile_freq < needed:
                reject(
                    f"profiler.profile_freq is {self.profile_freq}, but a cycle has {self.profiler_warmup} "
                    f"warm-up steps and {self.profiler_active} traced ones. Set it to {needed} or more, "
                    "or lower profiler_warmup or profiler_active."
                )

    def __init__(
        self,
        config: Config,
        *,
        global_step: int = 0,
        base_folder: str = "",
        leaf_folder: str = "",
    ) -> None:
        """``global_step`` is the step the run continues from; ``leaf_folder`` tells writers of one rank apart."""
        self.config = config
        self._global_step = global_step
        self._base_folder = base_folder
        self._leaf_folder = leaf_folder
        self.torch_profiler: torch.profiler.profile | None = None
        self.memory_profiler: MemoryProfiler | None = None

    def active(self, *, global_step: int = 0, base_folder: str = "", leaf_folder: str = "") -> Self:
        """The same profiler with other places and another step to start from, for a ``with``."""
        self._global_step = global_step
        self._base_folder = base_folder
        self._leaf_folder = leaf_folder
        return self

    def __enter__(self) -> Self:
        places = {
            "global_step": self._global_step,
            "base_folder": self._base_folder,
            "leaf_folder": self._leaf_folder,
        }
        self.torch_profiler = self.build_torch_profiler(**places)
        self.memory_profiler = self.build_memory_profiler(**places)
        if self.torch_profiler is not None:
            self.torch_profiler.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        memory_profiler, torch_profiler = self.memory_profiler, self.torch_profiler
        self.memory_profiler = self.torch_profiler = None
        try:
            if memory_profiler is not None:
                if isinstance(exc, torch.OutOfMemoryError):
                    memory_profiler.step(exit_ctx=True)
                memory_profiler.stop()
        finally:
            if torch_profiler is not None:
                torch_profiler.stop()

    def step(self) -> None:
        """Tell the recorders that a training step has ended."""
        for span, recorder in (
            ("kineto_profiler_step_call", self.torch_profiler),
            ("memory_profiler_step_call", self.memory_profiler),
        ):
            if recorder is not None:
                with sl.log_trace_span(span):
                    recorder.step()

    def build_torch_profiler(
        self, *, global_step: int, base_folder: str, leaf_folder: str
    ) -> torch.profiler.profile | None:
        """The trace recorder, not started, or None when traces are off."""
        config = self.config
        if not config.enable_profiling:
            return None
        traces = os.path.join(base_folder, config.save_traces_folder)
        files = _Files("trace")

        def write(profile: torch.profiler.profile) -> None:
            folder = os.path.join(traces, f"iteration_{profile.step_num}", leaf_folder)
            path = os.path.join(folder, f"rank{_rank()}_trace.json.gz")
            if files.write(path, profile.export_chrome_trace):
                files.hand_on(path, config.trace_post_processor)

        # Wanted: each trace holds its own cycle.
        warnings.filterwarnings(
            "ignore", message=".*Profiler clears events at the end of each cycle"
        )
        profiler = torch.profiler.profile(
            activities=list(torch.profiler.supported_activities()),
            schedule=torch.profiler.schedule(
                wait=config.profile_freq - config.profiler_warmup - config.profiler_active,
                warmup=config.profiler_warmup,
                active=config.profiler_active,
                repeat=config.profiler_repeat or 0,
                skip_first=config.profiler_skip_first or 0,
                skip_first_wait=config.profiler_skip_first_wait or 0,
            ),
            on_trace_ready=write,
            record_shapes=True,
        )
        profiler.step_num = global_step
        return profiler

    def build_memory_profiler(
        self, *, global_step: int, base_folder: str, leaf_folder: str
    ) -> MemoryProfiler | None:
        """The memory recorder, recording already, or None when snapshots are off or impossible."""
        config = self.config
        if not config.enable_memory_snapshot:
            return None
        if not _has_allocator():
            logger.warning(
                "profiler.enable_memory_snapshot was asked for, but this machine has no CUDA device and torch "
                "records the memory of no other. Going on without memory snapshots."
            )
            return None
        return MemoryProfiler(
            global_step=global_step,
            freq=config.memory_snapshot_freq or config.profile_freq,
            max_entries=config.memory_snapshot_max_entries,
            folder=os.path.join(base_folder, config.save_memory_snapshot_folder),
            leaf=leaf_folder,
        )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _dump_snapshot(path: str) -> None:
    with open(path, "wb") as file:
        pickle.dump(_allocator._snapshot(), file)


class _Files:
    """Files of one kind, of which any may be missing in the end."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._was_told = False

    def write(self, path: str, fill: Callable[[str], object]) -> bool:
        """Let ``fill`` write to ``path``; whether it could."""
        started = time.monotonic()
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fill(path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(path)  # half of one
            self._tell(f"Could not write the {self._what} {path}: {error}.")
            return False
        if _rank() == 0:
            logger.info(f"Wrote the {self._what} {path} in {time.monotonic() - started:.2f} s")
        return True

    def hand_on(self, path: str, post_processor: Callable[[str], None] | None) -> None:
        """Let ``post_processor``, which is somebody else's, do what it likes with the file."""
        if post_processor is not None:
            try:
                post_processor(path)
            except Exception as error:  # such as an upload without a network
                self._tell(f"{post_processor!r} failed with the {self._what} {path}: {error!r}.")

    def _tell(self, text: str) -> None:
        if not self._was_told:
            self._was_told = True
            logger.warning(f"{text} Training goes on; the next one is tried again, without a word.")
