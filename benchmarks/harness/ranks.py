"""Start the ranks of a measurement as fresh processes, and leave nothing of them behind.

Each rank is a session of its own, so that Ctrl-C reaches whoever started it alone, and so that one signal
ends it with what its libraries spawned. Whatever left that session is found by a mark in its
environment. A rank dies with the process that started it.

    run -> Popen(rank.py) per rank <- Call; told*, returned | raised -> values by rank
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torchtitan.distributed.failure import is_echo

from benchmarks.harness.rank import Call

ROOT = Path(__file__).resolve().parents[2]
_MARK = "TORCHTITAN_BENCHMARK"
_LOG_TAIL_BYTES = 4_000
# A peer of a rank that failed feels it within a second, and then has the less interesting story.
_SETTLE_SECONDS = 3.0


class RanksFailedError(RuntimeError):
    """A rank did not return; the message is the story of the first that failed by itself."""


def run(
    world_size: int,
    call: Call,
    *,
    log_folder: Path,
    timeout_seconds: float,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Any]:
    """Carry out ``call`` on ``world_size`` ranks and return their values in order.

    ``tell`` gets what rank 0 says on the way. What the ranks print goes to files in ``log_folder``.

    Raises:
        RanksFailedError: a rank raised or died, or not all were done after ``timeout_seconds``.
    """
    mark, port = secrets.token_hex(8), _free_port()
    ranks: list[_Rank] = []
    try:
        for rank in range(world_size):
            ranks.append(_Rank(rank, world_size, port, mark, log_folder))
        for rank in ranks:
            rank.send(call)
        return _await_all(ranks, timeout_seconds, tell)
    finally:
        for rank in ranks:
            rank.end()
        _end_strays(mark)


class _Rank:
    """One rank as seen from outside."""

    def __init__(self, rank: int, world_size: int, port: int, mark: str, log_folder: Path) -> None:
        self.rank = rank
        self.reply: tuple[str, Any] | None = None
        self._log = log_folder / f"rank-{rank}.log"
        self.pipe, theirs = Pipe()
        environment = {**os.environ, _MARK: mark, "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        environment |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        command = [sys.executable, "-m", "benchmarks.harness.rank"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        theirs.close()

    def send(self, call: Call) -> None:
        try:
            self.pipe.send(call)
        except OSError:
            pass  # it died; its pipe tells so as well when it is read

    def receive(self, tell: Callable[[str], None]) -> None:
        """Take one message, or note that there is nobody to send one."""
        try:
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            # Not reaped here: until then nobody else gets its number, which is that of its session.
            end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            was_killed = end is not None and end.si_code != os.CLD_EXITED
            how = "was ended by signal" if was_killed else "ended with exit code"
            kind, value = "raised", f"it {how} {end.si_status if end else '?'} without a word"
        if kind != "told":
            self.reply = kind, value
        elif self.rank == 0:
            tell(value)

    def story(self, how: str) -> str:
        log = self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return f"rank {self.rank}: {how.strip()}" + (f"\nthe end of its log:\n{log}" if log else "")

    def show_stacks(self) -> None:
        """Let it write into its log where it is."""
        os.kill(self._process.pid, signal.SIGUSR1)

    def end(self) -> None:
        """End it and all that is in its session."""
        self.pipe.close()
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


def _await_all(
    ranks: list[_Rank], timeout_seconds: float, tell: Callable[[str], None]
) -> list[Any]:
    deadline, failed = time.monotonic() + timeout_seconds, list[_Rank]()
    while pending := [rank for rank in ranks if rank.reply is None]:
        by_pipe: dict[Connection, _Rank] = {rank.pipe: rank for rank in pending}
        ready = wait(list(by_pipe), max(0.0, deadline - time.monotonic()))
        for pipe in ready:
            rank = by_pipe[pipe]  # pyrefly: ignore[bad-index]  (wait returns what it was given)
            rank.receive(tell)
            if rank.reply is not None and rank.reply[0] == "raised":
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + _SETTLE_SECONDS)
        if not ready and time.monotonic() >= deadline:
            break
    if failed:
        # Who only lost its connection to a rank that died may have been heard before that one.
        stories = [(rank, rank.reply[1]) for rank in failed if rank.reply is not None]
        causes = [one for one in stories if not is_echo(RuntimeError(one[1]))]
        cause, how = (causes or stories)[0]
        raise RanksFailedError(cause.story(how))
    if late := [rank for rank in ranks if rank.reply is None]:
        for rank in late:
            rank.show_stacks()
        wait([late[0].pipe], 1.0)  # for the stacks to reach the log
        raise RanksFailedError(late[0].story(f"not done after {timeout_seconds:.0f} s"))
    return [rank.reply[1] for rank in ranks if rank.reply is not None]


def _end_strays(mark: str) -> None:
    """End what these ranks started in sessions of its own and did not end itself."""
    wanted = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue  # gone, or not ours


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
