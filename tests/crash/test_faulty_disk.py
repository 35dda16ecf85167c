"""The disk that fails does so at the place that it is told, and leaves what it says."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torchtitan.tools.disk import Disk

from tests.crash.faults import Fault, Faults, faults_at, FaultyDisk, few_writes, How, Place
from tests.crash.operations import Kind

CONTENT = b"0123456789"


def save(disk: Disk, root: Path) -> None:
    """A few operations of each kind that there is."""
    folder = f"{root}/folder"
    disk.mkdir(folder)
    with disk.create(f"{folder}/a.tmp") as file:
        for start in (0, 4):
            file.write(CONTENT[start : start + 4])
        file.write(CONTENT[8:])
        disk.sync(file)
    disk.rename(f"{folder}/a.tmp", f"{folder}/a")
    disk.sync_directory(folder)
    disk.link(f"{folder}/a", f"{folder}/b")
    disk.symlink("a", f"{folder}/c")
    for name in "abc":
        disk.unlink(f"{folder}/{name}")
    disk.rmdir(folder)


def left(root: Path) -> dict[str, bytes]:
    files = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def places(root: Path) -> list[Place]:
    disk = FaultyDisk(str(root))
    save(disk, root)
    return disk.faults.seen


def test_every_operation_is_a_place_of_its_own(tmp_path: Path) -> None:
    found = places(tmp_path)
    assert len(set(found)) == len(found) == 14
    assert {each.kind for each in found} == set(Kind) - {Kind.PUT, Kind.DELETE, Kind.NOTE}
    writes = [each.time for each in found if each.kind is Kind.WRITE]
    assert writes == [1, 2, 3]
    assert len(few_writes(found)) == 14


def test_of_many_writes_to_a_file_three_are_chosen() -> None:
    writes = [Place(Kind.WRITE, "a", time) for time in range(1, 101)]
    assert [each.time for each in few_writes([*writes, Place(Kind.WRITE, "b")])] == [1, 50, 100, 1]


def test_a_fault_comes_where_it_is_told_and_nowhere_else(tmp_path: Path) -> None:
    for number, at in enumerate(places(tmp_path)):
        root = tmp_path / str(number)
        root.mkdir()
        faults = Faults(Fault(at, How.REFUSED, errno.ENOSPC))
        with pytest.raises(OSError) as raised:
            save(FaultyDisk(str(root), faults), root)
        assert raised.value.errno == errno.ENOSPC and faults.raised == faults.seen[-1:] == [at]


def fail(root: Path, at: Place, how: How, again: int = 0) -> Faults:
    faults = Faults(Fault(at, how, errno.EIO, again))
    with pytest.raises(OSError, match="Input/output error"):
        save(FaultyDisk(str(root), faults), root)
    return faults


@pytest.mark.parametrize(
    ("at", "how", "then"),
    [
        (Place(Kind.CREATE, "folder/a.tmp"), How.REFUSED, {}),
        (Place(Kind.CREATE, "folder/a.tmp"), How.DONE, {"folder/a.tmp": b""}),
        (Place(Kind.WRITE, "folder/a.tmp", 2), How.HALF, {"folder/a.tmp": CONTENT[:6]}),
        (Place(Kind.WRITE, "folder/a.tmp", 2), How.DONE, {"folder/a.tmp": CONTENT[:8]}),
        (Place(Kind.SYNC, "folder/a.tmp"), How.REFUSED, {"folder/a.tmp": CONTENT}),
        (Place(Kind.SYNC, "folder/a.tmp"), How.LOST, {"folder/a.tmp": bytes(10)}),
        (Place(Kind.RENAME, "folder/a.tmp"), How.DONE, {"folder/a": CONTENT}),
    ],
    ids=str,
)
def test_what_has_happened_is_what_is_left(
    tmp_path: Path, at: Place, how: How, then: dict[str, bytes]
) -> None:
    fail(tmp_path, at, how)
    assert left(tmp_path) == then


def errors(faults: Faults, root: Path) -> list[bool]:
    """Which of a few more operations are refused."""
    disk = FaultyDisk(str(root), faults)

    def is_refused(act: Callable[[], object]) -> bool:
        try:
            act()
        except OSError:
            return True
        return False

    (root / "there").touch()
    return [
        is_refused(lambda: disk.mkdir(f"{root}/new")),
        is_refused(lambda: disk.rename(f"{root}/there", f"{root}/then")),
        is_refused(lambda: disk.unlink(f"{root}/then")),
    ]


def test_a_disk_may_be_full_or_gone_from_then_on_until_it_is_mended(tmp_path: Path) -> None:
    at = Place(Kind.MKDIR, "folder")
    assert errors(fail(tmp_path, at, How.REFUSED), tmp_path) == [False, False, False]
    os.rmdir(tmp_path / "new")
    assert errors(fail(tmp_path, at, How.FULL), tmp_path) == [True, False, False]
    faults = fail(tmp_path, at, How.GONE)
    assert errors(faults, tmp_path) == [True, True, True]
    faults.end()
    assert errors(faults, tmp_path) == [False, False, False]


def test_one_more_operation_may_be_refused_later(tmp_path: Path) -> None:
    faults = fail(tmp_path, Place(Kind.MKDIR, "folder"), How.REFUSED, again=2)
    assert errors(faults, tmp_path) == [False, True, True]
    assert [each.kind for each in faults.raised] == [Kind.MKDIR, Kind.RENAME]


def test_what_makes_a_name_unique_makes_no_other_place(tmp_path: Path) -> None:
    disk = FaultyDisk(str(tmp_path))
    for number in ("0" * 32, "f" * 32):
        disk.create(f"{tmp_path}/.run.lock.{number}").close()
    assert disk.faults.seen == [Place(Kind.CREATE, ".run.lock.*", time) for time in (1, 2)]


def test_what_lies_elsewhere_never_fails(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    faults = Faults(Fault(Place(Kind.MKDIR, "../other"), How.GONE, errno.EIO))
    disk = FaultyDisk(str(tmp_path / "root"), faults)
    disk.mkdir(str(tmp_path / "other"))
    assert not faults.seen


def test_each_operation_can_fail_in_several_ways(tmp_path: Path) -> None:
    for at in places(tmp_path):
        found = list(faults_at(at))
        errors = {errno.EIO, errno.ENOSPC}
        errors |= {errno.EINVAL} if at.kind is Kind.SYNC_DIRECTORY else set()
        assert {each.number for each in found} == errors
        has_more = at.kind in (Kind.WRITE, Kind.SYNC, Kind.SYNC_DIRECTORY)
        assert len(set(found)) == len(found) == (6 if has_more else 5)
