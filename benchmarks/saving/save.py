"""What one rank does to measure the saves of a case; ``checkpoint.py`` starts it.

    both sides: [ open, warm up, first save, memory of the second ]*
                -> [ limits? -> side A: idle, busy -> side B: idle, busy ]* -> sizes

The sides take turns in the same processes on the same state. Every rank returns its own samples.
"""

import gc
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import init_logger

from benchmarks.harness import usage
from benchmarks.harness.limits import Limits
from benchmarks.harness.models import all_ranks, Run, SIZES
from benchmarks.harness.pairs import turns
from benchmarks.saving.cases import Case, TABLES, Variants
from benchmarks.saving.cycle import Saver, time_quiet_step

_NUM_LIMITS = 5
_IDLE_SHARE = 0.05
"""Of one core: a process that uses less waits for something to do."""
_LOOK_SECONDS, _QUIET_LOOKS = 0.5, 2
"""A process may wait for a moment, and go on: for a file, or for another rank."""
_MOST_WAIT_SECONDS = 60.0


def measure(
    tell: Callable[[str], None],
    *,
    part: str,
    case: str,
    model: str,
    folder: str,
    num_pairs: int,
    budget_seconds: float,
    warm_up_seconds: float,
    num_firsts: int,
) -> dict[str, Any]:
    """Samples of this rank: see ``checkpoint.py`` for how they are stored."""
    init_logger()
    started_at = time.monotonic()
    entry, work = TABLES[part][case], Path(folder)
    run = Run(SIZES[model], str(work))
    limits = Limits(list(run.tensors()), work, dist.get_rank())
    found: dict[str, Any] = {"state_bytes": limits.size_bytes, "first": {}, "memory": {}}
    savers: dict[str, Saver] = {}
    for name in entry.sides:
        # Training waits for each save of a case that is not asynchronous, the first and all others.
        num_starts = num_firsts if entry.is_async and part == "save" else 1
        build = partial(_open, entry, name, run, work, warm_up_seconds)
        savers[name], found["first"][name], found["memory"][name] = _first_saves(
            build, num_starts, tell, f"first saves: {name}"
        )
        entry.check(name, savers[name].newest)
    found |= {"idle": {name: [] for name in savers}, "busy": {name: [] for name in savers}}
    found |= {"limits": [], "quiet_step": [], "cpu": []}
    for number in range(num_pairs):
        if not all_ranks(number == 0 or time.monotonic() - started_at < budget_seconds):
            break
        tell(f"pair {number + 1} of {num_pairs}")
        if number % max(1, num_pairs // _NUM_LIMITS) == 0:
            found["limits"].append(limits.sample(dist.barrier))
        step_seconds = time_quiet_step(run) if entry.is_async else 0.0
        found["quiet_step"].append(step_seconds)
        for name in turns(list(savers), number):
            before = usage.cpu_clocks()
            found["idle"][name].append(savers[name].idle())
            if entry.is_async:
                found["busy"][name].append(savers[name].busy(step_seconds))
            found["cpu"].append(usage.since(before))
    dist.barrier()
    found["written"] = {
        name: bytes_by_rank(saver.newest, entry.rank_pattern, dist.get_world_size())
        for name, saver in savers.items()
    }
    for saver in reversed(savers.values()):
        saver.side.close()
    return found


def _first_saves(
    build: Callable[[], Saver], num_starts: int, tell: Callable[[str], None], what: str
) -> tuple[Saver, list[dict[str, float]], list[dict[str, int]]]:
    """A saver, the times of first saves, and what the second ones took: each of a new saver.

    The last one is left open. All but the first are in processes that have saved before.
    """
    saver: Saver | None = None
    firsts, memory = [], []
    for number in range(num_starts):
        tell(f"{what}, {number + 1} of {num_starts}")
        if saver is not None:
            saver.side.close()
            saver.remove_newest()
        # Or this one would seem to need less than the one before it, of which cycles may be left.
        saver = None
        gc.collect()
        usage.give_back_freed_memory()
        before = usage.read()
        saver = build()
        firsts.append(saver.idle())
        memory.append(_memory_of_save(saver, before))
    assert saver is not None
    return saver, firsts, memory


def _open(
    case: Case | Variants, name: str, run: Run, parent: Path, warm_up_seconds: float
) -> Saver:
    """The saver of a side, ready for its first save."""
    saver = Saver(case.build(name, run, parent), run)
    saver.side.prepare()
    if case.is_async and warm_up_seconds > 0:
        _warm_up(run, warm_up_seconds)
    return saver


def _warm_up(run: Run, seconds: float) -> None:
    """Steps for ``seconds``, and then a wait until the processes below all ranks have nothing more to do.

    In a run there are many steps before the first save, in which what was prepared gets ready, with little
    of the machine where training uses all of it.

    Raises:
        RuntimeError: one of them works for a minute, so that nothing would be measured but that.
    """
    until = time.monotonic() + seconds
    while not all_ranks(time.monotonic() >= until):
        run.step()
    used, until, num_quiet = usage.cpu_seconds_below(), until + _MOST_WAIT_SECONDS, 0
    while not all_ranks(num_quiet >= _QUIET_LOOKS):
        if time.monotonic() >= until:
            raise RuntimeError(f"not ready to save after {_MOST_WAIT_SECONDS:g} s")
        time.sleep(_LOOK_SECONDS)
        before, used = used, usage.cpu_seconds_below()
        num_quiet = num_quiet + 1 if used - before < _IDLE_SHARE * _LOOK_SECONDS else 0


def _memory_of_save(saver: Saver, before: usage.Usage) -> dict[str, int]:
    """What a save takes at most, and what it keeps, beyond what there was ``before`` its side was built."""
    usage.give_back_freed_memory()  # that of the steps
    dist.barrier()
    with usage.PeakWatch() as watch:
        saver.idle()
    usage.give_back_freed_memory()
    kept = usage.read()
    return {
        "peak": watch.peak_total_bytes - before.total_bytes,
        "peak_own": watch.peak.own_bytes - before.own_bytes,
        "peak_shared": watch.peak.shared_bytes - before.shared_bytes,
        "peak_writer": watch.peak.writer_bytes - before.writer_bytes,
        "kept": kept.total_bytes - before.total_bytes,
    }


def bytes_by_rank(folder: Path, pattern: str, world_size: int) -> list[int]:
    """Bytes of the files that each rank wrote; what bears no number of a rank is rank 0's."""
    sizes = [0] * world_size
    for path in folder.rglob("*"):
        if path.is_file():
            match = re.search(pattern, path.name)
            sizes[int(match[1]) if match else 0] += path.stat().st_size
    return sizes
