"""The rule, over values: what stays besides the newest, and what never counts."""

import queue
from unittest.mock import patch

import pytest
from hypothesis import given, strategies as st
from torchtitan.components.checkpointer import retention
from torchtitan.components.checkpointer.base import purge_thread
from torchtitan.components.checkpointer.retention import Entry, expired, Purge, Retention, State

DIED, HALF = State.UNFINISHED, State.HALF_DELETED


def plan(*entries: Entry, keep: int = 2, every: int = 0, is_save_in_flight: bool = False) -> Purge:
    rule = Retention(keep_latest=keep, keep_every=every)
    return rule.plan(entries, is_save_in_flight=is_save_in_flight)


def at(step: int, state: State = State.COMPLETE, **facts: bool) -> Entry:
    return Entry(step=step, path=str(step), state=state, **facts)


entries = st.lists(
    st.builds(
        at,
        st.integers(0, 12),
        st.sampled_from(State),
        is_full=st.booleans(),
        is_pinned=st.booleans(),
        is_protected=st.booleans(),
    ),
    unique_by=lambda entry: entry.step,
)


@given(entries, st.integers(2, 4), st.sampled_from([0, 3]), st.booleans())
def test_k_minus_one_of_each_kind_and_all_that_was_asked_for_stay(
    found: list[Entry], keep: int, every: int, is_save_in_flight: bool
) -> None:
    purge = plan(*found, keep=keep, every=every, is_save_in_flight=is_save_in_flight)
    gone = {*purge.expired, *purge.abandoned, *purge.half_deleted}
    stays = [entry for entry in found if entry.path not in gone]
    for kind in (True, False):
        of_kind = [
            entry
            for entry in sorted(found, key=lambda entry: entry.step)
            if entry.state is State.COMPLETE and entry.is_full is kind and entry.step != 0
        ]
        places = keep - 1 if kind else keep
        assert all(entry in stays for entry in of_kind[-places:])
    for entry in found:
        if entry.is_pinned or entry.is_protected:
            assert entry in stays
        if entry.state is State.COMPLETE and (entry.step == 0 or every and entry.step % every == 0):
            assert entry in stays
        if entry.state is DIED and is_save_in_flight:
            assert entry in stays


@given(entries, st.integers(2, 4), st.booleans())
def test_what_is_not_complete_never_pushes_out_what_is(
    found: list[Entry], keep: int, is_save_in_flight: bool
) -> None:
    complete = [entry for entry in found if entry.state is State.COMPLETE]
    alone = plan(*complete, keep=keep).expired
    beside = plan(*found, keep=keep, is_save_in_flight=is_save_in_flight).expired
    assert set(beside) <= set(alone)


def test_the_next_save_has_a_place_and_without_one_in_sight_k_stay() -> None:
    three = at(10), at(20), at(30)
    assert plan(*three).expired == ["10", "20"]
    assert plan(*three, is_save_in_flight=True).expired == ["10"]
    assert plan(*three, at(40, DIED), is_save_in_flight=True).expired == ["10", "20"]
    assert plan(*three, at(15, DIED), is_save_in_flight=True).expired == ["10"]


def test_of_saves_that_died_all_go_but_those_that_are_pinned() -> None:
    purge = plan(at(10), at(20, DIED), at(30, DIED, is_pinned=True), at(40, HALF))
    assert purge == Purge(abandoned=["20"], half_deleted=["40"], expired=[])


@pytest.mark.parametrize("every", [0, 2])
def test_with_nothing_to_expire_nothing_does(every: int) -> None:
    assert plan(*(at(step) for step in range(20)), keep=0, every=every).expired == []


def test_multiples_stay_and_take_no_place_from_newer_ones() -> None:
    found = [at(step) for step in range(1, 9)]
    assert plan(*found, keep=3, every=3).expired == ["1", "2", "4", "5"]


def test_weights_expire_among_themselves() -> None:
    found = [at(step, is_full=step % 2 == 0) for step in range(1, 9)]
    assert plan(*found, keep=2).expired == ["1", "2", "3", "4", "6"]


@given(st.lists(st.integers()), st.integers(0, 20))
def test_what_expires_is_the_oldest_and_k_stay(items: list[int], keep: int) -> None:
    gone = expired(items, keep)
    assert gone == items[: len(gone)]
    assert len(items) - len(gone) == min(keep, len(items))


def test_choosing_leaves_the_list_alone() -> None:
    items = (1, 2, 3)
    assert expired(items, 2) == [1]
    assert expired(items, 0) == [1, 2, 3]


def test_the_thread_outlives_a_failure_and_ends_at_none() -> None:
    calls = []

    def remove(path: str) -> None:
        calls.append(path)
        if path == "fails":
            raise OSError("busy")

    waiting: queue.Queue[str | None] = queue.Queue()
    for item in ("fails", "succeeds", None, "ignored"):
        waiting.put(item)
    with patch.object(retention, "logger") as logger:
        purge_thread(waiting, remove)
    assert calls == ["fails", "succeeds"]
    assert waiting.get_nowait() == "ignored"
    (message,) = logger.warning.call_args.args
    assert "fails" in message and "busy" in message
