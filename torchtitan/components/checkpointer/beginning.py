"""A save that a thread begins, so that training waits neither for the other ranks nor for the folder.

What the ranks tell each other and what rank 0 does to the folder takes as long as the network and the disk
want it to. The thread has the manager to itself until it is joined: before the parameters change, and before
anything else that has to do with a save.

    saving._save -> Beginning -> [thread: settle, make ready, write] -> saving._join: as if training had done it
"""

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Any

from torchtitan.components.checkpointer.waiting import note_given_up, WaitExpiredError


class NotBegunError(Exception):
    """The save was given up with a warning, on all ranks."""


class Beginning:
    """One save, until it is known whether it has begun."""

    def __init__(self, begin: Callable[[], "Future[Any] | None"]) -> None:
        """``begin`` returns what ends with the save, or None for one that is over.

        It raises NotBegunError where the run goes on without the save, and else what the run ends with.
        """
        self.durable: Future[Any] = Future()
        """Stands for the save as long as nobody has joined the thread."""
        self.is_writing = False
        """The save itself is made by the thread, which takes as long as it does."""
        self._begin = begin
        self._over: Future[Future[Any] | None] = Future()
        self._over.add_done_callback(self._pass_on)
        self._runs = threading.Lock()
        self._is_submitted = False

    def start(self, executor: Executor) -> None:
        """Let a thread begin. Whoever may have to join has to know of this object by now."""
        # What is logged there bears the step of the save.
        executor.submit(contextvars.copy_context().run, self._run)
        self._is_submitted = True

    @property
    def is_over(self) -> bool:
        """Whether the thread is through, so that nobody has to wait for it."""
        return self._over.done()

    def join(self, seconds: float) -> None:
        """Wait for the thread. Raises WaitExpiredError if it is not through after ``seconds``."""
        # Ctrl-C, or a signal to stop, may have come in the middle of ``start``.
        if not self._is_submitted and self._runs.acquire(blocking=False):
            self._over.set_exception(NotBegunError("the run was stopped"))
        while not wait([self._over], timeout=seconds).done:
            if not self.is_writing:
                note_given_up()
                raise WaitExpiredError(f"not begun after {seconds:g} s")

    def result(self) -> "Future[Any] | None":
        """What ``begin`` has returned, or raised."""
        return self._over.result()

    def _run(self) -> None:
        if not self._runs.acquire(blocking=False):
            return  # nobody would know of it
        try:
            in_flight = self._begin()
        except Exception as error:
            self._over.set_exception(error)
        else:
            self._over.set_result(in_flight)
        finally:
            del self._begin  # which keeps the state of the save alive
            if not self._over.done():
                self._over.set_exception(RuntimeError("the thread that begins saves was ended"))

    def _pass_on(self, over: "Future[Future[Any] | None]") -> None:
        if (error := over.exception()) is not None:
            self.durable.set_exception(error)
        elif (in_flight := over.result()) is None:
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
