"""What one rank does to see whether saves use up memory, descriptors or shared memory.

One side at a time, so that a reading tells of one of them.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import init_logger

from benchmarks.harness import usage
from benchmarks.harness.models import Run, SIZES
from benchmarks.saving.cases import CASES
from benchmarks.saving.cycle import Saver

_SETTLING_SAVES = 5


def measure(
    tell: Callable[[str], None], *, case: str, model: str, folder: str, num_saves: int
) -> dict[str, Any]:
    """For each side, readings of this rank after each of ``num_saves`` saves, some to settle before."""
    init_logger()
    entry, work = CASES[case], Path(folder)
    run = Run(SIZES[model], str(work))
    found: dict[str, Any] = {"readings": {}}
    for name in entry.sides:
        saver = Saver(entry.build(name, run, work), run)
        saver.side.prepare()
        readings = found["readings"][name] = []
        for number in range(_SETTLING_SAVES + num_saves):
            saver.idle()
            gc.collect()
            dist.barrier()
            if number >= _SETTLING_SAVES:
                now = usage.read()
                readings.append(
                    {
                        "memory": now.total_bytes,
                        "shared": now.shared_bytes,
                        "descriptors": now.descriptors,
                    }
                )
            if (number + 1) % 10 == 0:
                tell(f"{name}, save {number + 1} of {_SETTLING_SAVES + num_saves}")
        saver.side.close()
    return found
