"""Digest the content of corpus files, reading a large file once and not at every start.

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
    try:
        notes.mkdir(parents=True, exist_ok=True)
        lock = FileLock(notes / "lock")
        lock.acquire()
    except OSError:
        # A cache that cannot be written may still hold the tokens; the digest then costs a read.
        return {path: _noted(path, notes) or _read(path)[0] for path in paths}
    # Ranks of one machine would otherwise all read the whole corpus.
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
        note = _note_file(path, notes)
        temporary = note.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"identity": _identity(path), "digest": digest}))
        os.replace(temporary, note)
    return digest


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
        note = json.loads(_note_file(path, notes).read_text())
        return note["digest"] if note["identity"] == _identity(path) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
