"""What every writer process is: it saves what its trainer has copied into shared memory, and dies with it.

    main: <program> <socket> <arena> <pid of the trainer> <follow its thread>   (writer_process.py starts it)
      -> main of the program -> run -> join the writers of the other ranks -> save, once for each request

How they join and how they save is the program's, one for each format of checkpoints.

Nothing that this process does may outlast its trainer, because a run that was killed may be going
on elsewhere from an older checkpoint. Three things see to it:

- The kernel kills it when the thread that started it ends (PR_SET_PDEATHSIG, set when that was the
  main thread). This is the strict one: SIGKILL is sent before anybody can see that the trainer is gone,
  and it stops the process at any point but inside a system call that has begun.
- The socket ends with the trainer; a thread waits for that. It covers a trainer whose other threads
  started the writer. (A fork of the trainer would hold the socket open; the first one covers that.)
- Immediately before a checkpoint is made complete by a rename, the program looks at the parent once
  more (``require_trainer``). What is left is the moment between that look and the rename. A commit there
  is one of a complete, durable checkpoint.
"""

import ctypes
import gc
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from torchtitan.components.checkpointer.pinned.arena import Arena
from torchtitan.components.checkpointer.pinned.meeting import Meeting
from torchtitan.components.checkpointer.pinned.messages import Reply, Request, Start
from torchtitan.tools import disk
from torchtitan.tools.errors import portable

_PR_SET_PDEATHSIG = 1

T = TypeVar("T")
Join = Callable[[Meeting], T]
"""Meet the writers of the other ranks; what it returns goes to each save."""
Save = Callable[[Request, Arena, T, int], None]
"""(request, arena, what joining gave, pid of the trainer): together with the writers of all ranks."""
IsAgreed = Callable[[BaseException], bool]
"""Whether an error of a save is one that all ranks have failed with, so that they are still in step."""


class TrainerGoneError(RuntimeError):
    """The trainer has ended, so nothing may be committed any more."""


def require_trainer(trainer_pid: int) -> None:
    """Check that the trainer still runs.

    Raises:
        TrainerGoneError: this process has another parent now.
    """
    if os.getppid() != trainer_pid:
        raise TrainerGoneError(f"the trainer, process {trainer_pid}, has ended")


def run(join: Join[T], save: Save[T], is_agreed: IsAgreed) -> None:
    """Be the writer process of a program: to be called by its ``main``, with no arguments of its own.

    The process ignores the signals that end a trainer in order.
    """
    socket_fd, arena_fd, trainer_pid, follows_thread = map(int, sys.argv[2:])
    if follows_thread:
        _die_with_trainer(trainer_pid)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    arena = Arena(arena_fd)

    def carry_out(request: Request, joined: T) -> None:
        save(request, arena, joined, trainer_pid)

    serve(Connection(socket_fd), join, carry_out, is_agreed)


def serve(
    connection: Connection, join: Join[T], save: Callable[[Request, T], None], is_agreed: IsAgreed
) -> None:
    """Carry out requests until the process is ended."""
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    listener = threading.Thread(target=_listen, args=(connection, requests), daemon=True)
    listener.start()
    start: Start = requests.get()
    with disk.using(start.disk):
        answer = _joined(start.meeting, join, save, is_agreed)
        gc.collect()
        gc.freeze()  # Else each collection below would look at all of torch.
        while True:
            reply = answer(requests.get())
            # Before the answer: the next request may need another mapping of the memory.
            gc.collect()
            connection.send(reply)


def _joined(
    meeting: Meeting, join: Join[T], save: Callable[[Request, T], None], is_agreed: IsAgreed
) -> Callable[[Request], Reply]:
    """How to answer a request, once this process has joined the others or failed to."""
    try:
        joined = join(meeting)
    except Exception as error:
        problem = Reply(failure=portable(error))
        return lambda request: problem

    def answer(request: Request) -> Reply:
        try:
            save(request, joined)
        except BaseException as error:  # an error that is agreed on may be no Exception, as DCP's
            agreed = is_agreed(error)
            if not agreed and not isinstance(error, Exception):
                raise
            return Reply(failure=portable(error), is_agreed=agreed)
        return Reply()

    return answer


def _listen(connection: Connection, requests: "queue.SimpleQueue[Any]") -> None:
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        # The trainer has closed the connection, or is gone. At once, wherever the main thread is:
        # a tidy end would wait for a save that nobody wants any more.
        os._exit(0)
    except Exception:
        # It cannot read what it is asked for, and without this thread nobody would ever hear of that.
        traceback.print_exc()
        os._exit(1)


def _die_with_trainer(trainer_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != trainer_pid:
        os._exit(0)  # it went before the kernel knew
