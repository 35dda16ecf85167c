"""Before a save all ranks hear how the previous one ended, and go the same way."""

from typing import Any
from unittest.mock import MagicMock

import pytest
from torchtitan.components.checkpointer.endings import Verdict
from torchtitan.components.checkpointer.errors import (
    CheckpointSaveError,
    CheckpointSaveTimeoutError,
)
from torchtitan.components.checkpointer.pinned import settling
from torchtitan.components.checkpointer.pinned.settling import settle
from torchtitan.components.checkpointer.pinned.writer_process import WriterDiedError


class Stager:
    def __init__(
        self, is_usable: bool = True, *shortages: str, lacks_room: bool = False, fails: str = ""
    ) -> None:
        self.has_usable_writer, self.lacks_room = is_usable, lacks_room
        self.shortages = list(shortages)
        self.losses_in_a_row = 0
        self.start_writer, self.close = MagicMock(), MagicMock()
        self.take_room = MagicMock(side_effect=lambda: fails and self.shortages.append(fails))


def as_rank(rank: int, failures: list[Any], stagers: list[Stager], **options: Any) -> Any:
    """What ``settle`` says on ``rank`` when every rank calls it."""
    reports: list[Any] = []

    def collect(value: Any, group: Any) -> list[Any]:
        reports.append(value)
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(settling, "gather", collect)
        for failure, stager in zip(failures, stagers, strict=True):
            stager.take_room.reset_mock()
            with pytest.raises(InterruptedError):
                settle(stager, failure, None, **options)
            # What one rank takes early is missing for another that still looks for its own.
            assert not stager.take_room.called
        patches.setattr(
            settling,
            "gather",
            lambda value, group: reports if hasattr(value, "is_echo") else [value],
        )
        return settle(
            stagers[rank],
            failures[rank],
            None,
            **options,
        )


def lost_connection() -> CheckpointSaveError:
    failure = CheckpointSaveError("step 2 failed: Connection closed by peer")
    failure.__cause__ = RuntimeError("Connection closed by peer [127.0.0.1]:3")
    return failure


def test_nothing_happens_while_all_is_well() -> None:
    stagers = [Stager(), Stager()]
    assert as_rank(0, [None, None], stagers, needs_writer=True) == Verdict(None, can_stage=True)
    for stager in stagers:
        calls = (
            stager.start_writer.mock_calls + stager.take_room.mock_calls + stager.close.mock_calls
        )
        assert calls == []


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_unusable_writer_means_new_ones_on_every_rank(rank: int) -> None:
    stagers = [Stager(), Stager(False), Stager()]
    as_rank(rank, [None] * 3, stagers, needs_writer=True)
    stagers[rank].start_writer.assert_called_once_with()


def test_nothing_is_taken_for_a_save_that_needs_no_writer() -> None:
    stagers = [Stager(False, lacks_room=True)]
    assert as_rank(0, [None], stagers, needs_writer=False) == Verdict(None, can_stage=True)
    assert not stagers[0].start_writer.called and not stagers[0].take_room.called


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_is_taken_on_all_ranks_where_one_lacks_it(rank: int) -> None:
    stagers = [Stager(), Stager(lacks_room=True)]
    assert as_rank(rank, [None, None], stagers, needs_writer=True) == Verdict(None, can_stage=True)
    stagers[rank].take_room.assert_called_once_with()
    assert not stagers[rank].start_writer.called


def test_memory_that_could_not_be_taken_after_all_ends_staging_at_once() -> None:
    stagers = [Stager(lacks_room=True, fails="no pages left")]
    assert as_rank(0, [None], stagers, needs_writer=True) == Verdict(None, can_stage=False)
    stagers[0].close.assert_called_once_with()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_raises_the_cause_and_not_what_it_felt_of_it(rank: int) -> None:
    cause = CheckpointSaveError("step 2 failed: the writer process 7 was ended by SIGKILL")
    failures = [lost_connection(), cause, None]
    failure, can_stage, _ = as_rank(rank, failures, [Stager()] * 3, needs_writer=True)
    assert str(failure) == str(cause) and can_stage
    assert (failure is cause) == (rank == 1)


def writer_died() -> CheckpointSaveError:
    failure = CheckpointSaveError("step 2 failed: the writer process 7 was ended by SIGKILL")
    failure.__cause__ = WriterDiedError("the writer process 7 was ended by SIGKILL")
    return failure


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_save_lost_with_a_writer_is_excused_once_in_a_row(rank: int) -> None:
    stagers = [Stager(False), Stager(False), Stager(False)]
    failures = [lost_connection(), writer_died(), None]
    good = Verdict(None, can_stage=True)
    ends = [
        as_rank(rank, failures, stagers, needs_writer=True),
        as_rank(rank, failures, stagers, needs_writer=True),
        as_rank(rank, [None] * 3, stagers, needs_writer=True),
        as_rank(rank, failures, stagers, needs_writer=True),
    ]
    assert [end.is_excused for end in ends] == [True, False, False, True]
    assert ends[2] == good
    assert all("SIGKILL" in str(end.failure) for end in ends if end is not ends[2])


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_made_beside_a_save_that_was_given_up_on_any_rank(rank: int) -> None:
    stagers = [Stager(False, lacks_room=True), Stager(False)]
    late = CheckpointSaveTimeoutError("step 2 was given up")
    end = as_rank(rank, [None, late], stagers, needs_writer=True)
    assert type(end.failure) is CheckpointSaveTimeoutError and end.can_stage
    for stager in stagers:
        assert not stager.start_writer.called and not stager.take_room.called


def test_what_one_rank_was_told_of_is_raised_on_no_other() -> None:
    told = CheckpointSaveError("step 2 failed: No space left on device")
    told.was_raised = True
    untold = CheckpointSaveError(str(told))
    end = as_rank(1, [told, untold], [Stager(), Stager()], needs_writer=True)
    assert end.failure is untold and untold.was_raised


def test_a_loss_excuses_no_other_failure_of_the_same_save() -> None:
    other = CheckpointSaveError("step 2 failed: No space left on device")
    stagers = [Stager(), Stager(False)]
    failure, *_ = as_rank(0, [other, writer_died()], stagers, needs_writer=True)
    assert failure is other


def test_what_all_only_felt_is_raised_all_the_same() -> None:
    own = lost_connection()
    failure, *_ = as_rank(0, [own, lost_connection()], [Stager()] * 2, needs_writer=True)
    assert failure is own


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_short_of_memory_ends_staging_on_all(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    stagers = [Stager(False), Stager(False, "rank 1 needs 3 GiB and has 2 GiB")]
    assert as_rank(rank, [None, None], stagers, needs_writer=True) == Verdict(None, can_stage=False)
    assert "rank 1 needs 3 GiB and has 2 GiB" in caplog.text
    assert "training waits for each save" in caplog.text
    stagers[rank].close.assert_called_once_with()
    assert not stagers[rank].start_writer.called
