"""What is owed after what was asked and answered, from the first save to the third run."""

from typing import Any

from tests.crash.operations import note, Operation
from tests.crash.promises import ACKNOWLEDGED, BEGUN, facts, LOADED, PINNED, Promises, Saved

KEEP = 2


def begun(step: int, by: str = "first", **known: Any) -> Operation:
    return note(0, BEGUN, step, facts(by=by, keep=known.pop("keep", KEEP), **known))


def done(step: int, by: str = "first") -> Operation:
    return note(0, ACKNOWLEDGED, step, facts(by=by))


def loaded(step: int, by: str = "first", *, is_asked: bool = False) -> Operation:
    return note(0, LOADED, step, facts(by=by, is_asked=is_asked))


def saved(*steps: int, by: str = "first", keep: int = KEEP) -> list[Operation]:
    return [each for step in steps for each in (begun(step, by, keep=keep), done(step, by))]


def after(*notes: Operation) -> Promises:
    return Promises().after(notes)


def states(*steps: int, by: str = "first") -> frozenset[Saved]:
    return frozenset(Saved(step, by) for step in steps)


def test_before_the_first_answer_a_run_may_begin_anew_or_with_what_was_begun() -> None:
    promises = after(loaded(0, ""), begun(1))
    assert promises.may_begin_anew and promises.may_load == states(1) and not promises.owed
    promises = after(loaded(0, ""), *saved(1))
    assert not promises.may_begin_anew and promises.may_load == promises.owed == states(1)


def test_retention_releases_the_oldest_when_the_next_save_begins() -> None:
    promises = after(*saved(1, 2))
    assert promises.owed == states(1, 2) and promises.may_load == states(2)
    promises = promises.after([begun(3)])
    assert promises.owed == states(2) and promises.may_load == states(2, 3)
    assert promises.after([done(3)]).may_load == states(3)


def test_the_last_save_and_a_run_that_keeps_all_release_nothing() -> None:
    assert after(*saved(1, 2), begun(3, is_last=True)).owed == states(1, 2)
    assert after(*saved(1, 2, 3, keep=0)).owed == states(1, 2, 3)


def test_a_pinned_one_is_not_released() -> None:
    promises = after(*saved(1, 2), note(0, PINNED, 1), *saved(3, 4))
    assert promises.owed == states(1, 3, 4)


def test_of_a_step_that_is_saved_again_the_older_is_owed_until_the_newer_is_complete() -> None:
    promises = after(*saved(1, 2, keep=0), begun(2, "second", keep=0))
    assert promises.owed == states(1, 2)
    assert promises.may_load == states(2) | states(2, by="second")
    promises = promises.after([done(2, "second")])
    assert promises.owed == states(1) | states(2, by="second")
    assert promises.may_load == states(2, by="second")


def test_a_late_answer_on_another_rank_is_not_taken_for_that_of_the_next_save() -> None:
    promises = after(*saved(2), begun(2, "second"), done(2, "first"))
    assert promises.counting == states(2)


def test_a_pinned_one_that_is_saved_again_is_owed_for_ever() -> None:
    promises = after(*saved(2), note(0, PINNED, 2), *saved(2, by="second"))
    assert promises.left == states(2) and promises.counting == states(2, by="second")


def test_weights_are_owed_and_never_gone_on_from() -> None:
    promises = after(*saved(1, 2), begun(3, is_last=True, is_full=False), done(3))
    assert promises.may_load == states(2)
    assert promises.owed == states(1, 2) | {Saved(3, "first", is_full=False)}


def test_what_was_unsure_is_owed_once_a_run_has_gone_on_from_it() -> None:
    promises = after(*saved(1, 2), begun(3), loaded(3))
    assert promises.owed == states(2, 3) and promises.may_load == states(3)


def test_what_was_unsure_is_nothing_once_a_run_has_passed_it_over() -> None:
    promises = after(*saved(1, 2), begun(3), loaded(2))
    assert promises.may_load == states(2) and not promises.unsure


def test_going_back_changes_nothing_before_the_first_save() -> None:
    promises = after(*saved(1, 2, 3, keep=0), loaded(1, is_asked=True))
    assert promises.may_load == states(3) and promises.owed == states(1, 2, 3)


def test_after_going_back_the_other_history_may_be_loaded_until_a_save_is_complete() -> None:
    going = after(*saved(1, 2, 3, keep=0), loaded(1, is_asked=True), begun(2, "second"))
    assert going.may_load == states(1, 2, 3) | states(2, by="second")
    assert going.owed == states(1, 2, 3)
    gone = going.after([done(2, "second")])
    assert gone.may_load == states(2, by="second")
    assert gone.left == states(2, 3) and gone.counting == states(1) | states(2, by="second")


def test_what_was_put_aside_unsure_is_owed_once_a_run_has_gone_on_from_it() -> None:
    going = after(*saved(1), begun(2), loaded(1, is_asked=True), begun(2, "second", keep=0))
    promises = going.after([loaded(2)])
    assert promises.counting == states(1, 2) and promises.may_load == states(2)


def test_a_run_that_finds_a_history_half_put_aside_goes_on_in_it() -> None:
    going = after(*saved(1, 2, 3, keep=0), loaded(1, is_asked=True), begun(2, "second"))
    promises = going.after([loaded(2)])
    assert promises.counting == states(1, 2) and promises.left == states(3)
    assert promises.may_load == states(2)
