"""One live run owns a folder of checkpoints: the lock that says so, from taking it to giving it back.

Two runs in one folder would delete each other's checkpoints and mix two histories. The lock is a
file. A run that was killed leaves it behind, so whoever finds one asks whether its holder is dead, or
waits for a sign of life of one that runs elsewhere. A disk that does not let it be written is a warning:
the lock guards a run, and never ends one for anything but another run.

    claiming.py (rank 0) -> hold -> RunLock.take -> heartbeat thread -> require before each save -> release
"""

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
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


@dataclass
class Silence:
    """Whether a lock is silent, by the clock of this process alone."""

    limit_seconds: float
    _first: Seen | None = None
    _since: float = 0.0

    def seconds_left(self, seen: Seen, now: float) -> float | None:
        """For how long it has to stay as it is until it counts as left behind; None: it has changed."""
        if self._first is None:
            self._first, self._since = seen, now
        if seen != self._first:
            return None
        return max(0.0, self._since + self.limit_seconds - now)


class RunLock:
    """The lock of this process on one folder; get it from ``hold``."""

    def __init__(self, folder: str, timeout_seconds: float) -> None:
        self.path = filesystem.join(folder, RUN_LOCK)
        self.folder = folder
        self.holder = Holder.here()
        self.users = 0
        self._timeout_seconds = timeout_seconds
        self._file: LockFile = lock_file(self.path)
        self._mutex = threading.Lock()
        self._is_over = threading.Event()
        self._beaten_at = 0.0
        self._lost_to: str | None = None
        self._is_failing = False
        self._thread = threading.Thread(target=self._beat_until_over, daemon=True)

    @property
    def is_lost(self) -> bool:
        """Whether another run is known to have taken it over."""
        return self._lost_to is not None

    def is_lost_by_now(self) -> bool:
        """Whether a look at it shows that another run has taken it over."""
        with self._mutex:
            self._look(is_beat=False)
            return self.is_lost

    def take(self, verdicts: Mapping[str, Fate], *, may_wait: bool) -> None:
        """Take the lock, and give signs of life from now on.

        Args:
            verdicts: by run, what ranks on the machines of such runs have found out about them.
            may_wait: wait whether a run on another machine is silent; otherwise it counts as alive.

        Raises:
            CheckpointInUseError: a run that is or may be alive has it.
            OSError: the storage does not let it be looked at or written.
        """
        silence, deadline = Silence(self._timeout_seconds), 0.0
        while not self._take_at_once(verdicts):
            seen = self._file.read()
            if seen is None:
                continue  # it was given back meanwhile
            now = time.monotonic()
            left = silence.seconds_left(seen, now) if may_wait else None
            if left is None:
                self._refuse(seen, "which is alive" if may_wait else "which may be alive")
            if not deadline:
                # What hangs while it takes it over ends the wait as well.
                deadline = now + 2 * self._timeout_seconds
                self._tell_of_wait(seen)
            if left == 0 and self._file.take_over(seen, self.holder.render()):
                self._tell_of_takeover(
                    seen, f"has given no sign of life for {silence.limit_seconds:g} s"
                )
                break
            if now > deadline:
                self._refuse(seen, "which does not let go of it")
            time.sleep(min(max(left, _SECONDS_BETWEEN_TRIES), _LONGEST_BETWEEN_LOOKS))
        self._beaten_at = time.monotonic()
        self._thread.start()

    def _take_at_once(self, verdicts: Mapping[str, Fate]) -> bool:
        """Whether it could be taken without waiting for anything. Raises CheckpointInUseError as ``take``."""
        seen = self._file.read()
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

    def require(self) -> None:
        """Check that the lock is still this run's, right before something is written.

        Raises:
            CheckpointInUseError: it was taken over.
        """
        if not self.is_lost_by_now():
            return
        raise CheckpointInUseError(
            f"{self.folder} belongs to another run now: {self._lost_to} has taken over {self.path} from "
            f"this one, {self.holder}, which had given no sign of life for "
            f"{self._timeout_seconds:g} s. So nothing more is saved here. Stop one of the two, and start "
            "this one again, with another --dump_folder if both are to go on."
        )

    def note_step(self, step: int) -> None:
        """Let the lock tell which step the run went on from."""
        with self._mutex:
            self.holder = replace(self.holder, step=step)

    def release(self) -> None:
        """Give the lock back, if it is still this run's and nobody else in the process needs it."""
        with _registry_lock:
            self.users -= 1
            # A process that was forked has a copy of all this, and owns nothing of it.
            if self.users > 0 or self.holder.pid != os.getpid():
                return
            if _held.get(_key_of(self.folder)) is self:
                del _held[_key_of(self.folder)]
        self._is_over.set()
        with self._mutex:
            try:
                self._file.remove()
            except OSError as error:
                logger.warning(
                    f"Could not delete {self.path}: {error}. It does not stop a later run on this machine; "
                    f"on another one that waits for {self._timeout_seconds:g} s."
                )

    def _beat_until_over(self) -> None:
        seconds = min(_LONGEST_BETWEEN_BEATS, self._timeout_seconds / _BEATS_WITHIN_TIMEOUT)
        while not self._is_over.wait(seconds):
            with self._mutex:
                if self._is_over.is_set() or self.is_lost:
                    return
                self._look(is_beat=True)

    def _look(self, *, is_beat: bool) -> None:
        """See whose the lock is, and give a sign of life if it is ``is_beat``; no error but a warning."""
        if self.is_lost:
            return
        try:
            self._look_once(is_beat)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                self._is_failing = True
                logger.warning(
                    f"Could not give a sign of life in {self.path}: {error}. The run goes on; after "
                    f"{self._timeout_seconds:g} s of this a run on another machine may take the folder "
                    "over, which this one would find out before its next save."
                )

    def _look_once(self, is_beat: bool) -> None:
        seen = self._file.read()
        if seen is None:
            is_stale = time.monotonic() - self._beaten_at > self._timeout_seconds
            if is_stale:
                # Another run may have come and gone, and what is there now is not what this one left.
                return self._note_loss("A run that has ended since")
            if self._file.create(self.holder.render()):
                self._beaten_at = time.monotonic()
                logger.warning(
                    f"Somebody has deleted {self.path}, the lock of this run; it is there again."
                )
                return None
            seen = self._file.read()
        found = None if seen is None else Holder.parse(seen.content)
        if found is not None and found.run_id != self.holder.run_id:
            return self._note_loss(str(found))
        if is_beat:
            self.holder = replace(self.holder, heartbeat=self.holder.heartbeat + 1)
            self._file.write(self.holder.render())
            self._beaten_at = time.monotonic()
        return None

    def _note_loss(self, to: str) -> None:
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

    def _tell_of_wait(self, seen: Seen) -> None:
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


def hold(
    folder: str,
    *,
    timeout_seconds: float,
    verdicts: Mapping[str, Fate] = MappingProxyType({}),
    may_wait: bool = True,
) -> RunLock:
    """The lock on ``folder``, which is made if it is not there; one for all that ask in this process.

    Raises:
        CheckpointInUseError, OSError: as ``RunLock.take``.
    """
    with _registry_lock:
        lock = _held.get(_key_of(folder))
        # One of a process that this one was forked from is not its own.
        if lock is None or lock.is_lost or lock.holder.pid != os.getpid():
            filesystem.makedirs(folder)
            lock = RunLock(folder, timeout_seconds)
            lock.take(verdicts, may_wait=may_wait)
            if filesystem.is_remote(folder):
                logger.info(
                    f"{lock.path} is the lock of this run. On such a storage two runs that begin in one "
                    "second may both get it: it is no more than an attempt."
                )
            _held[_key_of(folder)] = lock
        lock.users += 1
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
