"""A run whose saves fail, with either manager: when it ends, when it goes on, and what it has then."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torchtitan.components.checkpointer import dcp, in_flight
from torchtitan.components.checkpointer.errors import (
    CheckpointSaveError,
    CheckpointSaveTimeoutError,
)
from torchtitan.components.checkpointer.pinned.writer_process import WriterDiedError
from torchtitan.components.checkpointer.waiting import WaitExpiredError
from torchtitan.tools import disk
from torchtitan.tools.disk import Disk

from tests.ranks.steering import await_end_of_save, BEFORE_DATA, Steering
from tests.unit_tests.components.checkpointer.runs import build_run, message_of, names, Run
from tests.unit_tests.components.checkpointer.tc.stand_ins import Writers
from tests.unit_tests.components.checkpointer.ways import ASYNC, DISABLED, over, TC, TC_WAITING, Way

pytestmark = pytest.mark.usefixtures("one_rank")

BACKGROUND = [ASYNC, TC]
ALL = [DISABLED, ASYNC, TC, TC_WAITING]


def disk_full() -> None:
    raise OSError(28, "No space left on device")


class Trouble:
    """Lets the next save of a run fail."""

    def __init__(self, way: Way, writers: Writers) -> None:
        self._steering = Steering(way)
        self._writers = writers if way is TC else None
        self.settings = way.settings if way is TC else self._steering.settings

    def begin(self) -> None:
        if self._writers is None:
            self._steering.set(BEFORE_DATA, disk_full)
        else:
            self._writers.error = OSError(28, "No space left on device")

    def end(self) -> None:
        if self._writers is None:
            self._steering.stop()
        else:
            self._writers.error = None


@pytest.fixture
def trouble(way: Way, writers: Writers) -> Iterator[Trouble]:
    found = Trouble(way, writers)
    yield found
    found.end()


def lose(run: Run, trouble: Trouble, num_saves: int) -> None:
    """Train as many intervals, with a save that fails at the end of each."""
    for _ in range(num_saves):
        trouble.begin()
        run.train(run.step + run.manager.interval)
        await_end_of_save(run.manager)
    trouble.end()


@over(*BACKGROUND)
def test_a_failed_save_is_raised_after_the_next_step_and_not_again(
    tmp_path: Path, way: Way, trouble: Trouble
) -> None:
    run = build_run(tmp_path, interval=3, **trouble.settings)
    lose(run, trouble, 1)
    run.manager.maybe_wait_for_staging()
    text = message_of(lambda: run.manager.save(4))
    assert f"step 3 to {tmp_path}/checkpoint/step-3 failed" in text and "No space left" in text
    run.train(7)
    run.manager.close()
    assert way.complete(tmp_path) == ["step-6"]


@over(*BACKGROUND)
def test_a_failure_that_is_known_before_the_last_step_does_not_prevent_its_save(
    tmp_path: Path, way: Way, trouble: Trouble
) -> None:
    run = build_run(tmp_path, interval=3, last_save_model_only=False, **trouble.settings)
    lose(run, trouble, 1)
    text = message_of(lambda: run.train(4, last_step=4))
    run.manager.close()
    assert f"step 3 to {tmp_path}/checkpoint/step-3 failed" in text
    assert way.complete(tmp_path) == ["step-4"]


@over(*BACKGROUND)
def test_a_step_never_waits_for_a_save_to_see_whether_it_failed(
    tmp_path: Path, way: Way, trouble: Trouble
) -> None:
    run = build_run(tmp_path, interval=3, **trouble.settings)
    run.train(3)
    await_end_of_save(run.manager)
    run.manager.maybe_wait_for_staging()
    pending: Future[Any] = Future()
    run.manager.save_future, ended = pending, run.manager.save_future
    with patch.object(in_flight, "result_within", side_effect=AssertionError("it waits")):
        run.manager.save(4)
        run.manager._look_back()
    assert run.manager.save_future is pending
    run.manager.save_future = ended
    run.manager.close()


@over(*ALL)
def test_a_run_that_goes_on_tries_again_at_the_next_interval(
    tmp_path: Path, way: Way, trouble: Trouble, caplog: pytest.LogCaptureFixture
) -> None:
    run = build_run(tmp_path, interval=2, on_save_failure="warn", **trouble.settings)
    run.train(2)
    run.manager.maybe_wait_for_saving()
    lose(run, trouble, 2)
    run.train(8)
    run.manager.maybe_wait_for_saving()
    # The count begins anew after each save that is good.
    lose(run, trouble, 2)
    run.train(14)
    run.manager.close()
    assert set(names(tmp_path)) == set(way.complete(tmp_path)) == {"step-2", "step-8", "step-14"}
    told = [text for text in caplog.messages if "Training goes on" in text]
    assert [text.partition(" failed")[0].rpartition("/")[2] for text in told] == [
        f"step-{step}" for step in (4, 6, 10, 12)
    ]
    assert all("No space left on device" in text for text in told)
    assert all("that of step" in text for text in told)


@over(*ALL)
def test_too_many_in_a_row_end_the_run_with_all_of_them(
    tmp_path: Path, way: Way, trouble: Trouble
) -> None:
    run = build_run(tmp_path, on_save_failure="warn", max_failed_saves=2, **trouble.settings)
    text = ""
    while not text.startswith("2 saves in a row have failed") and run.step < 5:
        trouble.begin()
        text = message_of(run.train, run.step + 1)
        await_end_of_save(run.manager)
    assert "step 1 to" in text and "step 2 to" in text and "step 3 to" not in text
    # One that is in the background is found out at the next step.
    assert run.step == (3 if way.is_background else 2)
    trouble.end()
    run.train(run.step + 1)
    run.manager.close()
    assert way.complete(tmp_path) == [f"step-{run.step}"]


@over(*ALL)
@pytest.mark.parametrize("goes_on", [False, True], ids=["raise", "warn"])
def test_the_last_save_is_made_whatever_has_failed_before(
    tmp_path: Path, way: Way, trouble: Trouble, goes_on: bool
) -> None:
    policy = {"on_save_failure": "warn", "max_failed_saves": 1}
    settings: dict[str, Any] = policy if goes_on else {}
    run = build_run(tmp_path, interval=2, **settings, **trouble.settings)
    trouble.begin()
    try:
        run.train(2)
    except CheckpointSaveError:
        assert not way.is_background
    await_end_of_save(run.manager)
    trouble.end()
    run.progress.values["step"] = 3
    text = message_of(run.manager.save, 3, True)
    # Where failures are borne, work that is kept after all is no reason to end with one.
    assert ("step 2 to" in text) == (way.is_background and not goes_on)
    run.manager.close()
    assert way.complete(tmp_path) == ["step-3"]


@over(*ALL)
def test_a_last_save_that_fails_is_raised_by_a_run_that_goes_on_as_well(
    tmp_path: Path, way: Way, trouble: Trouble
) -> None:
    run = build_run(tmp_path, interval=9, on_save_failure="warn", **way.settings)
    run.train(1)
    full = patch.object(
        run.manager, "_make_ready", side_effect=OSError(28, "No space left on device")
    )
    with full:
        assert "step 2 to" in message_of(lambda: run.train(2, last_step=2))
    run.manager.close()


@over(*ALL)
def test_what_fails_before_anything_is_written_counts_too(
    tmp_path: Path, way: Way, trouble: Trouble, caplog: pytest.LogCaptureFixture
) -> None:
    run = build_run(tmp_path, on_save_failure="warn", max_failed_saves=3, **way.settings)
    denied = PermissionError(13, "Permission denied", str(tmp_path))
    with patch.object(run.manager, "_make_ready", side_effect=denied):
        run.train(2)
        text = message_of(run.train, 4)  # what a thread has found is told one step later
    assert run.step == (4 if way.begins_beside_training else 3)
    assert "3 saves in a row have failed" in text and text.count("Permission denied") == 3
    assert sum("Failed in a row" in text for text in caplog.messages) == 2
    run.manager.close()


@over(*BACKGROUND)
def test_nothing_begins_beside_a_save_that_was_given_up_and_may_be_good_in_the_end(
    tmp_path: Path, way: Way, trouble: Trouble, caplog: pytest.LogCaptureFixture
) -> None:
    run = build_run(tmp_path, on_save_failure="warn", **trouble.settings)
    run.train(1)
    await_end_of_save(run.manager)
    good, run.manager.save_future = run.manager.save_future, Future()
    hung = run.manager.save_future

    def expire(future: "Future[Any]", seconds: float) -> Any:
        if not future.done():
            raise WaitExpiredError(f"not done after {seconds:g} s")
        return future.result()

    with patch.object(in_flight, "result_within", expire):
        run.train(3)
        assert run.manager.save_future is hung and names(tmp_path) == ["step-1"]
        assert caplog.text.count("step 1 to") == caplog.text.count("was given up") == 2
        assert "Failed in a row: 2" in caplog.text
        run.manager.save_future = good
        for step in (4, 5):
            run.train(step)
            await_end_of_save(run.manager)
    run.manager.close()
    assert way.complete(tmp_path) == ["step-1", "step-4", "step-5"]
    assert "Failed in a row: 3" not in caplog.text


@over(ASYNC)
def test_a_save_that_has_ended_late_is_over_and_the_next_one_is_made(
    tmp_path: Path, way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    steering = Steering(way)
    run = build_run(tmp_path, interval=3, on_save_failure="warn", **steering.settings)

    def wait_in_vain() -> None:
        raise RuntimeError("Timed out waiting 600000ms for recv operation to complete")

    steering.set(BEFORE_DATA, wait_in_vain)
    run.train(3)
    await_end_of_save(run.manager)
    steering.stop()
    with patch.object(in_flight, "await_save", wraps=in_flight.await_save) as waited:
        run.train(6)
    waited.assert_called_once()
    run.manager.close()
    assert caplog.text.count("Failed in a row: 1") == caplog.text.count("was given up") == 1
    assert way.complete(tmp_path) == ["step-6"]


@over(TC)
def test_nothing_is_prepared_beside_a_save_that_was_given_up(
    tmp_path: Path, way: Way, trouble: Trouble
) -> None:
    run = build_run(tmp_path, on_save_failure="warn", **trouble.settings)
    run.train(1)
    await_end_of_save(run.manager)
    good, run.manager.save_future = run.manager.save_future, Future()
    with (
        patch.object(in_flight, "result_within", side_effect=WaitExpiredError("not done")),
        patch.object(run.manager._stager, "prepare") as prepare,
    ):
        run.train(2)
    prepare.assert_not_called()
    run.manager.save_future = good
    run.manager.close()


@over(*BACKGROUND)
def test_a_save_that_is_never_over_ends_a_run_that_goes_on_in_the_end(
    tmp_path: Path, way: Way, trouble: Trouble
) -> None:
    run = build_run(tmp_path, on_save_failure="warn", max_failed_saves=2, **trouble.settings)
    run.train(1)
    await_end_of_save(run.manager)
    run.manager.save_future = Future()
    with patch.object(in_flight, "result_within", side_effect=WaitExpiredError("not done")):
        run.train(2)
        with pytest.raises(CheckpointSaveTimeoutError, match="2 saves in a row"):
            run.train(3)
        with pytest.raises(CheckpointSaveTimeoutError, match="was given up"):
            run.train(4, last_step=4)
    run.manager.close()
    assert names(tmp_path) == ["step-1"]


@over(*BACKGROUND)
@pytest.mark.parametrize("fails", [False, True])
def test_a_save_in_flight_is_known_to_be_lost_once_it_is_asked_for(
    tmp_path: Path, way: Way, trouble: Trouble, fails: bool
) -> None:
    run = build_run(tmp_path, **trouble.settings)
    if fails:
        trouble.begin()
    run.train(1)
    assert not run.manager.has_lost(2)
    assert run.manager.has_lost(1) == fails
    trouble.end()
    # As where the data ends after it: its end is told all the same.
    text = message_of(run.manager.save, 1, True)
    assert ("step 1 to" in text) == fails
    run.manager.close()
    assert way.complete(tmp_path) == ["step-1"]
    assert not run.manager.has_lost(1)


@over(*BACKGROUND)
def test_the_end_of_a_run_that_goes_on_raises_what_the_save_in_flight_failed_with(
    tmp_path: Path, way: Way, trouble: Trouble
) -> None:
    run = build_run(tmp_path, on_save_failure="warn", **trouble.settings)
    lose(run, trouble, 1)
    assert "step 1 to" in message_of(run.manager.close)
    run.manager.close()


def test_a_lost_writer_counts_as_a_failed_save_where_these_are_counted(
    tmp_path: Path, writers: Writers, caplog: pytest.LogCaptureFixture
) -> None:
    run = build_run(tmp_path, on_save_failure="warn", max_failed_saves=2, **TC.settings)
    writers.error = WriterDiedError("it was killed")
    run.train(1)
    await_end_of_save(run.manager)
    run.train(2)
    await_end_of_save(run.manager)
    assert "Failed in a row: 1" in caplog.text
    assert "2 saves in a row" in message_of(run.train, 4)
    run.manager.close()


@over(TC)
def test_a_state_that_cannot_be_had_ahead_is_no_failed_save(
    tmp_path: Path, way: Way, trouble: Trouble, caplog: pytest.LogCaptureFixture
) -> None:
    run = build_run(tmp_path, interval=3, on_save_failure="warn", **trouble.settings)
    with patch.object(run.dataloader, "state_dict", side_effect=ValueError("no row")):
        run.train(2)
    assert "It is tried again with the first save." in caplog.text
    run.train(3)
    run.manager.close()
    assert way.complete(tmp_path) == ["step-3"] and "Failed in a row" not in caplog.text


def test_only_a_run_that_goes_on_has_a_second_group(tmp_path: Path) -> None:
    for goes_on, num_groups in [("raise", 1), ("warn", 2)]:
        with patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
            run = build_run(tmp_path, on_save_failure=goes_on, **ASYNC.settings)
        assert new_group.call_count == num_groups
        is_own = run.manager._settling_group is not run.manager.pg
        assert is_own == (goes_on == "warn")
        run.manager.close()
    assert dcp.AsyncMode(ASYNC.options["async_mode"]) is dcp.AsyncMode.ASYNC


class Odd(Disk):
    """Fails with what is no error of a disk, as a storage of somebody's own may."""

    def create(self, path: str, **more: Any) -> BinaryIO:
        if path.endswith((".distcp", ".pt")):
            raise RuntimeError("the bucket is sealed")
        return super().create(path, **more)


@over(DISABLED, TC_WAITING)
@pytest.mark.timeout(60)
def test_an_error_behind_which_no_system_stands_fails_the_save_in_its_own_words(
    way: Way, tmp_path: Path
) -> None:
    run = build_run(tmp_path, **way.settings, on_save_failure="warn", max_failed_saves=2)
    with disk.using(Odd()):
        assert not run.manager.save(2)
        with pytest.raises(CheckpointSaveError, match="the bucket is sealed"):
            run.manager.save(4)
    run.manager.close()
