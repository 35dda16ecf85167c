"""Tell the user and the trace how long a save took and how large it is.

Both are counted from the moment the save was due: a training that has to wait for the save before it
waits because of this one.

The future's callback and the thread that waits for the future race to be first; whoever is first
reports, so the line is printed once and never after the run's last line.
"""

import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from torchtitan.components.checkpointer.errors import cause_of
from torchtitan.components.checkpointer.storage import MovingStorage
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import logger

_SCALAR = "train.checkpoint_write.{backend}.execute.{mode}_total.latency_ms"


class SaveReport:
    """One save: what it cost the training thread, and when it was durable."""

    def __init__(
        self,
        step: int,
        path: str,
        storage: MovingStorage,
        *,
        background: bool,
        is_speaker: bool,
        due_at: float | None = None,
        backend: str = "native_dcp",
    ) -> None:
        """``due_at`` is that moment on ``time.monotonic``; None is now. ``backend`` is for the trace."""
        self.step = step
        self.path = path
        self._storage = storage
        self._backend = backend
        self._background = background
        self._is_speaker = is_speaker
        self._dispatched_at = time.monotonic()
        self._due_at = self._dispatched_at if due_at is None else due_at
        self._blocked_seconds = 0.0
        self._waiting_since: float | None = None
        self._lock = threading.Lock()
        self._reported = False
        self._durable_at: float | None = None
        self._listener: Callable[[int, float], None] | None = None

    def tell(self, listener: Callable[[int, float], None]) -> None:
        """Call ``listener`` with the step and the time, on ``time.monotonic``, once the save is durable."""
        with self._lock:
            if self._durable_at is None:
                self._listener = listener
                return
        listener(self.step, self._durable_at)

    def dispatched(self) -> None:
        """The folder is ready; the state goes to the backend now."""
        self._dispatched_at = time.monotonic()

    def follow(self, future: "Future[Any]") -> None:
        """Report when ``future`` is done, which may be at once."""
        future.add_done_callback(self.completed)

    def handed_over(self) -> None:
        """The training thread goes on from here."""
        self._blocked_seconds = time.monotonic() - self._due_at

    @contextmanager
    def training_waits(self) -> Generator[None]:
        """The training thread went on, but has to stop for the length of the block."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._blocked_seconds += time.monotonic() - self._waiting_since
                self._waiting_since = None

    def completed(self, future: "Future[Any]") -> None:
        """Report a background save; only the first call does anything."""
        with self._lock:
            if self._reported:
                return
            self._reported = True
            error = future.exception()
            if error is None:
                self._succeeded("async")
            else:
                if self._is_speaker:
                    sl.log_trace_scalar({"checkpoint/step": self.step, "checkpoint/failed": 1})
                logger.error(
                    f"The background save of step {self.step} to {self.path} failed: {cause_of(error)}. "
                    "What comes of it is said at one of the next steps (--checkpoint.on_save_failure)."
                )

    def completed_now(self) -> None:
        """Report a save that is over when it returns."""
        with self._lock:
            self._reported = True
            self._succeeded("sync")

    def _succeeded(self, mode: str) -> None:
        self._durable_at = now = time.monotonic()
        if self._listener is not None:
            self._listener(self.step, now)
        seconds, durable_seconds = now - self._dispatched_at, now - self._due_at
        sl.log_trace_scalar({_SCALAR.format(backend=self._backend, mode=mode): seconds * 1000.0})
        if not self._is_speaker:
            return
        size_bytes = self._size_bytes()
        size = "unknown size" if size_bytes is None else f"{size_bytes / 2**20:.1f} MiB"
        # What is waited for is done, but the training thread may not know it yet.
        since = self._waiting_since
        still = 0.0 if since is None else now - since
        blocked_seconds = self._blocked_seconds + still if self._background else durable_seconds
        waited = f", training waited {blocked_seconds:.2f} s" if self._background else ""
        logger.info(
            f"Saved checkpoint of step {self.step}: {size} in {seconds:.2f} s{waited} ({self.path})"
        )
        # The step of the save comes first and marks the others as its own: by now training is at
        # another step. All of them come from this thread, one after the other.
        scalars: dict[str, int | float] = {
            "checkpoint/step": self.step,
            "checkpoint/blocked(s)": blocked_seconds,
            "checkpoint/durable(s)": durable_seconds,
        }
        if size_bytes is not None:
            scalars["checkpoint/size(MiB)"] = size_bytes / 2**20
        sl.log_trace_scalar(scalars)

    def _size_bytes(self) -> int | None:
        try:
            return self._storage.size_bytes(self.path)
        except OSError:
            return None
