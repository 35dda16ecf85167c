"""What ranks do to measure loading: some save in another layout, then others load that and their own.

    seed (other number of ranks) -> all sides save -> end
    measure -> all sides save -> [ limits? -> own layout: A, B -> other layout: A, B ]*

Before the first load of each kind everything is set to 0, and afterwards compared with what was saved.
"""

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import init_logger

from benchmarks.harness import usage
from benchmarks.harness.limits import drop_from_cache, Limits
from benchmarks.harness.models import all_ranks, Run, SIZES
from benchmarks.harness.pairs import turns
from benchmarks.saving.cases import Case, TABLES, Variants
from benchmarks.saving.sides import FIRST_STEP, Side

SAME, RESHARDED = "same", "resharded"
SUMS = "sums.json"
_NUM_LIMITS = 5
# Of two sums over millions of numbers that were added up in another order.
_TOLERANCE = 1e-6


def seed(tell: Callable[[str], None], *, part: str, case: str, model: str, folder: str) -> None:
    """Save a run in the layout of these ranks, once per side."""
    init_logger()
    entry, work = TABLES[part][case], Path(folder)
    run = Run(SIZES[model], str(work))
    for side in _save(entry, run, work).values():
        side.close()


def measure(
    tell: Callable[[str], None],
    *,
    part: str,
    case: str,
    model: str,
    folder: str,
    other_folder: str,
    num_pairs: int,
    budget_seconds: float,
    cold: bool,
) -> dict[str, Any]:
    """Samples of this rank. ``other_folder`` is where ``seed`` saved."""
    init_logger()
    started_at = time.monotonic()
    entry, work = TABLES[part][case], Path(folder)
    run = Run(SIZES[model], str(work))
    limits = Limits(list(run.tensors()), work, dist.get_rank())
    tell("saving what is to be loaded")
    sides = {SAME: _save(entry, run, work)}
    sides[RESHARDED] = {name: entry.build(name, run, Path(other_folder)) for name in entry.sides}
    folders = {SAME: work, RESHARDED: Path(other_folder)}
    for layout, by_name in sides.items():
        for name, side in by_name.items():
            require_loaded(run, side, folders[layout], f"{name}, {layout} layout")
    found: dict[str, Any] = {"state_bytes": limits.size_bytes, "limits": [], "cpu": []}
    found["load"] = {layout: {name: [] for name in entry.sides} for layout in sides}
    for number in range(num_pairs):
        if not all_ranks(number == 0 or time.monotonic() - started_at < budget_seconds):
            break
        tell(f"pair {number + 1} of {num_pairs}")
        if number % max(1, num_pairs // _NUM_LIMITS) == 0:
            found["limits"].append(limits.sample(dist.barrier, cold=cold))
        for layout, name in itertools.product(sides, turns(entry.sides, number)):
            before = usage.cpu_clocks()
            found["load"][layout][name].append(_timed_load(sides[layout][name], cold))
            found["cpu"].append(usage.since(before))
    for side in (*sides[RESHARDED].values(), *sides[SAME].values()):
        side.close()
    return found


def _timed_load(side: Side, cold: bool) -> float:
    if cold:
        for path in side.path_of(FIRST_STEP).rglob("*"):
            if path.is_file():
                drop_from_cache(path)
    dist.barrier()
    started = time.perf_counter()
    side.load(FIRST_STEP)
    return time.perf_counter() - started


def _save(case: Case | Variants, run: Run, folder: Path) -> dict[str, Side]:
    """All sides, each with one checkpoint; beside them what is needed to see that it was loaded."""
    sides: dict[str, Side] = {}
    for name in case.sides:
        side = case.build(name, run, folder)
        is_there = side.path_of(FIRST_STEP) in (
            other.path_of(FIRST_STEP) for other in sides.values()
        )
        sides[name] = side
        if is_there:
            continue  # they share it
        side.save(FIRST_STEP)
        side.wait_for_staging()
        side.wait_for_saving()
    sums = run.sums()
    if dist.get_rank() == 0:
        (folder / SUMS).write_text(json.dumps(sums))
    dist.barrier()
    return sides


def require_loaded(run: Run, side: Side, folder: Path, what: str) -> None:
    run.clear()
    side.load(FIRST_STEP)
    saved, loaded = json.loads((folder / SUMS).read_text()), run.sums()
    if any(abs(a - b) > _TOLERANCE * abs(a) for a, b in zip(saved, loaded, strict=True)):
        raise RuntimeError(f"{what}: saved {saved}, loaded {loaded}: this would measure nothing")
