"""One live run owns a folder of checkpoints: the lock that says so, from taking it to giving it back.

Two runs in one folder would delete each other's checkpoints and mix two histories. The lock is a
file. A run that was killed leaves it behind, so whoever finds one asks whether its holder is dead, or
waits for a sign of life of one that runs elsewhere. A disk that does not let it be written is a warning:
the lock guards a run, and never ends one for anything but another run.

    claiming.py (rank 0) -> hold -> RunLock.take -> heartbeat thread -> require before each save -> release

Once it is taken, one thread alone writes the file. The others ask it, and wait for no longer than they
want: a disk may not answer at all.
"""

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import NoReturn

from torchtitan.components.checkpointer.errors import CheckpointInUseError
from torchtitan.components.checkpointer.lock_file import lock_file, LockFile, Seen
from torchtitan.components.checkpointer.lock_holder import Fate, Holder
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

RUN_LOCK = ".run.lock"
"""Its name in the folder; hidden, so that listings show what was saved and nothing else."""

_LONGEST_BETWEEN_BEATS = 30.0
_BEATS_WITHIN_TIMEOUT = 5
"""One that is lost to a slow disk, or that another machine sees late, must not pass for a death."""

_LONGEST_BETWEEN_LOOKS = 2.0
_SECONDS_BETWEEN_TRIES = 0.05

_LONGEST_ANSWER = 30.0


@dataclass
class Silence:
    """Whether a lock is silent, by the clock of this process alone."""

    limit_seconds: float
    _first: Seen | None = None
    _since: float | None = None

    def seconds_left(self, seen: Seen | None, now: float) -> float | None:
        """For how long it has to stay as it is until it counts as left behind; None: it has changed."""
        if self._since is None:
            self._first, self._since = seen, now
        if seen != self._first:
            return None
        return max(0.0, self._since + self.limit_seconds - now)


