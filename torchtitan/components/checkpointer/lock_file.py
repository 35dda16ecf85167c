"""The file of a lock: made by one process only, written in place, taken over by one process only.

On a disk a name is linked to a file that is complete already, which succeeds once on network file
systems as well. Whoever takes over a file holds a lock of the system on it, looks whether it still is
the one that was found dead, and renames its own over it. Elsewhere nothing is atomic: what is written
is read back, and that is all. Names on a disk are changed through ``tools/disk.py``.

The folder of a lock is made for it if it is not there, and goes with it if nothing else is in it then.

    run_lock.py -> LocalLockFile | RemoteLockFile
"""

import errno
import fcntl
import os
import re
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from torchtitan.tools import disk, filesystem

SETTLING_SECONDS = 1.0
"""Where nothing is atomic: after so long what two have written at once is what both read."""

_HAS_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_GONE = {errno.ENOENT, errno.ESTALE}
"""What is said of a file that was deleted; the second where another machine of a network file system did it."""
_HAS_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF}


_MODE = 0o644
"""Whose lock it is anybody may read."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The file at one moment. Another one later is a sign of life."""

    content: bytes
    mark: tuple[int, ...] = ()
    """Changes with each writing, as far as the storage has something that does."""


class LockFile(Protocol):
    """What a lock asks of the storage that it lies on. All raise OSError when it does not answer."""

    def read(self) -> Seen | None:
        """What is there now, whosever it is."""
        ...

    def create(self, content: bytes) -> bool:
        """Make it this process's, in a folder that is made if it is not there; False when there is one."""
        ...

    def take_over(self, dead: Seen, content: bytes) -> bool:
        """Make it this process's in the place of ``dead``; False when that is no more what is there."""
        ...

    def write(self, content: bytes) -> None:
        """Change what is this process's; never what somebody else has put in its place."""
        ...

    def remove(self) -> None:
        """Delete what is this process's, as above, and the folder if it was made for it and is empty now."""
        ...


