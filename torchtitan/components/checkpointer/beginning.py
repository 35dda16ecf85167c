"""A save that a thread begins, so that training waits neither for the other ranks nor for the folder.

What the ranks tell each other and what rank 0 does to the folder takes as long as the network and the disk
want it to. The thread has the manager to itself until it is joined: before the parameters change, and before
anything else that has to do with a save.

    saving._save -> Beginning -> [thread: settle, make ready, write] -> saving._join: as if training had done it
"""

import contextvars
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Any

from torchtitan.components.checkpointer.waiting import note_given_up, WaitExpiredError


class NotBegunError(Exception):
    """The save was given up with a warning, on all ranks."""


class Beginning:
    """One save, until it is known whether it has begun."""

    def __init__(self, begin: Callable[[], "Future[Any] | None"], executor: Executor) -> None:
        """Let a thread call ``begin``, which returns what ends with the save, or None for one that is over.

        It raises NotBegunError where the run goes on without the save, and else what it ends with.
        """
        self.durable: Future[Any] = Future()
        """Stands for the save as long as nobody has joined the thread."""
        # What is logged there bears the step of the save.
        self._thread = executor.submit(contextvars.copy_context().run, begin)
        self._thread.add_done_callback(self._pass_on)

    @property
    def is_over(self) -> bool:
        """Whether the thread is through, so that nobody has to wait for it."""
        return self._thread.done()

    def join(self, seconds: float) -> None:
        """Wait for the thread. Raises WaitExpiredError if it is not through after ``seconds``."""
        if not wait([self._thread], timeout=seconds).done:
            note_given_up()
            raise WaitExpiredError(f"not begun after {seconds:g} s")

    def result(self) -> "Future[Any] | None":
        """What ``begin`` has returned, or raised."""
        return self._thread.result()

    def _pass_on(self, thread: "Future[Future[Any] | None]") -> None:
        if (error := thread.exception()) is not None:
            self.durable.set_exception(error)
        elif (in_flight := thread.result()) is None:
            self.durable.set_result(None)
        else:
            in_flight.add_done_callback(self._end)

    def _end(self, in_flight: "Future[Any]") -> None:
        if in_flight.cancelled():
            self.durable.cancel()
        elif (error := in_flight.exception()) is not None:
            self.durable.set_exception(error)
        else:
            self.durable.set_result(in_flight.result())