class RunLock:
    """The lock of this process on one folder; get it from ``hold``."""

    def __init__(self, folder: str, timeout_seconds: float) -> None:
        self.path = filesystem.join(folder, RUN_LOCK)
        self.folder = folder
        self.users = 0
        self._timeout_seconds = timeout_seconds
        self._file: LockFile = lock_file(self.path)
        self._begun = Holder.here()
        self._step = 0
        self._beats = 0
        self._beaten_at = 0.0
        self._lost_to: str | None = None
        self._is_failing = False
        # One that may be used from within the garbage collector, in the middle of using it.
        self._asked: SimpleQueue[tuple[bool, threading.Event]] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def holder(self) -> Holder:
        """This run, as the lock tells about it."""
        return replace(self._begun, step=self._step, heartbeat=self._beats)

    @property
    def is_lost(self) -> bool:
        """Whether another run is known to have taken it over."""
        return self._lost_to is not None

    def is_lost_by_now(self, limit_seconds: float = _LONGEST_ANSWER) -> bool:
        """Whether a look at it shows that another run has taken it over.

        Raises:
            TimeoutError: the disk has not answered within the limit.
        """
        if not self.is_lost and not self._ask(is_release=False).wait(limit_seconds):
            raise TimeoutError(f"the disk of {self.path} has not answered for {limit_seconds:g} s")
        return self.is_lost

    def is_ours(self) -> bool:
        """Whether it still is this run's, as far as the disk tells; looks, for as long as that takes."""
        with suppress(Exception):  # which the next sign of life meets as well, and tells
            self._find_loss()
        return not self.is_lost

    def take(
        self, verdicts: Mapping[str, Fate], silence: Silence | None = None, *, may_wait: bool
    ) -> None:
        """Take the lock, and give signs of life from now on.

        Args:
            verdicts: by run, what ranks on the machines of such runs have found out about them.
            silence: what an earlier try has seen of it.
            may_wait: wait until it is known whether a run on another machine is silent.

        Raises:
            CheckpointInUseError: a run that is alive has it.
            OSError: the storage does not let it be looked at or written, or whether its holder is alive
                cannot be told yet.
        """
        silence = silence or Silence(self._timeout_seconds)
        # What hangs while it takes it over ends the wait as well.
        deadline, is_told = time.monotonic() + 2 * self._timeout_seconds, False
        num_missing = 0
        while True:
            seen, now = self._file.read(), time.monotonic()
            num_missing = num_missing + 1 if seen is None else 0
            left = silence.seconds_left(seen, now)
            if self._take_at_once(seen, verdicts):
                break
            if seen is not None and left is None:
                self._refuse(seen, "which is alive")
            if seen is not None and left == 0 and self._file.take_over(seen, self.holder.render()):
                self._tell_of_takeover(
                    seen, f"has given no sign of life for {silence.limit_seconds:g} s"
                )
                break
            if not may_wait or now > deadline:
                self._give_up(seen, may_wait=may_wait)
            # One that is not there has just been given back, unless it is so again.
            if not is_told and (seen is not None or num_missing > 2):
                is_told = True
                self._tell_of_wait(seen)
            # One that was given back meanwhile is there to be taken.
            pause = _SECONDS_BETWEEN_TRIES if seen is None else left or 0.0
            time.sleep(min(max(pause, _SECONDS_BETWEEN_TRIES), _LONGEST_BETWEEN_LOOKS))
        self._beaten_at = time.monotonic()
        self._thread.start()

    def _take_at_once(self, seen: Seen | None, verdicts: Mapping[str, Fate]) -> bool:
        """Whether it could be taken without waiting for anything. Raises CheckpointInUseError as ``take``."""
        if seen is None:
            return self._file.create(self.holder.render())
        holder = Holder.parse(seen.content)
        if holder is None:
            return False  # somebody who is just beginning, or what a crash has left
        if holder.is_this_process():
            return self._file.take_over(seen, self.holder.render())
        fate = holder.fate()
        if fate is Fate.ELSEWHERE:
            fate = verdicts.get(holder.run_id, fate)
        if fate is Fate.ALIVE:
            self._refuse(seen, "which is alive")
        if fate is Fate.ELSEWHERE or not self._file.take_over(seen, self.holder.render()):
            return False
        self._tell_of_takeover(seen, "is no more")
        return True

    def require(self, limit_seconds: float = _LONGEST_ANSWER) -> None:
        """Check that the lock is still this run's, right before something is written.

        Raises:
            CheckpointInUseError: it was taken over.
            TimeoutError: as ``is_lost_by_now``.
        """
        if self.is_lost_by_now(limit_seconds):
            self._refuse_as_lost()

    def require_ours(self) -> None:
        """Check that, as ``is_ours`` does.

        Raises:
            CheckpointInUseError: it was taken over.
        """
        if not self.is_ours():
            self._refuse_as_lost()

    def _refuse_as_lost(self) -> NoReturn:
        raise CheckpointInUseError(
            f"{self.folder} belongs to another run now: {self._lost_to} has taken over {self.path} from "
            f"this one, {self.holder}, which had given no sign of life for "
            f"{self._timeout_seconds:g} s. So nothing more is saved here. Stop one of the two, and start "
            "this one again, with another --dump_folder if both are to go on."
        )

    def note_step(self, step: int) -> None:
        """Let the lock tell which step the run went on from."""
        self._step = step

    def release(self, limit_seconds: float = _LONGEST_ANSWER) -> None:
        """Give the lock back, if it is still this run's and nobody else in the process needs it.

        With a limit of 0 that is only asked for. The garbage collector may do so in any thread at any
        moment, so that no lock of this process may be waited for.
        """
        # A process that was forked has a copy of all this, and owns nothing of it.
        if self._begun.pid != os.getpid():
            return
        is_over = self._ask(is_release=True).wait(limit_seconds)
        if not is_over and limit_seconds:
            logger.warning(
                f"Could not delete {self.path}: the disk has not answered for {limit_seconds:g} s."
            )

    def _ask(self, *, is_release: bool) -> threading.Event:
        """Let the thread give the lock back or look at it; what it sets then."""
        done = threading.Event()
        self._asked.put((is_release, done))
        return done

    def _serve(self) -> None:
        seconds = min(_LONGEST_BETWEEN_BEATS, self._timeout_seconds / _BEATS_WITHIN_TIMEOUT)
        while True:
            is_release, done = False, None
            with suppress(Empty):
                is_release, done = self._asked.get(timeout=seconds)
            is_over = is_release and self._give_back()
            if not is_release:
                self._look()
            if done is not None:
                done.set()
            if is_over:
                return

    def _give_back(self) -> bool:
        """Whether nobody else in the process needs it, so that it is gone now."""
        with _registry_lock:
            self.users -= 1
            if self.users > 0:
                return False
            if _held.get(_key_of(self.folder)) is self:
                del _held[_key_of(self.folder)]
        try:
            self._file.remove()
        except Exception as error:
            logger.warning(
                f"Could not delete {self.path}: {error}. It does not stop a later run on this machine; "
                f"on another one that waits for {self._timeout_seconds:g} s."
            )
        return True

    def _look(self) -> None:
        """See whose the lock is, and give a sign of life; no error but a warning."""
        if self.is_lost:
            return
        try:
            self._beat()
            self._is_failing = False
        except Exception as error:  # each storage has its own
            if not self._is_failing:
                self._is_failing = True
                logger.warning(
                    f"Could not give a sign of life in {self.path}: {error}. The run goes on; after "
                    f"{self._timeout_seconds:g} s of this a run on another machine may take the folder "
                    "over, which this one would find out before its next save."
                )

    def _beat(self) -> None:
        seen = self._find_loss()
        if self.is_lost:
            return
        if seen is not None:
            self._beats += 1
            self._file.write(self.holder.render())
        elif self._file.create(self.holder.render()):
            logger.warning(
                f"Somebody has deleted {self.path}, the lock of this run; it is there again."
            )
        else:
            self._find_loss()
            return
        self._beaten_at = time.monotonic()

    def _find_loss(self) -> Seen | None:
        """What is there; notes it if that is another run's."""
        seen = self._file.read()
        if seen is None:
            if time.monotonic() - self._beaten_at > self._timeout_seconds:
                # Another run may have come and gone, and what is there now is not what this one left.
                self._note_loss("A run that has ended since")
            return None
        found = Holder.parse(seen.content)
        if found is not None and found.run_id != self._begun.run_id:
            self._note_loss(str(found))
        return seen

    def _note_loss(self, to: str) -> None:
        if self.is_lost:
            return
        self._lost_to = to
        logger.error(
            f"{to} has taken over {self.path} from this run, {self.holder}. The next save will fail: two "
            "runs in one folder would delete each other's checkpoints."
        )

    def _refuse(self, seen: Seen, state: str) -> NoReturn:
        raise CheckpointInUseError(
            f"{self.folder} is in use: {self.path} is held by {_who(seen)}, {state}. Two runs in one folder "
            "would delete each other's checkpoints. Wait for that one or stop it, or give this one another "
            f"--dump_folder; if you know that it is dead, delete {self.path}."
        )

    def _give_up(self, seen: Seen | None, *, may_wait: bool) -> NoReturn:
        if seen is None:
            raise TimeoutError(f"{self.path} is not there, and cannot be made")
        if may_wait:
            self._refuse(seen, "which does not let go of it")
        raise TimeoutError(
            f"{self.path} is held by {_who(seen)}, and it takes more silence to tell that this one is dead"
        )

    def _tell_of_wait(self, seen: Seen | None) -> None:
        if seen is None:
            logger.info(
                f"Waiting up to {2 * self._timeout_seconds:g} s for {self.path}, which is not there and cannot "
                "be made. If it is a link that leads nowhere, delete it."
            )
            return
        holder = Holder.parse(seen.content)
        if holder is not None and holder.fate() is not Fate.ELSEWHERE:
            return  # another run is just taking over what a dead one has left
        logger.info(
            f"Waiting up to {self._timeout_seconds:g} s for {self.path}, which is held by {_who(seen)}: from "
            "here only silence can tell that a run is dead."
        )

    def _tell_of_takeover(self, seen: Seen, why: str) -> None:
        logger.info(f"Took over {self.path}: {_who(seen)} {why}.")


