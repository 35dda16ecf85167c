"""Of all that want the file of a lock one gets it, on every kind of disk."""

import errno
import fcntl
import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast
from unittest.mock import patch

import pytest
from torchtitan.components.checkpointer import lock_file
from torchtitan.components.checkpointer.lock_file import LocalLockFile
from torchtitan.tools import disk as disks

from tests.unit_tests.noting_disk import NotingDisk


@contextmanager
def without_links() -> Generator[None]:
    with patch.object(os, "link", side_effect=OSError(errno.EPERM, "no links here")):
        yield


@contextmanager
def without_locks() -> Generator[None]:
    with (
        patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, "no locks here")),
        patch.object(lock_file, "SETTLING_SECONDS", 0),
    ):
        yield


@contextmanager
def with_all() -> Generator[None]:
    yield


Disk = Callable[[], AbstractContextManager[None]]
DISKS = pytest.mark.parametrize("disk", [with_all, without_links, without_locks])


def two(folder: Path) -> tuple[LocalLockFile, LocalLockFile]:
    return LocalLockFile(str(folder / "lock")), LocalLockFile(str(folder / "lock"))


@DISKS
def test_the_second_one_gets_no_file_that_is_there(tmp_path: Path, disk: Disk) -> None:
    first, second = two(tmp_path)
    with disk():
        assert first.read() is None
        assert first.create(b"first") and not second.create(b"second")
        seen = second.read()
        assert seen is not None and seen.content == b"first"
        first.write(b"again")
        assert second.read() != seen
        first.remove()
        assert second.create(b"second")
    assert os.listdir(tmp_path) == ["lock"]


@DISKS
def test_only_what_was_seen_dead_is_taken_over(tmp_path: Path, disk: Disk) -> None:
    dead, first = two(tmp_path)
    _, second = two(tmp_path)
    with disk():
        assert dead.create(b"dead!")
        seen = first.read()
        assert seen is not None
        assert first.take_over(seen, b"first") and not second.take_over(seen, b"other")
        # It was not dead after all, and leaves alone what is no more its own.
        dead.write(b"alive")
        dead.remove()
        found = second.read()
        assert found is not None and found.content == b"first"
        first.write(b"later")
        assert not second.take_over(found, b"other")
        first.remove()
    assert os.listdir(tmp_path) == []


def test_one_at_a_time_takes_over_and_nobody_gives_back_meanwhile(tmp_path: Path) -> None:
    dead, first = two(tmp_path)
    assert dead.create(b"dead!")
    seen = first.read()
    assert seen is not None
    with first._locked() as (found, is_locked):
        assert found is not None and is_locked
        dead.remove()
        assert not LocalLockFile(dead.path).take_over(seen, b"other")
    assert first.read() == seen


def test_of_two_that_take_over_without_locks_the_last_one_has_it(tmp_path: Path) -> None:
    dead, first = two(tmp_path)
    _, second = two(tmp_path)
    assert dead.create(b"dead!")
    seen = first.read()
    assert seen is not None
    won = []

    def meanwhile(seconds: float) -> None:
        # The other one had looked before, and renames after the first one.
        with second._beside(b"other") as (temporary, descriptor):
            os.rename(temporary, second.path)
            second._keep(descriptor)
            won.append(seconds)

    with without_locks(), patch.object(lock_file.time, "sleep", meanwhile):
        assert not first.take_over(seen, b"first")
    found = first.read()
    assert len(won) == 1 and found is not None and found.content == b"other"
    second.remove()
    assert os.listdir(tmp_path) == []


def test_a_link_that_was_made_although_the_disk_says_it_was_there_is_its_own(
    tmp_path: Path,
) -> None:
    file, _ = two(tmp_path)
    link = os.link

    def answer_is_lost(source: str, target: str) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "the question was asked twice")

    with patch.object(os, "link", answer_is_lost):
        assert file.create(b"first")
    file.remove()
    assert os.listdir(tmp_path) == []


def test_other_errors_are_told_and_leave_nothing(tmp_path: Path) -> None:
    file, _ = two(tmp_path)
    with patch.object(os, "link", side_effect=OSError(errno.EIO, "broken")):
        with pytest.raises(OSError, match="broken"):
            file.create(b"first")
    assert os.listdir(tmp_path) == []


class Refusing(disks.Disk):
    """Deletes nothing, as a process that was killed."""

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)


def test_what_was_left_on_the_way_to_the_file_goes_when_it_is_taken(tmp_path: Path) -> None:
    dead, first = two(tmp_path)
    with disks.using(Refusing()):
        assert dead.create(b"dead!"), "what cannot be deleted is in nobody's way"
    (tmp_path / f"lock.{'0' * 32}").touch()
    (tmp_path / "lock.txt").touch()
    assert len(os.listdir(tmp_path)) == 4
    seen = first.read()
    assert seen is not None and first.take_over(seen, b"first")
    assert sorted(os.listdir(tmp_path)) == ["lock", "lock.txt"]


