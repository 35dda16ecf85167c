"""The log of operations gives back what was put in, whoever wrote it."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.crash.operations import append, Kind, note, Operation, read_log

names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=8)
paths = st.lists(names.filter(lambda name: name not in (".", "..")), max_size=3).map("/".join)


def operations_of(kind: Kind) -> st.SearchStrategy[Operation]:
    return st.builds(
        Operation, st.integers(0, 1000), st.just(kind), paths, paths, st.binary(max_size=20)
    )


@given(st.lists(st.sampled_from(Kind).flatmap(operations_of), max_size=6), st.integers(0, 6))
def test_a_log_gives_back_what_was_added(
    tmp_path_factory: pytest.TempPathFactory, operations: list[Operation], first: int
) -> None:
    log = str(tmp_path_factory.mktemp("log") / "log")
    append(log, operations[:first])
    append(log, operations[first:])
    assert read_log(log) == operations


def test_a_name_of_any_bytes_comes_back(tmp_path: Path) -> None:
    operation = Operation(0, Kind.UNLINK, os.fsdecode(b"a/\xff\xfe"))
    append(str(tmp_path / "log"), [operation])
    assert read_log(str(tmp_path / "log")) == [operation]


def test_a_log_that_nobody_began_is_empty(tmp_path: Path) -> None:
    assert read_log(str(tmp_path / "log")) == []


def test_several_writers_lose_nothing_and_keep_their_own_order(tmp_path: Path) -> None:
    log, count, ranks = str(tmp_path / "log"), 200, range(4)

    def write(rank: int) -> None:
        for step in range(count):
            append(log, [note(rank, "begin", step, bytes(step))])

    writers = [threading.Thread(target=write, args=(rank,)) for rank in ranks]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = read_log(log)
    for rank in ranks:
        own = [int(each.target) for each in found if each.rank == rank]
        assert own == list(range(count))


@pytest.mark.parametrize("lost", [1, 3, 12, 25])
def test_a_record_that_is_cut_off_is_told(tmp_path: Path, lost: int) -> None:
    log = tmp_path / "log"
    append(str(log), [note(0, "begin", 1)])
    whole = log.stat().st_size
    append(str(log), [note(0, "acknowledged", 1)])
    log.write_bytes(log.read_bytes()[:-lost])
    with pytest.raises(ValueError, match=f"the record at byte {whole} of .* is cut off"):
        read_log(str(log))


@pytest.mark.parametrize("path", ["/a", "a/", "a//b", ".", "a/../b", "./a"])
def test_a_path_that_is_not_below_the_root_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="no path below the root"):
        Operation(0, Kind.UNLINK, path)
    with pytest.raises(ValueError, match="no path below the root"):
        Operation(0, Kind.RENAME, "a", path)


def test_a_symlink_and_a_note_may_say_anything() -> None:
    assert Operation(0, Kind.SYMLINK, "a", "/elsewhere/../b").target == "/elsewhere/../b"
    assert note(1, "begin: /a/", 10).target == "10"


def test_an_operation_is_said_in_a_line() -> None:
    assert str(Operation(1, Kind.RENAME, "a", "b")) == "rank 1 rename a -> b"
    assert str(Operation(0, Kind.WRITE, "a", content=b"123")) == "rank 0 write a (3 bytes)"
    assert str(Operation(0, Kind.SYNC_DIRECTORY, "")) == "rank 0 sync_directory the root"
