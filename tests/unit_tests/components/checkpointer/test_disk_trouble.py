"""What a disk has refused, in plain words, however the error has come here."""

import errno
import os
from collections import namedtuple
from pathlib import Path
from unittest.mock import patch

import pytest
from torchtitan.components.checkpointer.disk_trouble import mib, told_in_words
from torchtitan.components.checkpointer.errors import cause_of
from torchtitan.components.checkpointer.in_flight import save_error
from torchtitan.components.checkpointer.storage import FilesystemStorage
from torchtitan.tools import filesystem

Stats = namedtuple("Stats", "f_frsize f_bsize f_blocks f_bavail f_files f_favail")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "The disk of {} is full: "),
        (errno.EDQUOT, "The quota on the disk of {} is used up"),
        (errno.EROFS, "The disk of {} is mounted read-only"),
        (errno.EACCES, "see to owner and permissions of {}"),
        (errno.EPERM, "see to owner and attributes of {}"),
        (errno.EIO, "The disk of {} does not work as it should"),
    ],
)
def test_the_error_of_a_disk_is_told_in_plain_words(
    tmp_path: Path, number: int, words: str
) -> None:
    error = OSError(number, os.strerror(number), str(tmp_path / "file"))
    folder = str(tmp_path)
    said = words.format(folder)
    assert said in told_in_words(cause_of(error), folder)
    # As it comes from another rank, or from a process that writes: as text in another error.
    assert said in told_in_words(f"RuntimeError: rank 1: {error}", folder)
    text = str(save_error("Saving", error, 1, folder))
    assert text.startswith(f"Saving failed: {cause_of(error)}. ")
    assert said in text and ". Older checkpoints are untouched" in text


def test_an_error_of_another_kind_is_not_explained() -> None:
    assert told_in_words("ValueError('no such thing')", "/run") == ""
    text = str(save_error("Saving", ValueError("no"), 1, "/run"))
    assert text.startswith("Saving failed: ValueError('no'). Older checkpoints are untouched")


def test_a_full_disk_tells_how_much_is_free_and_that_files_have_run_out() -> None:
    cause = os.strerror(errno.ENOSPC)
    with patch.object(os, "statvfs", return_value=Stats(4096, 4096, 2**20, 2**19, 100, 0)):
        assert told_in_words(cause, "/") == (
            "The disk of / is full: 2.00 GiB of 4.00 GiB are free now, but no more files can be made."
        )
    with patch.object(os, "statvfs", return_value=Stats(4096, 4096, 2**20, 0, 0, 0)):
        assert told_in_words(cause, "/") == (
            "The disk of / is full: 0.0 MiB of 4.00 GiB are free now."
        )


def test_a_disk_that_does_not_tell_is_full_all_the_same() -> None:
    cause, unknown = os.strerror(errno.ENOSPC), "how much of it is free is not known"
    assert unknown in told_in_words(cause, "s3://bucket/run")
    with patch.object(os, "statvfs", side_effect=OSError(errno.ESTALE, "stale")):
        assert unknown in told_in_words(cause, "/")


def test_the_room_of_a_folder_that_is_not_there_yet_is_that_of_the_disk_it_will_be_on(
    tmp_path: Path,
) -> None:
    found, there = filesystem.room(str(tmp_path / "a/b")), os.statvfs(tmp_path)
    assert found is not None and found.total_bytes == there.f_blocks * there.f_frsize


def test_a_disk_that_says_nothing_but_zeros_has_an_unknown_room(tmp_path: Path) -> None:
    with patch.object(os, "statvfs", return_value=Stats(4096, 4096, 0, 0, 0, 0)):
        assert filesystem.room(str(tmp_path)) is None


@pytest.mark.parametrize("num_files, free", [(0, None), (100, 0)])
def test_a_disk_that_is_full_and_counts_no_files_may_not_count_at_all(
    tmp_path: Path, num_files: int, free: int | None
) -> None:
    with patch.object(os, "statvfs", return_value=Stats(4096, 4096, 2**20, 0, num_files, 0)):
        assert FilesystemStorage().free_bytes(str(tmp_path)) == free


def test_sizes_are_told_in_a_unit_that_can_be_read() -> None:
    assert [mib(0), mib(3 * 2**19), mib(2**30), mib(3 * 2**40)] == [
        "0.0 MiB",
        "1.5 MiB",
        "1.00 GiB",
        "3072.00 GiB",
    ]