class LocalLockFile:
    """On a disk, of this machine or of several."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._own: BinaryIO | None = None
        """The file that this process has made; it stays that one, whatever happens to the name."""
        self._folder = os.path.dirname(path) or os.curdir
        self._has_made_folder = False

    def __del__(self) -> None:
        self._close()

    def read(self) -> Seen | None:
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            found = os.fstat(descriptor)
            return Seen(os.read(descriptor, 1 << 16), (found.st_ino, found.st_mtime_ns))
        finally:
            os.close(descriptor)

    def create(self, content: bytes) -> bool:
        if self._own is not None:
            # The folder of a lock that is held is gone only with its disk, and not to be made elsewhere.
            return self._create(content)
        with self._made_folder():
            try:
                return self._create(content)
            except OSError as error:
                if error.errno not in _GONE or filesystem.isdir(self._folder):
                    raise
                # Whoever had made it has saved nothing, and has just taken it away with the lock.
                return False

    @contextmanager
    def _made_folder(self) -> Generator[None]:
        """Make the folder if it is not there; it goes again if nobody gets the lock in the block."""
        try:
            if not filesystem.isdir(self._folder):
                self._has_made_folder = True
                filesystem.makedirs(self._folder)
            yield
        finally:
            if self._own is None:
                self._remove_folder()

    def _remove_folder(self) -> None:
        """Delete the folder if it was made here and nothing is in it."""
        if self._has_made_folder:
            filesystem.remove_empty(self._folder)

    def _create(self, content: bytes) -> bool:
        with self._beside(content) as (temporary, file):
            try:
                disk.current().link(temporary, self.path)
            except FileExistsError:
                # A network file system may say so of a link that it has made itself.
                if not self._is_at_the_name(file):
                    return False
            except OSError as error:
                if error.errno in _GONE:
                    return False  # it was swept by whoever has got the lock meanwhile
                if error.errno not in _HAS_NO_LINKS:
                    raise
                return self._create_without_link(content)
            self._keep(file)
            return True

    def take_over(self, dead: Seen, content: bytes) -> bool:
        with self._beside(content) as (temporary, file), self._locked() as (found, is_locked):
            if found is None or self.read() != dead:
                return False
            try:
                disk.current().rename(temporary, self.path)
            except OSError as error:
                if error.errno in _GONE:
                    return False  # as above
                raise
            if not is_locked:
                # Another one may just be doing the same: the last of them has it.
                time.sleep(SETTLING_SECONDS)
                if not self._is_at_the_name(file):
                    return False
            self._keep(file)
            return True

    def write(self, content: bytes) -> None:
        assert self._own is not None
        # Past the disk's seam: it says that the run lives, and nothing of a checkpoint hangs on it.
        os.pwrite(self._own.fileno(), content, 0)
        # An editor, or a copy by hand, may have made it longer.
        os.ftruncate(self._own.fileno(), len(content))

    def remove(self) -> None:
        with self._locked() as (found, _):
            if found is not None and self._own is not None and self._is_at_the_name(self._own):
                disk.current().unlink(self.path)
        self._close()
        self._remove_folder()

    @contextmanager
    def _beside(self, content: bytes) -> Generator[tuple[str, BinaryIO]]:
        """A file of ``content`` beside that of the lock, which nobody else knows."""
        temporary = f"{self.path}.{uuid.uuid4().hex}"
        file = disk.current().create(temporary, exclusive=True, mode=_MODE)
        try:
            file.write(content)
            # After a power cut an empty one would have to be waited for, until it counts as silent.
            disk.current().sync(file)
            yield temporary, file
        finally:
            if file is not self._own:
                with suppress(OSError):  # what did not fit does not fit now
                    file.close()
            with suppress(OSError):  # it is in nobody's way, and goes when the lock is taken next
                disk.current().unlink(temporary)

    @contextmanager
    def _locked(self) -> Generator[tuple[int | None, bool]]:
        """What has the name now, and whether nobody else takes it over or deletes it meanwhile.

        None when there is nothing, or somebody else is at it.
        """
        try:
            descriptor = _open_for_locking(self.path)
        except FileNotFoundError:
            yield None, False
            return
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None, False
                return
            except OSError as error:
                if error.errno not in _HAS_NO_LOCKS:
                    raise
                yield descriptor, False
                return
            try:
                yield descriptor, True
            finally:
                # By name: a process that was started meanwhile may have a copy of the descriptor.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    def _create_without_link(self, content: bytes) -> bool:
        # For a moment it is empty, which is taken for somebody who is just beginning.
        try:
            file = disk.current().create(self.path, exclusive=True, mode=_MODE)
        except FileExistsError:
            return False
        self._keep(file)
        file.write(content)
        disk.current().sync(file)
        filesystem.fsync_dir(self._folder)
        return True

    def _is_at_the_name(self, file: BinaryIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _keep(self, file: BinaryIO) -> None:
        self._close()
        self._own = file
        self._sweep()

    def _sweep(self) -> None:
        """Delete what processes have left beside it that ended on their way to it.

        What another one is just making goes too: it would have come too late.
        """
        folder, name = os.path.split(self.path)
        left = re.compile(rf"{re.escape(name)}\.[0-9a-f]{{32}}")
        with suppress(OSError):
            for found in filter(left.fullmatch, os.listdir(folder or os.curdir)):
                with suppress(OSError):
                    disk.current().unlink(os.path.join(folder, found))

    def _close(self) -> None:
        own, self._own = getattr(self, "_own", None), None
        if own is not None:
            with suppress(OSError):  # what could not be written then is not needed any more
                own.close()


class RemoteLockFile:
    """On a storage of fsspec, where two that come within a second may both believe to be alone."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._own: bytes | None = None

    def read(self) -> Seen | None:
        try:
            return Seen(filesystem.read_bytes(self.path))
        except FileNotFoundError:
            return None

    def create(self, content: bytes) -> bool:
        if self._own is None:
            filesystem.makedirs(self.path.rpartition("/")[0])
        return self.read() is None and self._write_and_look(content)

    def take_over(self, dead: Seen, content: bytes) -> bool:
        return self.read() == dead and self._write_and_look(content)

    def write(self, content: bytes) -> None:
        if self._is_own():
            filesystem.write_bytes(self.path, content)
            self._own = content

    def remove(self) -> None:
        if self._is_own():
            filesystem.remove_file(self.path)
        self._own = None

    def _is_own(self) -> bool:
        seen = self.read()
        return seen is not None and seen.content == self._own

    def _write_and_look(self, content: bytes) -> bool:
        filesystem.write_bytes(self.path, content)
        time.sleep(SETTLING_SECONDS)
        self._own = content
        return self._is_own()


def _open_for_locking(path: str) -> int:
    try:
        # A network file system locks only what may be written.
        return os.open(path, os.O_RDWR)
    except PermissionError:
        return os.open(path, os.O_RDONLY)


def lock_file(path: str) -> LockFile:
    """The file of a lock at ``path``, a path of this system or a URI."""
    return RemoteLockFile(path) if filesystem.is_remote(path) else LocalLockFile(path)
