"""Keep two histories of one folder apart.

A run that was told to load an older step leaves a future behind: the checkpoints beyond that step.
Left in place they would be resumed from after the next crash, and would push the new ones out of
the retention window. They move into ``superseded/``, where nothing resumes from them and nothing
deletes them.
"""

from collections.abc import Mapping

from torchtitan.components.checkpointer.discovery import SUPERSEDED
from torchtitan.components.checkpointer.storage import MovingStorage
from torchtitan.tools import filesystem


def supersede(storage: MovingStorage, folder: str, path: str) -> str:
    """Move the checkpoint ``path`` of ``folder`` aside; returns where it is now."""
    name = path.rstrip("/").rpartition("/")[2]
    parent = filesystem.join(folder, SUPERSEDED)
    target, copies = filesystem.join(parent, name), 1
    while storage.isdir(target):
        copies += 1
        target = filesystem.join(parent, f"{name}.{copies}")
    storage.move(path, target)
    return target


def supersede_newer(
    storage: MovingStorage, folder: str, complete_steps: Mapping[int, str], *, than: int
) -> list[str]:
    """Move every complete step beyond ``than`` aside, newest first; returns where they are now.

    Newest first, so that a crash in between never leaves the abandoned future's newest
    checkpoint as the one to resume from with its predecessors gone.
    """
    newer = sorted((step for step in complete_steps if step > than), reverse=True)
    return [supersede(storage, folder, complete_steps[step]) for step in newer]
