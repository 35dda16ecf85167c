"""Tell every rank which rank failed first, and why; let none of them hang after it.

A rank that fails leaves the others inside a collective, where they see at best "Connection closed by
peer". The store of the job still works then, so the first error travels through it: the first to
publish wins, every rank logs that error, and a rank that does not end by itself is ended.

    rank 1: exception -> publish -> store["first"] -> waits until the others have read it -> raises on
    rank 0: stuck in all_reduce;  its watch thread reads store["first"] -> logs it -> grace -> exit code 1

It is left for the launcher as well, whose last line says it once more, below all that torchrun prints.

Two facts to know: a rank that was killed (SIGKILL, out of memory) publishes nothing, its peers then report
that they lost it; and when the store itself is gone, its host (rank 0, or the launcher) is.
"""

import contextlib
import faulthandler
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from torchtitan.tools.logging import logger

# A store value travels to every rank; the end of a traceback says most.
_TRACEBACK_CHARACTERS = 20_000
_REASON_CHARACTERS = 2_000
_FIRST = "first"
_WORD_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the file in which torchrun looks for the error of a rank."""
# What gloo, NCCL and the sockets below them say when the other side went away or does not answer.
_ECHO_TEXTS = (
    "broken pipe",
    "connection closed by peer",
    "connection refused",
    "connection reset by peer",
    "connection timed out",
    "remote process exiting",
    "socket timeout",
    "timed out waiting",
)


@dataclass(frozen=True)
class RankFailure:
    """The error that ended the job."""

    rank: int
    """The rank it happened on; -1 when the store is gone and nobody can say."""
    step: int | None
    reason: str
    """Type and message of the exception."""
    traceback: str
    is_stop: bool = False
    """Somebody asked that rank to end; nothing is wrong."""
    is_lost_peer: bool = False
    """That rank only felt the end of another one, which left no word."""
    is_alone: bool = False
    """There was no other rank."""

    def __str__(self) -> str:
        if self.rank < 0:
            return self.reason
        where = "" if self.step is None else f", at step {self.step}"
        if self.is_stop:
            return f"rank {self.rank} was stopped{where}: {self.reason}"
        if self.is_lost_peer:
            return (
                f"rank {self.rank} lost its connection to another rank{where}, which was probably killed (kill -9, "
                "out of memory) or does not answer; see which rank torchrun names, and the logs of the others. "
                f"What rank {self.rank} felt: {self.traceback or self.reason}"
            )
        return self.told(self.traceback or self.reason)

    def told(self, why: str) -> str:
        """Who failed, and where; ``why`` may be the reason or all of the traceback."""
        where = "" if self.step is None else f", at step {self.step}"
        if self.is_alone:
            return f"the run failed{where}: {why}"
        return f"rank {self.rank} failed first{where}: {why}"


class PeerFailureWatch:
    """Listens for the first failure of any rank, in a thread, until ``close``.

    Once a failure is known, on this rank or on another, the process must end: ``grace_seconds`` later it is
    ended with exit code 1, wherever its main thread is. A rank that was only asked to stop (KeyboardInterrupt)
    is made known as well, without a traceback and without that limit. ``store`` is shared by the ranks, see
    ``utils.job_store``.
    On a single rank there is nothing to listen for, and nothing is ever ended.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        grace_seconds: float = 60.0,
        poll_seconds: float = 0.5,
        echo_seconds: float = 3.0,
        farewell_seconds: float = 5.0,
    ) -> None:
        self._rank = rank
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._heard = f"heard/{rank}"
        self._grace_seconds = grace_seconds
        self._poll_seconds = poll_seconds
        self._echo_seconds = echo_seconds
        self._farewell_seconds = farewell_seconds
        self._first: RankFailure | None = None
        self._known = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        if not self._peers:
            return
        store = dist.PrefixStore("failure", store)
        # Connections of our own: one that the main thread waits on would make us wait too.
        clone: Callable[[], dist.Store] = store.clone  # pyrefly: ignore[missing-attribute]  (stub)
        self._store, self._thread_store = clone(), clone()
        self._thread = threading.Thread(target=self._listen, name="peer-failure-watch", daemon=True)
        self._thread.start()

    def publish(self, error: BaseException, step: int | None = None) -> RankFailure:
        """Make ``error`` known to all ranks unless one failed before; returns the failure that was first.

        An error that only echoes the end of another rank waits ``echo_seconds`` for the cause to show. Returns once
        the other ranks have logged it, so that a launcher which then ends them cuts no log short.
        """
        own = _failure_of(error, self._rank, step)
        if not self._peers:
            own = replace(own, is_alone=True)
            self._note(own, None)
            _leave_word(self._first or own)
            return own
        own = replace(own, is_lost_peer=_is_lost_connection(error))
        first = self.wait(self._echo_seconds) if is_echo(error) else None
        if first is None:
            first = own
            with contextlib.suppress(
                RuntimeError
            ):  # The store is gone: what is left is our own log.
                value = json.dumps(asdict(own))
                first = RankFailure(**json.loads(self._store.compare_set(_FIRST, "", value)))
            self._note(first, self._store)
        # Once the store is gone a second call would take its own error for the first of all.
        _leave_word(self._first or first)
        if first == own or self._rank == 0:
            # Rank 0 may host the store: once it is gone, a slower rank could not read who was first.
            # A lost rank never answers; the others look this often.
            self._await_peers(
                2 * self._poll_seconds if first.is_lost_peer else self._farewell_seconds
            )
        return first

    def first_failure(self) -> RankFailure | None:
        """The failure that was first, as far as this rank knows by now."""
        return self._first

    def wait(self, seconds: float) -> RankFailure | None:
        """Wait up to ``seconds`` for a failure to become known."""
        self._known.wait(seconds)
        return self._first

    def close(self) -> None:
        """Stop listening, at the normal end. After a failure this changes nothing: the process still has to end."""
        if not self._peers or self._closing.is_set() or self._first is not None:
            return
        self._closing.set()
        self._thread.join()
        if self._first is not None:
            return
        with contextlib.suppress(RuntimeError):
            self._store.set(self._heard, "")
        if self._rank == 0:
            # Rank 0 may host the store: leaving first would look like a failure to those that still listen.
            self._await_peers(self._farewell_seconds)

    def _listen(self) -> None:
        while not self._closing.wait(self._poll_seconds):
            try:
                if not self._thread_store.check([_FIRST]):
                    continue
                first = RankFailure(**json.loads(self._thread_store.get(_FIRST)))
                self._note(first, self._thread_store)
            except RuntimeError as error:
                self._note(_lost_store(error), self._thread_store)
            if self._first is not None and self._first.is_stop:
                # Whoever stops a run has a clock of its own; ours could end a rank that is still
                # busy with the save in flight.
                return
            self._end_in_time()

    def _note(self, failure: RankFailure, store: dist.Store | None) -> None:
        with self._lock:
            if self._first is not None:
                return
            self._first = failure
        logger.log(logging.WARNING if failure.is_stop else logging.ERROR, "%s", failure)
        if store is not None:
            # Before the main thread can learn of it and end the process: the failed rank waits for this.
            with contextlib.suppress(RuntimeError):
                store.set(self._heard, "")
        self._known.set()

    def _await_peers(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        heard = [f"heard/{peer}" for peer in self._peers]
        with contextlib.suppress(RuntimeError):
            while not self._store.check(heard) and time.monotonic() < deadline:
                time.sleep(0.05)

    def _end_in_time(self) -> None:
        # The backstop below needs no interpreter lock, which a stuck extension may hold for ever.
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback_later(self._grace_seconds + 5, exit=True)
        time.sleep(self._grace_seconds)
        logger.error(
            "this rank did not end within %.0f s of the failure of another; ending it. Its threads stand here:",
            self._grace_seconds,
        )
        with contextlib.suppress(Exception):
            for handler in logging.getLogger().handlers:
                handler.flush()
            sys.stdout.flush()
            faulthandler.dump_traceback(all_threads=True)
        os._exit(1)


def is_echo(error: BaseException) -> bool:
    """Whether ``error`` may only be the way in which this rank felt the end of another one."""
    return _is_lost_connection(error) or any(
        isinstance(link, dist.DistError) for link in _causes(error)
    )


def _is_lost_connection(error: BaseException) -> bool:
    return any(
        isinstance(link, dist.DistNetworkError)
        or isinstance(link, RuntimeError)
        and any(text in str(link).lower() for text in _ECHO_TEXTS)
        for link in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    seen = set[int]()
    # Whoever raises an error again from what it has led to makes a ring of them.
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__


def _failure_of(error: BaseException, rank: int, step: int | None) -> RankFailure:
    if isinstance(error, KeyboardInterrupt):
        reason = str(error) or type(error).__name__
        return RankFailure(rank=rank, step=step, reason=reason, traceback="", is_stop=True)
    story = "".join(traceback.format_exception(error)).rstrip()
    return RankFailure(
        rank=rank,
        step=step,
        reason=f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS],
        traceback=story[-_TRACEBACK_CHARACTERS:],
    )


def _leave_word(failure: RankFailure) -> None:
    """Write ``failure`` where torchrun looks for it, unless it only says that somebody stopped or is gone."""
    path = os.environ.get(_WORD_FILE)
    if not path or failure.is_stop or failure.is_lost_peer or failure.rank < 0:
        return
    # Of the errors of several ranks torchrun takes the one that came first.
    word = {"message": failure.told(failure.reason), "extraInfo": {"timestamp": int(time.time())}}
    # A full disk may be the very failure, and torchrun breaks off at a file that was cut short.
    with contextlib.suppress(OSError):
        with open(f"{path}.new", "w") as file:
            json.dump({"message": word}, file)
        os.replace(f"{path}.new", path)


def _lost_store(error: Exception) -> RankFailure:
    reason = (
        f"the store of the job does not answer any more ({error}); its host, rank 0 or the launcher, has probably "
        "ended. Look at the log of rank 0."
    )
    return RankFailure(rank=-1, step=None, reason=reason, traceback="")
