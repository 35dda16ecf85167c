"""Which processes there are, as the system tells it. Imports nothing, so that writer processes may, too."""

import os
import select
from pathlib import Path


def children(of: int | None = None) -> list[int]:
    """The processes that this one, or the process ``of``, has started and not yet seen end."""
    tasks = Path(f"/proc/{of or 'self'}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def await_end(pids: list[int]) -> None:
    """Wait until processes of which this one is not the parent are gone."""
    for pid in pids:
        try:
            watch = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([watch], [], [], 30)[0], f"process {pid} lives on"
        os.close(watch)
