"""One save from the moment it is called until its bytes are on the disk, timed on this rank.

    idle   save | wait for staging | wait until written | sync what the side left unsynced
    busy   save | forward, backward | wait for staging | update, steps until written | sync

Times are in seconds. ``call`` is spent inside of ``save``, ``wait`` in the wait for staging; ``done`` counts
from the call until the side says that it is written, ``debt`` is the fsync of what it then has not synced.
``lost`` is what the save cost the training in all: the time of a busy cycle minus that of as many quiet
steps as it took. ``slow`` is what of that was not waited for, per second of writing beside training. A
quiet step is one without a save in flight, timed shortly before.
"""

import os
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.harness.models import all_ranks, Run
from benchmarks.saving.sides import FIRST_STEP, remove_checkpoint, Side

_QUIET_STEPS = 2


class Saver:
    """Takes a side from save to save; of its checkpoints the newest is left on the disk."""

    def __init__(self, side: Side, run: Run) -> None:
        self.side = side
        self._run = run
        self._step = 0

    @property
    def newest(self) -> Path:
        """Where the last checkpoint was written."""
        return self.side.path_of(self._step)

    def remove_newest(self) -> None:
        """Have no checkpoint on the disk; collective."""
        remove_checkpoint(self.side, self._step)

    def idle(self) -> dict[str, float]:
        """Nothing else runs beside the save."""
        started = self._begin()
        self.side.save(self._step)
        called = time.perf_counter()
        self.side.wait_for_staging()
        staged = time.perf_counter()
        self.side.wait_for_saving()
        done = time.perf_counter() - started
        times = {"call": called - started, "wait": staged - called, "done": done}
        return times | {"debt": self._sync()}

    def busy(self, quiet_step: float) -> dict[str, float]:
        """Training goes on beside the save; ``quiet_step`` is how long a step takes without one."""
        started = self._begin()
        self.side.save(self._step)
        called = time.perf_counter()
        moment = _Moment(self.side.saving())
        self._run.forward_backward()
        computed = time.perf_counter()
        self.side.wait_for_staging()
        staged = time.perf_counter()
        self._run.update()
        num_steps = 1
        while not all_ranks(moment.has_come):
            self._run.step()
            num_steps += 1
        total = time.perf_counter() - started
        self.side.wait_for_saving()
        call, wait, done = called - started, staged - computed, moment.at - started
        lost = total - num_steps * quiet_step
        beside = done - call - wait
        return {
            "call": call,
            "wait": wait,
            "done": done,
            "debt": self._sync(),
            "lost": lost,
            "slow": (lost - call - wait) / beside if beside > 0 else 0.0,
        }

    def _begin(self) -> float:
        if self._step:
            remove_checkpoint(self.side, self._step)
        self._step = self._step + 2 if self._step else FIRST_STEP
        dist.barrier()
        return time.perf_counter()

    def _sync(self) -> float:
        dist.barrier()  # until all ranks are done some names may be missing
        started = time.perf_counter()
        paths = sorted(path for path in self.newest.rglob("*") if path.is_file())
        for path in paths[dist.get_rank() :: dist.get_world_size()]:
            _fsync(path)
        if dist.get_rank() == 0:
            _fsync(self.newest)
            _fsync(self.newest.parent)
        return time.perf_counter() - started


def time_quiet_step(run: Run) -> float:
    """Seconds of a step with no save in flight."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(_QUIET_STEPS):
        run.step()
        all_ranks(True)  # as in the loop that is compared with this
    return (time.perf_counter() - started) / _QUIET_STEPS


class _Moment:
    """When a future ended; None has ended already."""

    def __init__(self, future: "Future[Any] | None") -> None:
        self.at = time.perf_counter()
        self.has_come = future is None
        if future is not None:
            future.add_done_callback(self._note)

    def _note(self, future: "Future[Any]") -> None:
        self.at = time.perf_counter()
        self.has_come = True


def _fsync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
