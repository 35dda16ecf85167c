"""What the training thread waits for when it saves."""

import enum


class AsyncMode(str, enum.Enum):
    """What the training thread waits for when it saves."""

    DISABLED = "disabled"
    """The whole write."""

    ASYNC = "async"
    """A copy of the state into CPU memory; a thread writes it."""

    ASYNC_WITH_PINNED_MEM = "async_with_pinned_mem"
    """The start of a copy into shared memory (pinned where there is a GPU); a process writes it."""


class SaveDone:
    """Sent by a writer process that has finished."""
