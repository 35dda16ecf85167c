"""Digest the content of a corpus, reading a large file once and not at every start.

A note per file in the cache folder keeps its digest together with size, inode and change times.
The one fact to know: a note is written only for a file that was left alone for a while before it
was read, because a change within the clock's tick would leave the times as they were.

    (kind, path) -> note still true? -> digest of each file -> digest of the corpus
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from torchtitan.components.data.progress import byte_progress

_BLOCK_BYTES = 8 * 1024 * 1024
# Coarser than the time stamps of any file system in use (FAT: 2 s).
_SETTLED_SECONDS = 3


def digest_files(files: Sequence[tuple[str, Path]], cache_folder: Path) -> str:
    """A digest of the files' kinds and contents in order, whatever they are called."""
    notes = cache_folder / "digests"
    digests = {path: _noted(path, notes) for _, path in files}
    if not all(digests.values()):
        digests = _read_missing([path for _, path in files], notes)
    corpus = hashlib.sha256()
    for kind, path in files:
        corpus.update(f"{kind}:{digests[path]}\n".encode())
    return corpus.hexdigest()[:32]


def remembered_digest(
    files: Sequence[Path], name: str, cache_folder: Path, compute: Callable[[], str]
) -> str:
    """``compute()``, remembered under ``name`` for as long as ``files`` stay as they are.

    Without files nothing tells of a change, and it is computed each time.
    """
    if not files:
        return compute()
    notes = cache_folder / "digests"
    note = notes / (hashlib.sha256(name.encode()).hexdigest()[:32] + ".json")
    identity = [[str(path), *_identity(path)] for path in files]
    if (found := _read_note(note, identity)) is not None:
        return found
    lock = _lock(notes)
    if lock is None:
        return compute()
    try:
        digest = _read_note(note, identity) or compute()
        _write_note(note, identity, digest)
        return digest
    finally:
        lock.release()


def _lock(notes: Path) -> FileLock | None:
    """Held by one process of a machine: all its ranks would otherwise read the whole corpus.

    None where the folder cannot be written. Its cache may still hold the tokens; the digest then
    costs a read.
    """
    try:
        notes.mkdir(parents=True, exist_ok=True)
        lock = FileLock(notes / "lock")
        lock.acquire()
        return lock
    except OSError:
        return None


def watch_files(paths: Sequence[Path]) -> Callable[[], None]:
    """Note how ``paths`` are now; what is returned raises ValueError if they are not so any more.

    Looks at size, time of change and inode, not at the content.
    """
    before = {path: _content_identity(path) for path in paths}

    def refuse_changes() -> None:
        changed = sorted(str(path) for path in paths if _content_identity(path) != before[path])
        if changed:
            raise ValueError(
                f"{', '.join(changed)} changed while it was read; start again when it is complete."
            )

    return refuse_changes


def _content_identity(path: Path) -> tuple[int, int, int] | None:
    # Without the time of the last change of the inode, which a new link or owner moves as well.
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_ino, found.st_mtime_ns


def _read_missing(paths: Sequence[Path], notes: Path) -> dict[Path, str]:
    lock = _lock(notes)
    if lock is None:
        return {path: _noted(path, notes) or _read(path)[0] for path in paths}
    try:
        digests = {}
        for path in paths:
            digests[path] = _noted(path, notes) or _read_and_note(path, notes)
        return digests
    finally:
        lock.release()


def _read_and_note(path: Path, notes: Path) -> str:
    digest, settled = _read(path)
    if settled:
        _write_note(_note_file(path, notes), _identity(path), digest)
    return digest


def _write_note(note: Path, identity: list[Any], digest: str) -> None:
    temporary = note.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_text(json.dumps({"identity": identity, "digest": digest}))
        os.replace(temporary, note)
    except OSError:
        # A full disk: without the note the next start reads the file again.
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> tuple[str, bool]:
    """The digest, and whether the file stood still long enough for a note to be safe."""
    before = _identity(path)
    started = time.time()
    digest = hashlib.sha256()
    bar = byte_progress(path.stat().st_size, f"reading {path.name}", delay_seconds=2)
    with bar, path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            bar.update(len(block))
    newest = max(before[2], before[3]) / 1e9
    settled = before == _identity(path) and newest < started - _SETTLED_SECONDS
    return digest.hexdigest(), settled


def _identity(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def _note_file(path: Path, notes: Path) -> Path:
    return notes / (hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32] + ".json")


def _noted(path: Path, notes: Path) -> str | None:
    try:
        return _read_note(_note_file(path, notes), _identity(path))
    except OSError:
        return None


def _read_note(file: Path, identity: list[Any]) -> str | None:
    try:
        note = json.loads(file.read_text())
        return note["digest"] if note["identity"] == identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
