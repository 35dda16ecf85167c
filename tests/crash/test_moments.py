import itertools
import os
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.crash import moments
from tests.crash.moments import ActingDisk, draw_moment, Moment, When

AS_RANK, AS_WRITER = os.getpid(), os.getpid() + 1


class Looking(ActingDisk):
    """Notes what lies in a folder at its moments."""

    def __init__(self, folder: Path, *at: Moment, pid: int = AS_RANK) -> None:
        marks = folder / "marks"
        marks.mkdir(exist_ok=True)
        super().__init__(marks, 0, (pid,), dict(enumerate(at)))
        self._folder = folder
        self.seen: list[dict[str, bytes]] = []

    def act(self, number: int) -> None:
        files = (path for path in self._folder.iterdir() if path.is_file())
        self.seen.append({path.name: path.read_bytes() for path in files})


@pytest.fixture(autouse=True)
def nothing_counted_yet() -> Any:
    with patch.multiple(moments, _operations=itertools.count(1), _writes=itertools.count(1)):
        yield


def operation(number: int, when: When, who: str = "rank 0") -> Moment:
    return Moment(who=who, number=number, when=when)


def write(number: int, when: When) -> Moment:
    return Moment(who="rank 0", number=number, when=when, of_writes=True)


def save(disk: ActingDisk, folder: Path) -> None:
    with disk.create(str(folder / "new")) as file:
        assert file.write(b"12345") == 5
        assert file.write(b"67") == 2
        disk.sync(file)
    disk.rename(str(folder / "new"), str(folder / "done"))


def test_it_acts_right_before_or_after_the_operation_of_its_number(tmp_path: Path) -> None:
    before, after = operation(3, When.BEFORE), operation(3, When.AFTER)
    disk = Looking(tmp_path, before, after, operation(9, When.AFTER))
    save(disk, tmp_path)
    assert disk.seen == [{"new": b"1234567"}, {"done": b"1234567"}]


def test_halfway_through_a_write_half_of_it_is_there_and_in_the_end_all(tmp_path: Path) -> None:
    disk = Looking(tmp_path, write(1, When.HALFWAY), write(2, When.HALFWAY))
    save(disk, tmp_path)
    assert disk.seen == [{"new": b"12"}, {"new": b"123456"}]
    assert (tmp_path / "done").read_bytes() == b"1234567"


def test_an_operation_that_is_refused_has_a_moment_after_it_as_well(tmp_path: Path) -> None:
    disk = Looking(tmp_path, operation(1, When.AFTER))
    with pytest.raises(FileNotFoundError):
        disk.unlink(str(tmp_path / "gone"))
    assert disk.seen == [{}]


def test_only_operations_of_the_process_that_is_named_count(tmp_path: Path) -> None:
    of_both = (operation(3, When.AFTER), operation(1, When.AFTER, who="writer 0"))
    disk = Looking(tmp_path, *of_both, pid=AS_WRITER)
    save(disk, tmp_path)
    assert disk.seen == [{"new": b""}]


def test_a_process_that_replaces_another_one_does_not_act_again(tmp_path: Path) -> None:
    first, second = (Looking(tmp_path, operation(1, When.AFTER)) for _ in range(2))
    save(first, tmp_path)
    with patch.object(moments, "_operations", itertools.count(1)):
        save(second, tmp_path)
    assert len(first.seen) == 1 and not second.seen


def test_the_same_seed_draws_the_same_moments() -> None:
    draws = [
        [draw_moment(random.Random(seed), has_writer=True, num_saves=9) for seed in range(50)]
        for _ in range(2)
    ]
    assert draws[0] == draws[1] and len(set(draws[0])) > 40
    assert {moment.who for moment in draws[0]} == {"rank 0", "writer 0", "writer 1"}
