"""Tell a damaged checkpoint from a disk that does not answer: an older checkpoint helps against one alone.

Files whose bytes were not checked, because nothing is known about them, raise whatever the bytes
happen to spell when they are read. All of that is damage; what the system says about itself is not.
Nor is what happens to bytes that have passed their digest, unless they ask for code.

    resharder.py, reading.py: whatever was raised -> fault -> CheckpointDamagedError or CheckpointReadError
"""

from typing import Any

from torchtitan.components.checkpointer.errors import CheckpointDamagedError, CheckpointReadError
from torchtitan.components.checkpointer.screening import (
    fault_of_good_bytes,
    is_of_the_machine,
    NOT_THERE,
)


def checks_all(storage: Any) -> bool:
    """Whether ``storage`` hands out no byte that has not passed its digest."""
    verification = getattr(storage, "verification", None)
    return verification is not None and verification.is_full


def fault(error: Exception, path: str, storage: Any = None) -> CheckpointReadError:
    """What reading the file or directory ``path`` of a checkpoint has failed with.

    Args:
        storage: what it was read through.
    """
    if isinstance(error, CheckpointReadError):
        return error
    if is_of_the_machine(error):
        return CheckpointReadError(
            f"Could not read {path}: {error!r}. That says nothing about the checkpoint; see to the machine "
            "and start again."
        )
    if checks_all(storage) and not isinstance(error, NOT_THERE):
        return fault_of_good_bytes(error, path)
    found = "is missing" if isinstance(error, NOT_THERE) else f"cannot be read: {error!r}"
    return CheckpointDamagedError(
        f"{path} {found}. Move the checkpoint away and start again to resume from the one before it."
    )