_held: dict[str, RunLock] = {}
_registry_lock = threading.Lock()
"""Held for a moment; nothing waits or works meanwhile."""

_one_takes = threading.Lock()


def hold(
    folder: str,
    *,
    timeout_seconds: float,
    verdicts: Mapping[str, Fate] = MappingProxyType({}),
    silence: Silence | None = None,
    may_wait: bool = True,
) -> RunLock:
    """The lock on ``folder``, which is made if it is not there; one for all that ask in this process.

    Raises:
        CheckpointInUseError, OSError: as ``RunLock.take``.
    """
    with _one_takes:
        with _registry_lock:
            lock = _held.get(_key_of(folder))
            # One of a process that this one was forked from is not its own.
            if lock is not None and not lock.is_lost and lock.holder.pid == os.getpid():
                lock.users += 1
                return lock
        lock = RunLock(folder, timeout_seconds)
        lock.take(verdicts, silence, may_wait=may_wait)
        if filesystem.is_remote(folder):
            logger.info(
                f"{lock.path} is the lock of this run. On such a storage two runs that begin in one "
                "second may both get it: it is no more than an attempt."
            )
        with _registry_lock:
            lock.users += 1
            _held[_key_of(folder)] = lock
        return lock


def holder_of(folder: str) -> Holder | None:
    """Who holds ``folder``, this process or another one; None when it cannot be told."""
    seen = lock_file(filesystem.join(folder, RUN_LOCK)).read()
    return None if seen is None else Holder.parse(seen.content)


def _who(seen: Seen) -> str:
    holder = Holder.parse(seen.content)
    return "a run whose record cannot be read" if holder is None else str(holder)


def _key_of(folder: str) -> str:
    return folder if filesystem.is_remote(folder) else os.path.realpath(folder)
