"""The writer process: saves what its trainer has copied into shared memory, and dies with it.

    main: <socket> <arena> <pid of the trainer> <follow its thread>      (writer_process.py starts it)

Nothing that this process does may outlast its trainer, because a run that was killed may be going
on elsewhere from an older checkpoint. Three things see to it:

- The kernel kills it when the thread that started it ends (PR_SET_PDEATHSIG, set when that was the
  main thread). This is the strict one: SIGKILL is sent before anybody can see that the trainer is gone,
  and it stops the process at any point but inside a system call that has begun.
- The socket ends with the trainer; a thread waits for that. It covers a trainer whose other threads
  started the writer. (A fork of the trainer would hold the socket open; the first one covers that.)
- Immediately before .metadata gets its name, the parent is looked at once more. What is left is the
  moment between that look and the rename. A commit there is one of a complete, durable checkpoint.
"""

import ctypes
import gc
import os
import pickle
import queue
import signal
import sys
import threading
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, StorageMeta

from torchtitan.components.checkpointer.dcp_writer import DurableFileSystemWriter
from torchtitan.components.checkpointer.pinned.arena import Arena
from torchtitan.components.checkpointer.pinned.meeting import join
from torchtitan.components.checkpointer.pinned.messages import Reply, Request
from torchtitan.components.checkpointer.pinned.snapshot import restore
from torchtitan.tools.errors import portable

_PR_SET_PDEATHSIG = 1


class TrainerGoneError(RuntimeError):
    """The trainer has ended, so nothing may be committed any more."""


class Refusal(DefaultSavePlanner):
    """Fails where DCP gathers the errors of all ranks, so that one rank's failure is everybody's."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        raise self._error


def require_trainer(trainer_pid: int) -> None:
    """Check that the trainer still runs.

    Raises:
        TrainerGoneError: this process has another parent now.
    """
    if os.getppid() != trainer_pid:
        raise TrainerGoneError(f"the trainer, process {trainer_pid}, has ended")


def save(request: Request, arena: Arena, trainer_pid: int) -> None:
    """Carry out ``request``; a collective over the writer processes of all ranks."""
    planner = DefaultSavePlanner()
    state: dict[str, Any] = {}
    writer = DurableFileSystemWriter(request.path)
    try:
        if request.failure is not None:
            raise request.failure
        arena.attach(request.mapped_bytes)
        state = restore(arena.read(request.payload_offset, request.payload_bytes), arena)
        writer = pickle.loads(request.writer)
        # The copies are in CPU memory already; writing needs no second look-ahead buffer.
        writer.per_thread_copy_ahead = 0
        writer.commit_only_if(lambda: require_trainer(trainer_pid))
    except Exception as error:
        planner = Refusal(error)
    dcp.save(state, storage_writer=writer, checkpoint_id=request.path, planner=planner)


def serve(connection: Connection, arena: Arena, trainer_pid: int) -> None:
    """Carry out requests until the process is ended."""
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    listener = threading.Thread(target=_listen, args=(connection, requests), daemon=True)
    listener.start()
    problem: BaseException | None = None
    try:
        join(requests.get())
    except Exception as error:
        problem = portable(error)  # the answer to whatever is asked
    gc.collect()
    gc.freeze()  # Else each collection below would look at all of torch.
    while True:
        request = requests.get()
        reply = Reply(failure=problem)
        try:
            if problem is None:
                save(request, arena, trainer_pid)
        except (Exception, dcp.CheckpointException) as error:  # DCP's own error is no Exception
            reply = Reply(failure=portable(error))
        # Before the answer: the next request may need another mapping of the memory.
        gc.collect()
        connection.send(reply)


def _listen(connection: Connection, requests: "queue.SimpleQueue[Any]") -> None:
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        # The trainer has closed the connection, or is gone. At once, wherever the main thread is:
        # a tidy end would wait for a save that nobody wants any more.
        os._exit(0)


def _die_with_trainer(trainer_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != trainer_pid:
        os._exit(0)  # it went before the kernel knew


def main() -> None:
    """Entry point of the process, which ignores the signals that end a trainer in order."""
    socket_fd, arena_fd, trainer_pid, follows_thread = map(int, sys.argv[1:])
    if follows_thread:
        _die_with_trainer(trainer_pid)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    serve(Connection(socket_fd), Arena(arena_fd), trainer_pid)