@pytest.mark.parametrize("is_there", [False, True])
def test_one_whose_own_was_swept_has_come_too_late(tmp_path: Path, is_there: bool) -> None:
    dead, late = two(tmp_path)
    if is_there:
        dead.create(b"dead!")
    seen = late.read()

    class Swept(disks.Disk):
        def sync(self, file: BinaryIO) -> None:
            super().sync(file)
            os.unlink(file.name)

    with disks.using(Swept()):
        assert not (late.create(b"late") if seen is None else late.take_over(seen, b"late"))
    assert late.read() == seen


def test_what_the_file_says_is_synced_before_it_has_its_name(tmp_path: Path) -> None:
    names: list[bool] = []

    class Watched(disks.Disk):
        def sync(self, file: BinaryIO) -> None:
            names.append((tmp_path / "lock").exists())
            super().sync(file)

    with disks.using(Watched()):
        assert two(tmp_path)[0].create(b"first")
    assert names == [False]


@pytest.mark.parametrize("is_there", [False, True])
def test_one_whose_own_was_swept_by_another_machine_has_come_too_late(
    tmp_path: Path, is_there: bool
) -> None:
    dead, late = two(tmp_path)
    if is_there:
        dead.create(b"dead!")
    seen = late.read()

    class Stale(disks.Disk):
        def link(self, src: str, dst: str) -> None:
            raise OSError(errno.ESTALE, "Stale file handle")

        def rename(self, src: str, dst: str) -> None:
            raise OSError(errno.ESTALE, "Stale file handle")

    with disks.using(Stale()):
        assert not (late.create(b"late") if seen is None else late.take_over(seen, b"late"))
    assert late.read() == seen


def test_without_links_it_is_synced_as_well(tmp_path: Path) -> None:
    noting = NotingDisk(tmp_path)
    with without_links(), disks.using(noting):
        assert two(tmp_path)[0].create(b"first")
    own = [line for line in noting.noted if line.split()[-1] in ("lock", ".")]
    assert own == ["create lock", "sync lock", "sync_directory ."]


class _Full:
    """A file whose content does not fit, so that closing it fails as well."""

    closed = False

    def close(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_that_cannot_be_closed_is_given_up(tmp_path: Path) -> None:
    lock = two(tmp_path)[0]
    lock._own = cast(BinaryIO, _Full())
    lock._close()
    assert lock.create(b"first")


def of_a_folder(folder: Path) -> LocalLockFile:
    return LocalLockFile(str(folder / "lock"))


def test_a_folder_that_was_made_for_the_file_goes_with_it_unless_it_holds_something(
    tmp_path: Path,
) -> None:
    new, used, old = tmp_path / "a/new", tmp_path / "used", tmp_path / "old"
    old.mkdir()
    for folder in (new, used, old):
        file = of_a_folder(folder)
        assert file.create(b"first")
        if folder is used:
            (folder / "step-1").mkdir()
        file.remove()
    assert not new.exists() and os.listdir(used) == ["step-1"] and os.listdir(old) == []


@DISKS
@pytest.mark.parametrize("is_stale", [False, True], ids=["here", "by another machine"])
def test_who_comes_when_the_folder_is_just_taken_away_makes_it_anew(
    tmp_path: Path, disk: Disk, is_stale: bool
) -> None:
    folder = tmp_path / "run"
    first, second = of_a_folder(folder), of_a_folder(folder)

    class TakenAway(disks.Disk):
        def create(self, path: str, **options: Any) -> BinaryIO:
            if folder.exists() and first._own is not None:
                first.remove()
                if is_stale:
                    raise OSError(errno.ESTALE, "Stale file handle", path)
            return super().create(path, **options)

    with disk():
        assert first.create(b"first")
        with disks.using(TakenAway()):
            assert not second.create(b"second"), "and it is to look again"
            assert not folder.exists()
            assert second.create(b"second")
    assert os.listdir(folder) == ["lock"]
    second.remove()
    assert not folder.exists()


def test_a_disk_that_refuses_the_file_or_the_folder_is_left_without_it(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    for operation in ("create", "sync", "sync_directory"):
        file = of_a_folder(tmp_path / "run")
        with patch.object(disks.Disk, operation, side_effect=full):
            with pytest.raises(OSError, match="No space left"):
                file.create(b"first")
        assert os.listdir(tmp_path) == [], operation


def test_of_a_folder_that_is_gone_with_its_disk_nothing_is_made_in_its_place(
    tmp_path: Path,
) -> None:
    file = of_a_folder(tmp_path / "disk/run")
    assert file.create(b"first")
    (tmp_path / "disk").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        file.create(b"first")
    assert os.listdir(tmp_path) == ["away"]
