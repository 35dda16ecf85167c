"""The one place that reaches into torch: which process ``dcp.async_save`` hands its saves to.

torch keeps the writer process of ``AsyncCheckpointerType.PROCESS`` in a module global. It is made once
and never again, outlives whoever made it, and goes on to commit when the trainer was killed. So an
object of ours stands there instead. Relied upon, and pinned by a test:

- ``_async_process_executor._CHECKPOINT_PROCESS`` is looked up at each save, and used if it is not None;
- its ``save(staged_state_dict=..., storage_writer=..., ...)`` is called in a thread of its own, with the
  result of the future that the stager returned.
"""

import threading
from typing import Any, Protocol, runtime_checkable

from torch.distributed.checkpoint import _async_process_executor as torch_executor


@runtime_checkable
class Deliverable(Protocol):
    """A staged state dict that knows the process which writes it."""

    def deliver(self, job: Any, path: str) -> None:
        """Let the process write to ``path`` by ``job``; block until that is durable, raise what failed."""
        ...


class _Router:
    """Stands where torch expects a writer process; several managers may be open at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._previous: Any = None

    def open(self) -> None:
        with self._lock:
            if self._num_users == 0:
                self._previous = torch_executor._CHECKPOINT_PROCESS
                torch_executor._CHECKPOINT_PROCESS = (
                    self  # pyrefly: ignore[bad-assignment]  (by duck)
                )
            self._num_users += 1

    def close(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                torch_executor._CHECKPOINT_PROCESS = self._previous
                self._previous = None

    def save(self, staged_state_dict: Any, *, storage_writer: Any = None, **others: Any) -> Any:
        if isinstance(staged_state_dict, Deliverable):
            return staged_state_dict.deliver(storage_writer, str(storage_writer.path))
        if self._previous is None:
            raise RuntimeError(
                "torch was asked to save in a process of its own while a run saves with "
                "--checkpoint.async_mode async_with_pinned_mem; close that run first."
            )
        return self._previous.save(staged_state_dict, storage_writer=storage_writer, **others)


_router = _Router()
open_route, close_route = _router.open, _router.close
