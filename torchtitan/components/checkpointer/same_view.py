"""Wait until every machine sees the checkpoint that rank 0 has chosen to load.

A network file system shows a change on one machine at once, and on others when what they remember
of a directory has become too old. A rank that did not wait would take that for damage, and all of them
would go back to an older checkpoint. One rank of each machine looks, since those of a machine see the same.

    starting._verification: rank 0 looks and measures -> broadcast -> wait_for_same_view -> the read
"""

import os
import socket
import time
from collections.abc import Callable
from itertools import islice

import torch.distributed as dist

from torchtitan.components.checkpointer.agreement import gather
from torchtitan.components.checkpointer.errors import CheckpointReadError
from torchtitan.components.checkpointer.integrity.manifest import Manifest, MANIFEST
from torchtitan.components.checkpointer.storage import MovingStorage

LONGEST_WAIT_SECONDS = 60.0
"""What is remembered of a directory is older than that nowhere by default: NFS asks again after 60 s."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 2.0
_MOST_NAMED = 3


def unseen(
    storage: MovingStorage,
    path: str,
    manifest: Manifest | None,
    is_complete: Callable[[str], bool],
) -> str:
    """What of the checkpoint ``path`` is not seen here as its ``manifest`` says; empty when all is."""
    if manifest is None or not manifest.files:
        return "" if is_complete(path) else f"{path}: no index"
    # Its listings are what makes a network file system ask for the directory again.
    found = storage.file_sizes(path, [MANIFEST, *manifest.files])
    sizes = {name: digest.size_bytes for name, digest in manifest.files.items()}
    off = [f"{MANIFEST} is missing"] if MANIFEST not in found else []
    off += [
        f"{name}: {size} bytes expected, {found.get(name, 'nothing')} found"
        for name, size in sorted(sizes.items())
        if found.get(name) != size
    ]
    more = f"; and {len(off) - _MOST_NAMED} more" if len(off) > _MOST_NAMED else ""
    return f"{path}: {'; '.join(islice(off, _MOST_NAMED))}{more}" if off else ""


def wait_for_same_view(
    look: Callable[[], str], *, limit_seconds: float, group: "dist.ProcessGroup | None"
) -> None:
    """Wait until ``look`` finds nothing that is not seen, on every machine but that of rank 0. Collective.

    Args:
        limit_seconds: what the collectives of ``group`` have; at most half of it is waited for.

    Raises:
        CheckpointReadError: a machine does not see all within the limit. All ranks raise.
    """
    limit_seconds = min(limit_seconds / 2, LONGEST_WAIT_SECONDS)
    is_asked = dist.is_initialized() and dist.get_rank() != 0 and _speaks_for_its_machine()
    problem = _wait(look, limit_seconds) if is_asked else ""
    host = socket.gethostname() if problem else ""
    # Without it the others would begin to read, and wait for a rank that has given up.
    found = gather((problem, host), group)
    offenders = [
        f"rank {rank} on host {host} does not see {problem}"
        for rank, (problem, host) in enumerate(found)
        if problem
    ]
    if offenders:
        raise CheckpointReadError(
            f"After {limit_seconds:g} s not all machines see the checkpoint that rank 0 sees: "
            f"{'. '.join(offenders)}. Is the folder on a file system that all of them share? If it is one "
            "that is slow to show changes, start again."
        )


def _speaks_for_its_machine() -> bool:
    # Of ranks that torchrun did not start nothing is known, so all of them look.
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _wait(look: Callable[[], str], limit_seconds: float) -> str:
    """What is still not seen in the end."""
    deadline, pause = time.monotonic() + limit_seconds, _FIRST_PAUSE_SECONDS
    while True:
        try:
            problem = look()
        except OSError as error:
            problem = f"it at all: {error}"
        left = deadline - time.monotonic()
        if not problem or left <= 0:
            return problem
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
