"""Make items in worker processes, in one fixed order.

Worker ``w`` of ``n`` makes the items ``w``, ``w + n``, ``w + 2n``, ... and the parent takes them in
turn, so the order is that of one process whatever ``n`` is. The one fact to know: workers come from
a fork server, which has neither the threads nor the devices of the training; forking the training
itself could hang. What they are given is therefore pickled.

    make(w, n) in worker w -> pipe -> Stripes.__next__ (round robin) -> loader
                                       ends with the first stripe that ends
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from torchtitan.tools.errors import portable

Item = TypeVar("Item")
MakeStripe = Callable[[int, int], Iterator[Item]]
"""Makes the items of one stripe, given its number and how many stripes there are."""

_ITEM, _END, _ERROR = "item", "end", "error"
# A worker notices the end when it has made the item in hand. It is not ended by a signal at once,
# because that would leave behind what libraries made for it in the system.
_END_SECONDS = 3.0


class Stripes(Generic[Item]):
    """The items of all stripes in order, made here (0 workers) or in ``num_workers`` processes."""

    def __init__(self, make: MakeStripe[Item], num_workers: int) -> None:
        """Raises ValueError when ``make`` cannot be given to another process."""
        self._local = make(0, 1) if num_workers == 0 else None
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._next = 0
        self._closed = False
        if num_workers > 0:
            self._start(make, num_workers)

    def _start(self, make: MakeStripe[Item], num_workers: int) -> None:
        payload = pickled(make)
        context = multiprocessing.get_context("forkserver")
        # The server imports what all workers need, once; it has no effect where one runs already.
        context.set_forkserver_preload(["torchtitan.components.data"])
        for stripe in range(num_workers):
            ours, theirs = context.Pipe(duplex=True)
            process = context.Process(
                target=_work,
                args=(payload, stripe, num_workers, theirs),
                name=f"data-worker-{stripe}",
                daemon=True,
            )
            process.start()
            # Only the worker holds that end: its death then ends our wait.
            theirs.close()
            self._workers.append((process, ours))

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._local is not None:
            return next(self._local)
        if self._closed:
            raise StopIteration
        number = self._next % len(self._workers)
        process, pipe = self._workers[number]
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError) as error:
            if self._closed:
                raise RuntimeError("the data workers were ended while a batch was due.") from error
            process.join(_END_SECONDS)
            raise RuntimeError(
                f"data worker {number} died with exit code {process.exitcode}; a negative one is the "
                "signal that killed it, 9 often for want of memory. Lower --dataloader.num_workers, "
                "or set it to 0 to see the error in this process."
            ) from error
        if kind == _END:
            raise StopIteration
        if kind == _ERROR:
            raise value
        self._next += 1
        return value

    def close(self) -> None:
        """End all workers. May be called from another thread than the one that waits for an item."""
        self._closed = True
        for _, pipe in self._workers:
            _hang_up(pipe)
        deadline = time.monotonic() + _END_SECONDS
        for process, _ in self._workers:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _hang_up(pipe: Connection) -> None:
    """End whatever waits at either end of ``pipe``, which closing it would not."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        # A pipe whose other end is gone needs no word more.
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def pickled(make: Callable[..., Any]) -> bytes:
    """``make`` for another process. Raises ValueError when it cannot be given to one."""
    try:
        return pickle.dumps(make)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"--dataloader.num_workers: the data cannot be given to worker processes ({error}). Use "
            "functions with names, defined in a module, as filters, text_fn and messages_fn, or set "
            "it to 0."
        ) from error


def _work(payload: bytes, stripe: int, num_stripes: int, pipe: Connection) -> None:
    # Ctrl-C goes to every process of the terminal; the trainer decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Several workers share the cores; each works on one.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        try:
            for item in pickle.loads(payload)(stripe, num_stripes):
                pipe.send((_ITEM, item))
            pipe.send((_END, None))
        except (BrokenPipeError, ConnectionResetError):
            raise
        # Whatever it is has to reach the trainer, which knows what to do.
        except Exception as error:
            pipe.send((_ERROR, portable(error)))
        # Ended by the parent, or by its death: what was sent must be read first.
        pipe.recv()
    except (EOFError, OSError):
        pass
