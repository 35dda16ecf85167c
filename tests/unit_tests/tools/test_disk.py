"""What changes a local disk goes through the one disk of the process, operation by operation."""

import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torchtitan.tools import disk, filesystem
from torchtitan.tools.disk import Disk

from tests.unit_tests.noting_disk import NotingDisk


@pytest.fixture
def noting(tmp_path: Path) -> Iterator[NotingDisk]:
    with disk.using(NotingDisk(tmp_path)) as noting:
        assert isinstance(noting, NotingDisk)
        yield noting


def test_a_file_is_emptied_or_must_not_be_there_and_has_the_rights_that_are_asked_for(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "file")
    for content in (b"longer", b"new"):
        with Disk().create(path) as file:
            file.write(content)
        assert Path(path).read_bytes() == content
    with pytest.raises(FileExistsError):
        Disk().create(path, exclusive=True)
    assert Path(path).read_bytes() == b"new"
    before = os.umask(0o027)
    try:
        Disk().create(str(tmp_path / "usual")).close()
        Disk().create(str(tmp_path / "own"), exclusive=True, mode=0o644).close()
    finally:
        os.umask(before)
    rights = [stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("usual", "own")]
    assert rights == [0o640, 0o640]


def test_what_python_still_holds_back_is_synced_with_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = [], os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with Disk().create(str(tmp_path / "file")) as file:
        file.write(b"few")
        Disk().sync(file)
    assert synced == [3]


def test_a_name_is_looked_for_in_the_directory_that_is_given_and_nowhere_else(
    tmp_path: Path,
) -> None:
    for folder in ("old", "other"):
        (tmp_path / folder / "inside").mkdir(parents=True)
        (tmp_path / folder / "file").touch()
    opened = os.open(tmp_path / "old", os.O_RDONLY | os.O_DIRECTORY)
    try:
        # What lies on the way is another one by now.
        os.rename(tmp_path / "old", tmp_path / "moved")
        (tmp_path / "old").symlink_to("other")
        Disk().unlink(str(tmp_path / "old/file"), dir_fd=opened)
        Disk().rmdir(str(tmp_path / "old/inside"), dir_fd=opened)
    finally:
        os.close(opened)
    assert os.listdir(tmp_path / "moved") == []
    assert sorted(os.listdir(tmp_path / "other")) == ["file", "inside"]


def test_it_is_the_one_of_all_threads_until_the_block_ends(tmp_path: Path) -> None:
    usual, outer, inner = disk.current(), NotingDisk(tmp_path), NotingDisk(tmp_path)
    seen: list[Disk] = []

    def fail_in_the_inner_one() -> None:
        with disk.using(inner):
            thread = threading.Thread(target=lambda: seen.append(disk.current()))
            thread.start()
            thread.join()
            raise KeyError

    with disk.using(outer):
        with pytest.raises(KeyError):
            fail_in_the_inner_one()
        seen.append(disk.current())
    assert seen == [inner, outer] and disk.current() is usual and type(usual) is Disk


@pytest.fixture(autouse=True)
def is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to see to the directory of the test, or to those above it."""
    monkeypatch.setattr(filesystem, "_durable", {str(tmp_path)})


def fill(root: Path) -> None:
    (root / "a/deep/empty").mkdir(parents=True)
    (root / "b").mkdir()
    for name in ("file", "a/file", "a/deep/last"):
        (root / name).touch()
    (root / "a/link").symlink_to("../b")


OPERATIONS: dict[str, tuple[Callable[[str], None], list[str]]] = {
    "makedirs": (
        lambda root: filesystem.makedirs(f"{root}/b/c/d/"),
        ["sync_directory .", "mkdir b/c", "sync_directory b", "mkdir b/c/d", "sync_directory b/c"],
    ),
    "makedirs of what is there": (lambda root: filesystem.makedirs(f"{root}/b"), []),
    "rename": (
        lambda root: filesystem.rename(f"{root}/file", f"{root}/b/file"),
        ["rename file b/file", "sync_directory b", "sync_directory ."],
    ),
    "remove_file": (
        lambda root: filesystem.remove_file(f"{root}/a/file"),
        ["unlink a/file", "sync_directory a"],
    ),
    "symlink": (
        lambda root: filesystem.symlink("../file", f"{root}/b/link"),
        ["symlink b/link", "sync_directory b"],
    ),
    "write_bytes": (
        lambda root: filesystem.write_bytes(f"{root}/file", b"new"),
        ["create file.tmp", "sync file.tmp", "rename file.tmp file", "sync_directory ."],
    ),
    "fsync_dir": (lambda root: filesystem.fsync_dir(f"{root}/a"), ["sync_directory a"]),
    "rmtree": (
        lambda root: filesystem.rmtree(f"{root}/a"),
        [
            "rmdir a/deep/empty",
            "unlink a/deep/last",
            "rmdir a/deep",
            "unlink a/file",
            "unlink a/link",
            "rmdir a",
        ],
    ),
    "rmtree with a file that goes last": (
        lambda root: filesystem.rmtree(f"{root}/a/deep", last="last"),
        ["rmdir a/deep/empty", "unlink a/deep/last", "rmdir a/deep"],
    ),
}
ANY_ORDER = {"rmtree"}
"""As the system lists the names; what is in a directory goes before it."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_the_functions_for_files_do_goes_through_it_in_this_order(
    name: str, noting: NotingDisk, tmp_path: Path
) -> None:
    fill(tmp_path)
    function, expected = OPERATIONS[name]
    function(str(tmp_path))
    if name not in ANY_ORDER:
        assert noting.noted == expected
        return
    assert sorted(noting.noted) == sorted(expected)
    gone = [line.split()[1] for line in noting.noted]
    for at, path in enumerate(gone):
        assert not any(later.startswith(f"{path}/") for later in gone[at:])


class DeadDisk(Disk):
    """Does nothing at all."""

    def __getattribute__(self, name: str) -> Any:
        raise OSError(5, f"input/output error of {name}")


@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_that_the_functions_for_files_do_goes_past_it(name: str, tmp_path: Path) -> None:
    fill(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    function, expected = OPERATIONS[name]
    with disk.using(DeadDisk()):
        if expected and not name.startswith("rmtree"):
            with pytest.raises(OSError, match="input/output"):
                function(str(tmp_path))
        else:
            function(str(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_that_cannot_get_its_name_goes_through_it_too(tmp_path: Path) -> None:
    class NoNames(NotingDisk):
        def rename(self, src: str, dst: str) -> None:
            raise OSError(5, "input/output error")

    noting = NoNames(tmp_path)
    with disk.using(noting), pytest.raises(OSError, match="input/output"):
        filesystem.write_bytes(str(tmp_path / "file"), b"new")
    assert noting.noted == ["create file.tmp", "sync file.tmp", "unlink file.tmp"]


def test_a_directory_that_another_process_makes_first_is_no_error(tmp_path: Path) -> None:
    class Slow(NotingDisk):
        def mkdir(self, path: str) -> None:
            os.mkdir(path)
            super().mkdir(path)

    noting = Slow(tmp_path)
    with disk.using(noting):
        filesystem.makedirs(str(tmp_path / "a/b"))
    # Who has made it may not have synced its name yet.
    assert noting.noted == ["sync_directory .", "sync_directory a"]
