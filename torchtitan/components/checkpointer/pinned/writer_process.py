"""One writer process, as the trainer sees it: start it, let it save, end it.

The process is started from this file alone, not forked and not spawned by multiprocessing: it runs no
user code, imports no main module, and inherits two descriptors (a socket and the arena).
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading

from torchtitan.components.checkpointer.pinned.arena import Arena
from torchtitan.components.checkpointer.pinned.meeting import Meeting, report_death
from torchtitan.components.checkpointer.pinned.messages import Reply, Request, Start
from torchtitan.components.checkpointer.waiting import FLAG, note_given_up
from torchtitan.tools import disk
from torchtitan.tools.logging import logger

# Deaf to signals before the seconds that importing torch takes: a scheduler signals every process of
# a job, and the trainer then wants to finish the save in flight.
_BOOTSTRAP = """
import importlib, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
importlib.import_module(sys.argv[1]).main()
"""
# For the kernel to take a killed process down; one that hangs in a call to a disk outlives SIGKILL.
_END_SECONDS = 10.0


class WriterDiedError(RuntimeError):
    """The writer process ended before it had answered."""


class WriterProcess:
    """Starts a process that writes what lies in ``arena``, together with those of the other ranks."""

    def __init__(self, arena: Arena, meeting: Meeting, *, program: str) -> None:
        """``program`` is the module whose ``main`` the process runs; see serving.py."""
        self.meeting = meeting
        self._timeout = meeting.timeout
        self._connection, theirs = multiprocessing.Pipe()
        # The kernel's own notice of death follows the thread that starts the process, not the trainer.
        follows_thread = threading.current_thread() is threading.main_thread()
        arguments = [program, theirs.fileno(), arena.fd, os.getpid(), int(follows_thread)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOTSTRAP, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), arena.fd),
                env=_environment(),
                # Ctrl-C goes to a whole process group: the trainer is to end in order, with the save
                # in flight, and so its writer must live on for a while.
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.pid = self._process.pid
        self._connection.send(Start(meeting=meeting, disk=disk.current()))
        self._is_out_of_step = False
        self._in_use = threading.Lock()

    def __str__(self) -> str:
        return f"the writer process {self.pid} of rank {self.meeting.rank}"

    @property
    def is_usable(self) -> bool:
        """Whether the process lives and is still in step with the writers of the other ranks."""
        return not self._is_out_of_step and self._process.poll() is None

    def save(self, request: Request) -> None:
        """Carry out ``request``; returns when the checkpoint is durable on all ranks.

        Raises what failed in the writer process, or ``WriterDiedError`` or ``TimeoutError``, after
        which the process is no longer usable.
        """
        with self._in_use:
            reply = self._ask(request)
        if reply.failure is not None:
            # After an error that they have not agreed on, the ranks stand at different places of
            # the protocol.
            self._is_out_of_step = not reply.is_agreed
            raise reply.failure

    def _ask(self, request: Request) -> Reply:
        try:
            self._connection.send(request)
            is_answered = self._connection.poll(self._timeout.total_seconds())
            reply = self._connection.recv() if is_answered else None
        except (EOFError, OSError) as error:
            was_ended = self._is_out_of_step  # by us
            self._is_out_of_step = True
            obituary = self._obituary()
            if not was_ended:
                report_death(self.meeting, obituary, request.attempt)
            raise WriterDiedError(obituary) from error
        if reply is None:
            how = "was ended" if self._kill() else "was killed, but the kernel still holds it"
            raise TimeoutError(
                f"the writer process did not finish within {self._timeout.total_seconds():.0f} s "
                f"({FLAG}) and {how}"
            )
        assert isinstance(reply, Reply)
        return reply

    def end(self) -> None:
        """End the process now; whoever waits for its answer gets a ``WriterDiedError``.

        Idle, it has nothing to finish. It may be starting up still, deaf to everything else. One that
        does not end in time, since a disk does not answer it, is left behind with a warning: what is
        left of it can finish the one call that it hangs in, and nothing after that.
        """
        is_gone = self._kill()
        is_free = self._in_use.acquire(timeout=self._end_seconds)  # whoever waits felt it by now
        if is_free:
            self._connection.close()
            self._in_use.release()
        if is_gone and is_free:
            return
        note_given_up()
        logger.warning(
            f"{self} was killed and has not ended within {self._end_seconds:g} s, so it is left "
            "behind. Look for a disk that does not answer."
        )

    def _kill(self) -> bool:
        """Whether the process has ended."""
        self._is_out_of_step = True
        self._process.kill()
        try:
            self._process.wait(self._end_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def _end_seconds(self) -> float:
        return min(_END_SECONDS, self._timeout.total_seconds())

    def _obituary(self) -> str:
        try:
            code = self._process.wait(self._end_seconds)
        except subprocess.TimeoutExpired:
            return f"{self} closed its connection without an answer"
        how = f"with exit code {code}; its own words are in the log"
        if code < 0:
            how = f"by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += ", as when the machine runs out of memory"
        return f"{self} was ended {how}. The next save starts new ones on all ranks"


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # It finds what this process finds, whatever was put into sys.path since the start.
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    # It only reads memory of the CPU: without a device it cannot take memory on one by mistake.
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["OMP_NUM_THREADS"] = "1"
    return environment
