"""Whether a run goes on after a save that failed: a count that is the same on all ranks."""

import pytest
from torchtitan.components.checkpointer.endings import agreed_failure, ending_of
from torchtitan.components.checkpointer.errors import (
    CheckpointSaveError,
    CheckpointSaveTimeoutError,
)
from torchtitan.components.checkpointer.failures import FailedSaves
from torchtitan.components.checkpointer.pinned.meeting import (
    OtherRankFailedError,
    OtherRankLostError,
    WriterMissingError,
)
from torchtitan.components.checkpointer.pinned.writer_process import WriterDiedError


def failure(step: int, cause: BaseException | None = None) -> CheckpointSaveError:
    error = CheckpointSaveError(f"Saving the checkpoint of step {step} to /run/step-{step} failed.")
    error.__cause__ = cause
    return error


def raising() -> FailedSaves:
    return FailedSaves(goes_on=False, limit=3)


def warning(limit: int = 3) -> FailedSaves:
    return FailedSaves(goes_on=True, limit=limit)


def settled(failed: FailedSaves, end: CheckpointSaveError | None) -> CheckpointSaveError | None:
    """The end of a save in the background, as all ranks see it."""
    failed.is_open = True
    return failed.settled(end, is_excused=False, newest_step=None)


def test_a_run_that_does_not_go_on_ends_with_the_first_failure() -> None:
    first = failure(2)
    assert settled(raising(), first) is first
    assert raising().failed(first, newest_step=None) is first


def test_a_run_that_goes_on_says_what_failed_how_often_and_what_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failed = warning()
    assert settled(failed, failure(2)) is None
    assert failed.failed(failure(4), newest_step=1) is None
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(
        "Saving the checkpoint of step 2 to /run/step-2 failed. Training goes on"
    )
    assert "Failed in a row: 1; the run ends with 3 (--checkpoint.max_failed_saves)" in first
    assert first.endswith("The newest good checkpoint: there is none yet.")
    assert "step 4" in second and "Failed in a row: 2" in second
    assert second.endswith("The newest good checkpoint: that of step 1.")


def test_the_last_of_too_many_in_a_row_tells_all_of_them_and_the_next_begins_the_count() -> None:
    failed = warning()
    last = failure(6)
    ends = [failed.failed(each, newest_step=None) for each in (failure(2), failure(4), last)]
    assert ends[:2] == [None, None]
    text = str(ends[2])
    assert "3 saves in a row have failed, the limit of --checkpoint.max_failed_saves" in text
    assert all(f"step {step} to" in text for step in (2, 4, 6)) and ends[2] is not None
    assert ends[2].__cause__ is last
    assert failed.failed(failure(8), newest_step=None) is None


def test_a_limit_of_one_is_told_as_itself() -> None:
    only = failure(2)
    assert warning(limit=1).failed(only, newest_step=None) is only


def test_a_good_save_begins_the_count_anew_and_one_that_was_not_made_does_not() -> None:
    failed = warning(limit=2)
    assert settled(failed, failure(2)) is None
    assert settled(failed, None) is None  # step 4 was good
    assert settled(failed, failure(6)) is None
    # At the next one nothing was in flight.
    assert failed.settled(None, is_excused=False, newest_step=None) is None
    assert settled(failed, failure(8)) is not None


def test_a_save_that_was_given_up_counts_until_it_turns_out_to_be_good() -> None:
    late = CheckpointSaveTimeoutError("step 2 was given up")
    failed = warning(limit=2)
    assert settled(failed, late) is None
    assert failed.settled(None, is_excused=False, newest_step=None) is None
    assert settled(failed, late) is None
    last = failed.settled(late, is_excused=False, newest_step=None)
    assert type(last) is CheckpointSaveTimeoutError


def test_an_excused_one_costs_no_run_and_counts_where_failures_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lost = failure(2, WriterDiedError("killed"))
    assert raising().settled(lost, is_excused=True, newest_step=None) is None
    assert "Training goes on without that checkpoint" in caplog.text
    failed = warning(limit=2)
    assert failed.settled(lost, is_excused=True, newest_step=None) is None
    assert settled(failed, failure(4)) is not None


@pytest.mark.parametrize(
    "cause,is_raised",
    [
        (OSError(28, "No space left on device"), True),
        (OtherRankFailedError("rank 1: OSError: full"), True),
        # All ranks together decide whether these are excused.
        (OtherRankLostError("killed"), False),
        (WriterDiedError("killed"), False),
        (WriterMissingError("killed"), False),
        (RuntimeError("Connection closed by peer"), False),
    ],
    ids=repr,
)
def test_between_two_saves_a_rank_raises_what_no_other_can_excuse(
    cause: BaseException, is_raised: bool
) -> None:
    failed = raising()
    found = failure(2, cause)
    assert failed.seen(found) is (found if is_raised else None)
    assert found.was_raised == is_raised and failed.unsettled is found
    # At the next save all ranks agree on it, and it is not raised again.
    assert failed.settled(found, is_excused=False, newest_step=None) is (
        None if is_raised else found
    )
    assert failed.unsettled is None


def test_between_two_saves_a_run_that_goes_on_ends_only_with_the_last_it_bears() -> None:
    failed, full = warning(limit=2), OSError(28, "No space left on device")
    assert failed.seen(failure(2, full)) is None
    assert failed.settled(failed.unsettled, is_excused=False, newest_step=None) is None
    last = failed.seen(failure(4, full))
    assert last is not None and "2 saves in a row" in str(last)


def test_after_the_last_it_bears_the_count_is_the_same_where_it_was_raised_and_elsewhere() -> None:
    here, elsewhere = warning(limit=2), warning(limit=2)
    for failed in (here, elsewhere):
        assert settled(failed, failure(2)) is None
    last = failure(4)
    assert here.seen(last) is not None
    for failed in (here, elsewhere):
        agreed = agreed_failure(None, [ending_of(last)])
        assert settled(failed, agreed) is None
        assert settled(failed, failure(6)) is None


def test_one_rank_that_gave_up_is_all_of_them() -> None:
    late = CheckpointSaveTimeoutError("rank 1 has waited")
    agreed = agreed_failure(None, [ending_of(None), ending_of(late)])
    assert type(agreed) is CheckpointSaveTimeoutError and str(agreed) == str(late)
    other = failure(2)
    agreed = agreed_failure(other, [ending_of(other), ending_of(late)])
    assert type(agreed) is CheckpointSaveTimeoutError
    assert agreed_failure(None, [ending_of(None)] * 2) is None
