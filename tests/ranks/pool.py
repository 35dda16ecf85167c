"""Run a function on real ranks, and get every rank's answer or every rank's story.

Each rank is a fresh process forked from a server that has torch loaded already, so a case costs
tenths of a second. (A plain fork of the test process hangs once that process has run autograd;
spawn pays the import of torch every time.) The server lives until the test process ends; the
ranks of one call never outlive the call.

    run_on_ranks -> forkserver -> _rank_main (one process per rank) -> fn(*args, **kwargs)
         ^                              |
         +---- pipe: value or traceback +---- files: log, stacks of a crash or of a hang
"""

import faulthandler
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Only modules that start no threads may be loaded before a fork.
PRELOADED = [
    "torch",
    "torch._dynamo",  # the first use of FSDP imports it, for 2 s of CPU in every rank
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
]
# A rank whose peer failed learns of it within milliseconds through gloo; a loaded machine needs more.
SETTLE_SECONDS = 5.0
LOG_TAIL_BYTES = 20_000
_NO_MESSAGE: tuple[str, Any] = ("died", None)


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    how: str
    """returned, raised, died (without a word) or hung (killed by the pool)."""
    value: Any = None
    detail: str = ""
    """The traceback of ``raised``; the stacks of all threads for ``hung`` and for a crash."""
    exit_code: int | None = None
    log: str = ""
    """What the rank wrote to stdout and stderr, its end if it is long."""
    seconds: float = 0.0
    """From the start of the ranks to the end of this one's process."""


class RanksFailed(RuntimeError):
    """At least one rank did not return; the message tells of each of them."""

    def __init__(self, reason: str, ends: list[RankEnd]) -> None:
        super().__init__(reason, ends)
        self.reason = reason
        self.ends = ends

    def __str__(self) -> str:
        stories = [f"--- rank {end.rank}: {_headline(end)}{_body(end)}" for end in self.ends]
        return "\n".join([self.reason, *stories])


