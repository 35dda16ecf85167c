"""Note where all ranks wait for each other, so that it is known which of their operations may change places.

    meetings(disk) around real managers -> notes MEET in the log -> interleaving.py

Only what the ranks do by themselves is noted; two writer processes meet where nobody sees it.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager, ExitStack
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from tests.crash.operations import FROM_RANK_ZERO, MEET, TO_RANK_ZERO
from tests.crash.recording import RecordingDisk

DIRECTIONS = {
    "gather": TO_RANK_ZERO,
    "gather_object": TO_RANK_ZERO,
    "broadcast": FROM_RANK_ZERO,
    "broadcast_object_list": FROM_RANK_ZERO,
    "scatter_object_list": FROM_RANK_ZERO,
    "all_gather": "",
    "all_gather_object": "",
    "barrier": "",
}
"""What ranks wait in, and for whom."""


@contextmanager
def meetings(disk: RecordingDisk) -> Generator[None]:
    """Let the collectives of this rank be notes of its log as well, and change nothing else."""
    with ExitStack() as stack:
        for name, direction in DIRECTIONS.items():
            real = getattr(dist, name)
            stack.enter_context(patch.object(dist, name, _noted(real, direction, disk)))
        yield


def _noted(real: Callable[..., Any], direction: str, disk: RecordingDisk) -> Callable[..., Any]:
    def call(*args: Any, **keywords: Any) -> Any:
        group = keywords.get("group")
        # Only those of one group come in the same order on all ranks.
        name = b"" if group is None else group.group_name.encode()
        waits = direction != (FROM_RANK_ZERO if dist.get_rank() == 0 else TO_RANK_ZERO)
        if not waits:
            disk.note(MEET, direction, name)
        found = real(*args, **keywords)
        if waits:
            disk.note(MEET, direction, name)
        return found

    return call
