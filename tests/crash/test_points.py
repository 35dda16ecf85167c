"""Crash points come each once, with what had been said by then, for disks and for object stores."""

import time
from collections.abc import Sequence

import pytest

from tests.crash.operations import Kind, MEET, note, Operation
from tests.crash.points import crash_points, CrashPoint, FAMILIES, KILLED, object_store_points
from tests.crash.test_model import do, rename, sync, sync_directory, written
from tests.crash.tree import EMPTY, from_values, lay_out, read_tree, to_values


def saved(step: int, num_files: int, rank: int = 0, syncs: bool = True) -> list[Operation]:
    """A save as a back end with a temporary name makes it, and what is said of it."""
    staging = f"tmp_step-{step}"
    history = [note(rank, "begin", step), do(Kind.MKDIR, staging), sync_directory("")]
    for number in range(num_files):
        path = f"{staging}/{number}"
        history += written(path, bytes([step % 256, number]) * 50)
        history += [sync(path)] if syncs else []
    history += [sync_directory(staging), rename(staging, f"step-{step}"), sync_directory("")]
    return [*history, note(rank, "acknowledged", step)]


def deleted(step: int, num_files: int) -> list[Operation]:
    """As rmtree does it: nothing in between is synced."""
    history = [do(Kind.UNLINK, f"step-{step}/{number}") for number in range(num_files)]
    return [*history, do(Kind.RMDIR, f"step-{step}")]


def keys(points: Sequence[CrashPoint]) -> list[tuple[bytes, tuple[Operation, ...]]]:
    return [(point.tree.digest, point.notes) for point in points]


def test_each_state_comes_once_for_what_was_said_by_then() -> None:
    points = list(crash_points([*saved(1, 3), *saved(2, 3), *deleted(1, 3)]))
    assert len(set(keys(points))) == len(points)
    # A state that was there before as well is judged in another way once it was acknowledged.
    said = {point.notes[-1].path for point in points if "step-1" in point.tree.entries}
    assert said == {"begin", "acknowledged"}


def test_a_point_says_what_had_been_said_by_then_and_no_more() -> None:
    history = [note(0, "begin", 1), *written("a", b"x"), note(0, MEET), note(0, "acknowledged", 1)]
    points = list(crash_points(history))
    assert {(point.number, len(point.notes)) for point in points} == {
        (1, 1),
        (2, 1),
        (3, 1),
        (5, 2),
    }
    last = [point for point in points if point.number == 5]
    assert all(point.notes == (history[0], history[4]) for point in last)
    assert str(points[-1]).startswith("after operation 5 (rank 0 note acknowledged -> 1), ")


def test_who_of_two_ranks_said_something_first_makes_no_other_point() -> None:
    said = [note(0, "acknowledged", 1), note(1, "acknowledged", 1)]
    seen: set[object] = set()
    first = list(crash_points([*written("a", b"x"), *said], EMPTY, seen))
    again = list(crash_points([*written("a", b"x"), *reversed(said)], EMPTY, seen))
    assert first[-1].notes == tuple(said)
    # That rank 1 alone had said it is new, that both had is not.
    assert again and all(point.notes == (said[1],) for point in again)


def test_points_are_of_every_kind_and_in_the_order_of_the_history() -> None:
    history = saved(1, 2, syncs=False)
    # What was said before it was durable is what a crash makes untrue.
    del history[-2]
    points = list(crash_points(history))
    assert {point.family for point in points} == set(FAMILIES)
    assert all(point.operation == history[point.number - 1] for point in points)
    assert [point.number for point in points] == sorted(point.number for point in points)


def test_a_killed_run_leaves_all_that_it_has_done() -> None:
    killed = [point for point in crash_points(saved(1, 2)) if point.variant == KILLED]
    found = [sorted(point.tree.entries) for point in killed]
    assert found[0] == [] and found[1] == ["tmp_step-1"] and found[-1] == ["step-1"]
    assert to_values(killed[-1].tree) == {"step-1": {"0": b"\1\0" * 50, "1": b"\1\1" * 50}}


def test_a_history_begins_with_what_an_earlier_one_left() -> None:
    points = list(crash_points(deleted(1, 2), from_values({"step-1": {"0": b"x", "1": b"y"}})))
    found = [to_values(point.tree) for point in points]
    assert {"step-1": {"0": b"x", "1": b"y"}} in found and {} in found
    assert {"step-1": {"0": b"x"}} in found and {"step-1": {"1": b"y"}} in found


def test_an_object_is_put_whole_and_in_order() -> None:
    history = [
        note(0, "begin", 1),
        do(Kind.PUT, "run/step-1/0", content=b"data"),
        do(Kind.PUT, "run/step-1/manifest", content=b"all"),
        note(0, "acknowledged", 1),
        do(Kind.DELETE, "run/step-1/manifest"),
        do(Kind.DELETE, "run/step-1/0"),
        do(Kind.DELETE, "run/never-there"),
    ]
    points = list(object_store_points(history))
    data, whole = {"step-1": {"0": b"data"}}, {"step-1": {"0": b"data", "manifest": b"all"}}
    assert [to_values(point.tree) for point in points] == [
        *({}, {"run": data}, {"run": whole}),
        *({"run": whole}, {"run": data}, {}),
    ]
    assert [len(point.notes) for point in points] == [1, 1, 1, 2, 2, 2]
    assert {point.variant for point in points} == {KILLED}
    again = list(object_store_points(history[4:], points[3].tree))
    assert [to_values(point.tree) for point in again] == [{"run": data}, {}]


def test_an_object_store_is_asked_for_nothing_else() -> None:
    with pytest.raises(ValueError, match="an object store has no such operation: rank 0 rename"):
        list(object_store_points([rename("a", "b")]))


def test_all_points_of_a_long_history_take_about_a_second() -> None:
    history: list[Operation] = []
    for step in range(1, 8):
        history += saved(step, 11)
        history += deleted(step - 2, 11) if step > 2 else []
    assert len(history) > 300
    # Time of this process alone, and ten times what it takes here: a loaded machine is no failure.
    before = time.process_time()
    points = list(crash_points(history))
    assert time.process_time() - before < 15
    assert len(points) > 1000


def test_a_tree_shares_what_has_not_changed() -> None:
    *_, before, last = [
        point for point in crash_points([*saved(1, 3), *saved(2, 3)]) if point.variant == KILLED
    ]
    assert before.tree is not last.tree or before.notes != last.notes
    assert before.tree.entries["step-1"] is last.tree.entries["step-1"]


def test_a_point_can_be_laid_out(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("points")
    for number, point in enumerate(crash_points(saved(1, 3, syncs=False))):
        lay_out(point.tree, folder / str(number))
        assert read_tree(folder / str(number)).digest == point.tree.digest
