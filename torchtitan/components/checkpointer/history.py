"""Keep two histories of one folder apart, and one step from being lost while it is saved again.

A run that was told to load an older step leaves a future behind: the checkpoints beyond that step.
Left in place they would be resumed from after the next crash, and would push the new ones out of
the retention window. They move into ``superseded/``, where nothing resumes from them and nothing
deletes them. On a storage that cannot rename at once, a record says which of them do not count.

A step of the own history that is saved again waits in ``replaced/`` until the new one is complete:

    step-7 -> replaced/step-7      it is the checkpoint of step 7 until
    step-7 is complete again       now the one in replaced/ is deleted, before the next save at the latest
    the save failed                the one in replaced/ is moved back before the next save of another step
    or is found damaged            so it is then, and the damaged one moves into superseded/
"""

import json
from collections.abc import Mapping

from torchtitan.components.checkpointer.errors import CheckpointReadError
from torchtitan.components.checkpointer.integrity.manifest import MANIFEST
from torchtitan.components.checkpointer.storage import MovingStorage
from torchtitan.tools import filesystem

SUPERSEDED = "superseded"
"""Folder inside the checkpoint folder for what another history left behind."""

SUPERSEDED_RECORD = "superseded.json"
"""Which checkpoints of the folder itself do not count, as if they were in ``superseded/``."""

REPLACED = "replaced"
"""Folder inside the checkpoint folder for what is being saved again."""

_KEY = "superseded"


def renames(storage: MovingStorage, folder: str) -> bool:
    """Whether a directory of ``folder`` is moved at once, whatever its size.

    A storage that knows says so with an attribute ``renames``; for the others the path tells.
    """
    return getattr(storage, "renames", not filesystem.is_remote(folder))


def supersede(storage: MovingStorage, folder: str, path: str) -> str:
    """Move ``path`` of ``folder``, or what lies in the place of a checkpoint, aside; where it is now."""
    name = _name_of(path)
    parent = _room(storage, folder, SUPERSEDED)
    target, copies = filesystem.join(parent, name), 1
    while storage.isdir(target) or storage.isfile(target):
        copies += 1
        target = filesystem.join(parent, f"{name}.{copies}")
    storage.move(path, target)
    return target


def supersede_newer(
    storage: MovingStorage, folder: str, complete_steps: Mapping[int, str], *, than: int
) -> list[str]:
    """Move every complete step beyond ``than`` aside, newest first; returns where they are now.

    Newest first, so that a crash in between never leaves the abandoned future's newest
    checkpoint as the one to resume from with its predecessors gone. Where that takes a copy they
    stay in place, and a record says that they do not count.
    """
    newer = sorted((step for step in complete_steps if step > than), reverse=True)
    paths = [complete_steps[step] for step in newer]
    in_place = [] if renames(storage, folder) else [it for it in paths if _is_in(folder, it)]
    if in_place:
        names = {_name_of(path) for path in in_place}
        record(storage, folder, superseded_names(storage, folder) | names)
    # The record knows names in the folder itself, and not those in replaced/.
    return [path if path in in_place else supersede(storage, folder, path) for path in paths]


def superseded_names(storage: MovingStorage, folder: str) -> frozenset[str]:
    """The directories directly in ``folder`` that its record tells to pass over.

    Raises:
        CheckpointReadError: there is a record, and it is none.
    """
    path = filesystem.join(folder, SUPERSEDED_RECORD)
    if not storage.isfile(path):
        return frozenset()
    try:
        names = json.loads(storage.read_bytes(path))[_KEY]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"{names!r} is no list of names")
    except (ValueError, TypeError, KeyError) as error:
        # To guess would be to mix two histories.
        raise CheckpointReadError(
            f"{path} cannot be read: {error!r}. It says which checkpoints of the folder belong to a "
            f'history that was left. Write it anew, such as {{"{_KEY}": ["step-30"]}}, or delete it '
            "if all of them are to count."
        ) from error
    return frozenset(names)


def record(storage: MovingStorage, folder: str, names: frozenset[str]) -> None:
    """Make these directories of ``folder`` count no more, and all others again."""
    text = json.dumps({_KEY: sorted(names)}, indent=2) + "\n"
    storage.write_bytes(filesystem.join(folder, SUPERSEDED_RECORD), text.encode())


def free_name(storage: MovingStorage, folder: str, path: str) -> list[str]:
    """Let ``path`` be saved to although the record knows it; where what is there has been moved to."""
    left = superseded_names(storage, folder)
    if _name_of(path) not in left:
        return []
    moved = [supersede(storage, folder, path)] if storage.isdir(path) else []
    # After the move: until then it must not count, and afterwards the new one has to.
    record(storage, folder, left - {_name_of(path)})
    return moved


def is_replacing(storage: MovingStorage, path: str) -> bool:
    """Whether the checkpoint ``path``, which has its marker, ends the wait of the one in ``replaced/``."""
    # The manifest comes after the marker, and each save of a step has one. A back end that wrote none would
    # never end the wait.
    return storage.isfile(f"{path}/{MANIFEST}")


def put_aside(storage: MovingStorage, folder: str, path: str) -> str:
    """Move ``path``, whose step is to be saved again, into ``replaced/``; returns where it is now."""
    target = filesystem.join(_room(storage, folder, REPLACED), _name_of(path))
    if storage.isdir(target):
        # What should have been deleted there; nothing is ever moved onto something.
        try:
            supersede(storage, folder, target)
        except OSError:
            return supersede(storage, folder, path)
    storage.move(path, target)
    return target


def _is_in(folder: str, path: str) -> bool:
    return path == filesystem.join(folder, _name_of(path))


def _room(storage: MovingStorage, folder: str, name: str) -> str:
    """The path of ``name`` in ``folder``, if checkpoints can be moved into it."""
    path = filesystem.join(folder, name)
    if storage.isfile(path):
        raise CheckpointReadError(
            f"{path} is a file, and checkpoints are put aside into a folder of this name. Move the file "
            "away and start again."
        )
    return path


def _name_of(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
