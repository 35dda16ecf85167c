"""A file that has each piece as a whole or not at all."""

import errno
import os
from pathlib import Path

import pytest
from torchtitan.observability.growing_file import GrowingFile, is_full

from tests.unit_tests.small_disk import fill, small_disk


def test_its_folder_is_made_and_what_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    for piece in (b"first\n", b"second\n"):
        file = GrowingFile(str(path))
        file.append(piece)
        file.close()
    file.append(b"third\n")  # closed, and opened again
    file.close()
    file.close()
    assert path.read_bytes() == b"first\nsecond\nthird\n"


def test_a_piece_that_fits_only_in_part_leaves_no_byte(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        file = GrowingFile(str(disk / "file"))
        file.append(b"whole\n")
        ballast = fill(disk, but_bytes=4096)
        with pytest.raises(OSError, match="No space left") as raised:
            file.append(bytes(20_000))
        assert is_full(raised.value)
        assert (disk / "file").read_bytes() == b"whole\n"
        ballast.unlink()
        file.append(b"next\n")
        file.close()
        assert (disk / "file").read_bytes() == b"whole\nnext\n"


def test_a_full_disk_is_told_from_other_trouble() -> None:
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    assert all(is_full(OSError(number, os.strerror(number))) for number in full)
    others = (OSError(errno.EIO, "I/O error"), PermissionError(errno.EACCES, "no"), ValueError())
    assert not any(is_full(error) for error in others)
