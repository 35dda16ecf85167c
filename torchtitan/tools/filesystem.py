"""The file operations the project needs, for local paths and for URIs such as ``s3://bucket/run``.

A path that holds ``://`` is remote and goes through fsspec, which is imported only then. Local
operations that must outlive a power cut (``makedirs``, ``rename``) also sync the directory that
holds the changed name: on Linux the name of a file becomes durable with its directory, not with the file.
What changes a local disk goes through ``disk.py``.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from torchtitan.tools import disk

_FEW_FILES = 32
_NUM_THREADS = 16
"""So many files are asked for at a time, when there are more than few."""


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a URI."""
    return "://" in str(path)


def _resolve(path: str | os.PathLike[str]) -> tuple[Any, str]:
    """The fsspec file system of a URI, and the path inside it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(
            f"{path!r} is a remote path and needs the package fsspec, which is not installed. "
            "Install fsspec (and the driver of the storage, such as s3fs), or use a local path."
        ) from error
    return url_to_fs(str(path))


def exists(path: str) -> bool:
    """Whether there is anything at ``path``."""
    if is_remote(path):
        fs, inner = _resolve(path)
        return fs.exists(inner)
    return os.path.exists(path)


def isdir(path: str) -> bool:
    """Whether ``path`` is a directory. Raises OSError when that cannot be told."""
    if is_remote(path):
        fs, inner = _resolve(path)
        return fs.isdir(inner)
    return stat.S_ISDIR(_mode(path))


def isfile(path: str) -> bool:
    """Whether ``path`` is a file. Raises OSError when that cannot be told."""
    if is_remote(path):
        fs, inner = _resolve(path)
        return fs.isfile(inner)
    return stat.S_ISREG(_mode(path))


def _mode(path: str) -> int:
    # Not os.path.isfile, which takes every error for "not there": what cannot be looked at for a
    # moment (a stale network mount, a lost permission) would then pass for a checkpoint that died.
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def listdir(path: str) -> list[str]:
    """The names directly below the directory ``path``, in no order."""
    if not is_remote(path):
        return os.listdir(path)
    fs, inner = _resolve(path)
    own = inner.rstrip("/")
    # Object stores may list the folder's own marker object among its children. Compare whole
    # paths: a child may bear the name of its folder.
    children = (str(entry).rstrip("/") for entry in fs.ls(inner, detail=False))
    return [child.rsplit("/", 1)[-1] for child in children if child != own]


def join(base: str, name: str) -> str:
    """``name`` below ``base``; a ``name`` that is a URI stands for itself."""
    if is_remote(name):
        return name
    if is_remote(base):
        return f"{base.rstrip('/')}/{name.lstrip('/')}"
    return os.path.join(base, name)


def rmtree(path: str, *, last: str = "", strict: bool = False) -> None:
    """Delete the directory ``path`` and all below it, as far as that is possible; follows no link.

    A missing one is no error. Remote: any error but "not found" is raised, and there is no ``last``.

    Args:
        last: the name of a file in it that goes when all else is gone, and stays if something is not.
        strict: raise the first error, which "not found" is too, instead of going on past it.
    """
    if not is_remote(path):
        _delete_directory(path, _raise if strict else _pass_over, last=last)
        return
    fs, inner = _resolve(path)
    try:
        fs.rm(inner, recursive=True)
    except FileNotFoundError:
        pass


def _raise(error: OSError) -> None:
    raise error


def _pass_over(error: OSError) -> None:
    """What cannot be deleted stays, and as little else as possible."""


def _delete_directory(
    path: str, on_error: Callable[[OSError], None], *, last: str = "", dir_fd: int | None = None
) -> None:
    """``dir_fd`` as in ``Disk.unlink``: no link that comes meanwhile leads anywhere else."""
    try:
        name = path if dir_fd is None else os.path.basename(path)
        try:
            opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd)
        except PermissionError:
            disk.current().rmdir(path, dir_fd=dir_fd)  # one that is empty goes all the same
            return
        try:
            with os.scandir(opened) as listing:
                entries = sorted(listing, key=lambda entry: entry.name == last)
            for entry in entries:
                if entry.name == last and os.listdir(opened) != [last]:
                    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
                _delete_entry(os.path.join(path, entry.name), entry, on_error, opened)
        finally:
            os.close(opened)
        disk.current().rmdir(path, dir_fd=dir_fd)
    except OSError as error:
        on_error(error)


def _delete_entry(
    path: str, entry: os.DirEntry[str], on_error: Callable[[OSError], None], dir_fd: int
) -> None:
    try:
        if entry.is_dir(follow_symlinks=False):
            _delete_directory(path, on_error, dir_fd=dir_fd)
        else:
            disk.current().unlink(path, dir_fd=dir_fd)
    except OSError as error:
        on_error(error)


def remove_file(path: str) -> None:
    """Delete the file ``path``, durably; a missing one is no error."""
    try:
        if is_remote(path):
            fs, inner = _resolve(path)
            fs.rm_file(inner)
            return
        disk.current().unlink(path)
    except FileNotFoundError:
        return
    fsync_dir(os.path.dirname(path) or ".")


_durable: set[str] = set()
"""Directories whose names this process knows to be durable."""


def makedirs(path: str) -> None:
    """Create the directory ``path`` with its parents; one that exists is no error.

    Durable: where something is created, the names of all that is above it are synced too, once in a
    process. Whoever has made that may have failed to, or may have been killed before. Raises OSError if
    the disk refuses one, up to a mount point or what this user may not look into.
    """
    if is_remote(path):
        fs, inner = _resolve(path)
        fs.makedirs(inner, exist_ok=True)
        return
    folder = path.rstrip(os.sep) or path
    created = [] if os.path.isdir(folder) else [folder]
    parent = os.path.dirname(folder)
    while created and parent and not os.path.exists(parent):
        created.append(parent)
        parent = os.path.dirname(parent)
    if created:
        _sync_names_of(os.path.abspath(parent or os.curdir))
    for directory in reversed(created):
        try:
            disk.current().mkdir(directory)
        except OSError:
            # Another process may be just as far.
            if not os.path.isdir(directory):
                raise
        # Before the next one: else a kill would leave several of which a later run knows nothing.
        fsync_dir(os.path.dirname(directory) or os.curdir)
        _durable.add(os.path.abspath(directory))


def _sync_names_of(directory: str) -> None:
    """Make the name of ``directory``, which is there, durable, and those of the directories above it."""
    while directory not in _durable and not os.path.ismount(directory):
        try:
            fsync_dir(os.path.dirname(directory))
        except PermissionError:
            return  # one that may not be looked into belongs to somebody else, and so do those above it
        _durable.add(directory)
        directory = os.path.dirname(directory)


def remove_empty(path: str) -> None:
    """Delete the local directory ``path`` if nothing is in it, and if the disk lets it be deleted."""
    try:
        disk.current().rmdir(path)
    except OSError:
        return
    # Another process may make it anew.
    _durable.discard(os.path.abspath(path))


def rename(src: str, dst: str) -> None:
    """Give ``src``, a file or a directory, the name ``dst``.

    Local: atomic, and durable on return. ``dst`` may be a file (replaced, if ``src`` is one) or an
    empty directory; a directory that holds something is an ``OSError``. Remote: NOT atomic, a copy
    followed by a delete, so nothing may be decided by the presence of ``dst``. Raises ``ValueError``
    when one side is remote and the other is not.
    """
    if is_remote(src) != is_remote(dst):
        raise ValueError(
            f"cannot rename {src!r} to {dst!r}: one is local and the other remote. "
            "Copy the data and delete the source instead."
        )
    if is_remote(src):
        fs, inner_src = _resolve(src)
        _, inner_dst = _resolve(dst)
        fs.mv(inner_src, inner_dst, recursive=True)
        return
    disk.current().rename(src, dst)
    src_folder = os.path.dirname(os.path.abspath(src))
    dst_folder = os.path.dirname(os.path.abspath(dst))
    # The new name first: a power cut between the two syncs may leave both names, never neither.
    fsync_dir(dst_folder)
    if src_folder != dst_folder:
        fsync_dir(src_folder)


def symlink(target: str, path: str) -> None:
    """Make the local ``path`` a symbolic link to ``target``; durable."""
    disk.current().symlink(target, path)
    fsync_dir(os.path.dirname(path) or ".")


def fsync_dir(path: str) -> None:
    """Make the names inside the directory ``path`` durable; nothing to do for a remote one."""
    if not is_remote(path):
        disk.current().sync_directory(path)


def tree_size_bytes(path: str) -> int:
    """The bytes of all files at and below ``path``; raises ``FileNotFoundError`` if it does not exist.

    Files that disappear meanwhile are not counted, nor are the targets of symbolic links.
    """
    if is_remote(path):
        fs, inner = _resolve(path)
        if not fs.exists(inner):
            raise FileNotFoundError(f"cannot measure {path!r}: there is nothing at this path")
        return int(fs.du(inner, total=True))
    total = 0 if os.path.isdir(path) else os.lstat(path).st_size
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


class Room(NamedTuple):
    """What a disk has left for this user."""

    free_bytes: int
    total_bytes: int
    free_files: int | None
    """How many more files there may be; None where they are not counted."""


def room(path: str) -> Room | None:
    """What is left on the disk of ``path``, which need not exist yet; None where nobody can tell.

    Raises OSError when the disk does not answer. What a quota leaves is not in the answer of most disks.
    """
    if is_remote(path):
        return None
    place = os.path.abspath(path)
    while not os.path.exists(place) and os.path.dirname(place) != place:
        place = os.path.dirname(place)
    found = os.statvfs(place)
    if not found.f_blocks:  # as of many file systems that a program stands behind
        return None
    block = found.f_frsize or found.f_bsize
    free_files = found.f_favail if found.f_files else None
    return Room(found.f_bavail * block, found.f_blocks * block, free_files)


def free_bytes(path: str) -> int | None:
    """How much may still be written around ``path``; None where nobody can tell.

    Raises OSError when the disk does not answer.
    """
    found = room(path)
    # Some file systems that a program stands behind know how large they are, and nothing else.
    if found is None or (found.free_bytes == 0 and found.free_files is None):
        return None
    return found.free_bytes


def file_sizes(path: str, names: Iterable[str]) -> dict[str, int]:
    """Bytes of each of the files ``names`` below the directory ``path``; without those not there.

    Raises OSError when that cannot be told.
    """
    if is_remote(path):
        fs, inner = _resolve(path)
        # One listing: a question for each of thousands of files takes minutes.
        # A remembered one may be older than what other ranks wrote.
        fs.invalidate_cache(inner)
        start = f"{inner.rstrip('/')}/"
        below = fs.find(inner, detail=True)
        listed = {str(name).removeprefix(start): entry["size"] for name, entry in below.items()}
        return {name: int(listed[name]) for name in names if listed.get(name) is not None}
    there = list(_in_directory(path, names))
    # Each is a round trip on a shared disk.
    if len(there) > _FEW_FILES:
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            found = list(pool.map(_size_bytes, (os.path.join(path, name) for name in there)))
    else:
        found = [_size_bytes(os.path.join(path, name)) for name in there]
    return {name: size for name, size in zip(there, found, strict=True) if size is not None}


def _in_directory(path: str, names: Iterable[str]) -> Iterator[str]:
    """Those of ``names`` that listings show, one for each directory that they lie in."""
    listed: dict[str, set[str]] = {}
    for name in names:
        folder = os.path.dirname(name)
        if folder not in listed:
            try:
                # Many shared disks send what stat asks for along with a listing.
                with os.scandir(os.path.join(path, folder)) as entries:
                    listed[folder] = {entry.name for entry in entries}
            except (FileNotFoundError, NotADirectoryError):
                listed[folder] = set()
        if os.path.basename(name) in listed[folder]:
            yield name


def _size_bytes(path: str) -> int | None:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def read_bytes(path: str) -> bytes:
    """All of the file ``path``; raises ``FileNotFoundError`` when it is not there."""
    if is_remote(path):
        fs, inner = _resolve(path)
        return fs.cat_file(inner)
    with open(path, "rb") as file:
        return file.read()


def write_bytes(path: str, content: bytes) -> None:
    """Make ``content`` all of the file ``path``; at no moment is there less. Durable on return."""
    if is_remote(path):
        fs, inner = _resolve(path)
        fs.pipe_file(inner, content)
        return
    temporary = f"{path}.tmp"
    try:
        with disk.current().create(temporary) as file:
            file.write(content)
            disk.current().sync(file)
        rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            disk.current().unlink(temporary)  # on a disk that is full, too, nothing is left behind
        raise
