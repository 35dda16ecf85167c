"""Tell a damaged checkpoint from a disk that does not answer: an older checkpoint helps against one alone.

Files whose bytes were not checked, because nothing is known about them, raise whatever the bytes
happen to spell when they are read. All of that is damage; what the system says about itself is not.

    resharder.py, reading.py: whatever was raised -> fault -> CheckpointDamagedError or CheckpointReadError
"""

import errno

from torchtitan.components.checkpointer.errors import CheckpointDamagedError, CheckpointReadError

_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# Damaged lengths and offsets lead to places in a file that there cannot be.
_WRONG_PLACE = (None, errno.EINVAL)


def fault(error: Exception, path: str) -> CheckpointReadError:
    """What reading the file or directory ``path`` of a checkpoint has failed with."""
    if isinstance(error, CheckpointReadError):
        return error
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError)
        and not isinstance(error, _MISSING)
        and error.errno not in _WRONG_PLACE
    ):
        return CheckpointReadError(
            f"Could not read {path}: {error!r}. That says nothing about the checkpoint; see to the machine "
            "and start again."
        )
    found = "is missing" if isinstance(error, _MISSING) else f"cannot be read: {error!r}"
    return CheckpointDamagedError(
        f"{path} {found}. Move the checkpoint away and start again to resume from the one before it."
    )