def run_on_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 60.0,
    init: bool = True,
    settle_seconds: float = SETTLE_SECONDS,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` in ``world_size`` processes and return their values by rank.

    ``fn`` is a module-level function; arguments and return values must pickle. Each process has
    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (a free one) set, and the
    environment of the caller otherwise. With ``init`` a gloo group stands around the call.

    Raises RanksFailed with every rank's traceback when one raises or dies (the others get
    ``settle_seconds`` to end by themselves), and with every rank's stacks after ``timeout_seconds``.
    """
    ends = end_of_ranks(
        world_size,
        fn,
        *args,
        timeout_seconds=timeout_seconds,
        init=init,
        settle_seconds=settle_seconds,
        **kwargs,
    )
    for end in ends:
        for line in end.log.splitlines():
            print(f"[rank {end.rank}] {line}")
    if any(end.how != "returned" for end in ends):
        failed = ", ".join(f"rank {end.rank} {end.how}" for end in ends if end.how != "returned")
        raise RanksFailed(f"{fn.__qualname__} on {world_size} ranks: {failed}", ends)
    return [end.value for end in ends]


def end_of_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 60.0,
    init: bool = True,
    settle_seconds: float = SETTLE_SECONDS,
    **kwargs: Any,
) -> list[RankEnd]:
    """Like ``run_on_ranks``, for tests in which ranks are meant to fail: says how each one ended."""
    call = pickle.dumps((fn, args, kwargs))
    context = _forkserver()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = [_Rank(context, rank, Path(folder)) for rank in range(world_size)]
        port = _free_port()
        try:
            for rank in ranks:
                rank.start(world_size, port, call, timeout_seconds if init else None)
            _await_all(ranks, timeout_seconds, settle_seconds)
        finally:
            for rank in ranks:
                rank.reap()
        return [rank.end() for rank in ranks]


class _Rank:
    """One rank as the caller sees it: its process, its pipe and its files."""

    def __init__(self, context: Any, rank: int, folder: Path) -> None:
        self.rank = rank
        self.log_path = folder / f"log_{rank}"
        self.stacks_path = folder / f"stacks_{rank}"
        self.message: tuple[str, Any] = _NO_MESSAGE
        self.hung = False
        self._context = context
        self._process: BaseProcess | None = None
        self._receiver: Connection | None = None
        self._exit_code: int | None = None
        self._started_at = self._ended_at = 0.0

    def start(
        self, world_size: int, port: int, call: bytes, group_timeout_seconds: float | None
    ) -> None:
        self._receiver, sender = self._context.Pipe(duplex=False)
        environment = dict(os.environ)
        environment.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(self.rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
        )
        paths = (str(self.log_path), str(self.stacks_path))
        self._process = self._context.Process(
            target=_rank_main,
            args=(sender, environment, paths, call, group_timeout_seconds),
            name=f"rank-{self.rank}",
            daemon=True,
        )
        self._started_at = time.monotonic()
        self._process.start()
        sender.close()

    def waitables(self) -> list[Any]:
        if self._process is None or self.ended:
            return []
        return [self._process.sentinel, *([self._receiver] if self._receiver else [])]

    @property
    def ended(self) -> bool:
        return self._process is None or self._exit_code is not None

    @property
    def failed(self) -> bool:
        return self.ended and (
            self.message is _NO_MESSAGE or self.message[0] == "raised" or self._exit_code != 0
        )

    def poll(self) -> None:
        """Take the message if it is there, then the exit code if the process is gone."""
        if self._process is None or self.ended:
            return
        exit_code = self._process.exitcode
        if self._receiver is not None and self._receiver.poll():
            try:
                self.message = pickle.loads(self._receiver.recv_bytes())
            except (EOFError, OSError):
                pass
            self._receiver.close()
            self._receiver = None
        if exit_code is not None:
            self._exit_code = exit_code
            self._ended_at = time.monotonic()

    def kill_with_stacks(self) -> None:
        """End a rank that hangs; faulthandler writes the stacks of all its threads on SIGABRT."""
        if self._process is None or self.ended:
            return
        self.hung = True
        _signal(self._process, signal.SIGABRT)
        self._process.join(2.0)
        self.reap()

    def reap(self) -> None:
        if self._process is None:
            return
        if self._process.exitcode is None:
            _signal(self._process, signal.SIGKILL)
            self._process.join()
        self.poll()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def end(self) -> RankEnd:
        how, content = self.message
        detail = content if how == "raised" else _read(self.stacks_path)
        if how != "raised" and self.hung:
            how = "hung"
        elif how == "returned" and self._exit_code != 0:
            how = "died"
        return RankEnd(
            rank=self.rank,
            how=how,
            value=pickle.loads(content) if how == "returned" else None,
            detail=detail,
            exit_code=self._exit_code,
            log=_read(self.log_path),
            seconds=self._ended_at - self._started_at,
        )


def _await_all(ranks: list[_Rank], timeout_seconds: float, settle_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    failure_seen = False
    while True:
        for rank in ranks:
            rank.poll()
        if all(rank.ended for rank in ranks):
            return
        if not failure_seen and any(rank.failed for rank in ranks):
            failure_seen = True
            deadline = min(deadline, time.monotonic() + settle_seconds)
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        wait([item for rank in ranks for item in rank.waitables()], remaining)
    for rank in ranks:
        rank.kill_with_stacks()


def _rank_main(
    sender: Connection,
    environment: dict[str, str],
    paths: tuple[str, str],
    call: bytes,
    group_timeout_seconds: float | None,
) -> None:
    log_path, stacks_path = paths
    # Without this a killed rank leaves a core file in the working directory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    # Kept open for the life of the process: faulthandler only holds the descriptor.
    stacks = open(stacks_path, "w")
    faulthandler.enable(stacks, all_threads=True)
    threading.Thread(target=_exit_with_the_caller, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    try:
        message = ("returned", pickle.dumps(_call(call, group_timeout_seconds)))
    except (Exception, SystemExit, KeyboardInterrupt):
        message = ("raised", traceback.format_exc())
    sender.send_bytes(pickle.dumps(message))
    sender.close()
    if message[0] == "raised":
        # At once, as a crashed program would: a tidy exit waits for threads and groups that
        # the failed peers no longer answer.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _call(call: bytes, group_timeout_seconds: float | None) -> Any:
    torch.set_num_threads(1)
    fn, args, kwargs = pickle.loads(call)
    if group_timeout_seconds is None:
        return fn(*args, **kwargs)
    dist.init_process_group("gloo", timeout=timedelta(seconds=group_timeout_seconds))
    value = fn(*args, **kwargs)
    if dist.is_initialized():
        # Rank 0 hosts the store: without the barrier it could take it from ranks still at work.
        dist.barrier()
        dist.destroy_process_group()
    return value


def _exit_with_the_caller() -> None:
    caller = multiprocessing.parent_process()
    if caller is not None:
        wait([caller.sentinel])
        os._exit(1)


def _forkserver() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Read once, when torch is loaded in the server. Ranks with several threads each starve one
    # another on few cores: a 4 ms step took up to 344 ms.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return context


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _signal(process: BaseProcess, number: int) -> None:
    if process.pid is not None:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            pass


def _read(path: Path) -> str:
    if not path.exists():
        return ""
    content = path.read_bytes()
    cut = f"... {len(content) - LOG_TAIL_BYTES} bytes before this left out\n"
    tail = content[-LOG_TAIL_BYTES:].decode(errors="replace")
    return cut + tail if len(content) > LOG_TAIL_BYTES else tail


def _headline(end: RankEnd) -> str:
    return f"{end.how}, exit code {end.exit_code}, after {end.seconds:.1f} s"


def _body(end: RankEnd) -> str:
    parts: Iterable[str] = (end.detail, end.log and f"log:\n{end.log}")
    return "".join(f"\n{part.rstrip()}" for part in parts if part)
