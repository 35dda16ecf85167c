"""A disk of a few kilobytes, for tests that need a full one: a tmpfs, where the machine lets us mount it."""

import errno
import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, num_kibibytes: int) -> Generator[Path]:
    """Mount one at ``folder``, which is made; skips the test where that is not allowed."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={num_kibibytes}k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no small disk can be mounted here: {error}")
    if done.returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        # Lazily: a file that a failed test left open must not keep the mount.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, *, but_bytes: int = 0) -> Path:
    """Take all room but ``but_bytes``, whole pages; deleting the returned file gives it back."""
    path = disk / "ballast"
    with open(path, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
        file.truncate(os.fstat(file.fileno()).st_size - but_bytes)
    return path
