"""How old the newest checkpoint is: counted from what a resume could use, and told when it gets old."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from torchtitan.components.checkpointer import age as module
from torchtitan.components.checkpointer.age import Age, CheckpointAge
from torchtitan.components.checkpointer.save_report import SaveReport

from tests.unit_tests.components.checkpointer.fakes import BareManager, folder_of
from tests.unit_tests.components.checkpointer.runs import build_run
from tests.unit_tests.components.checkpointer.ways import ASYNC, DISABLED, over, TC, TC_WAITING, Way


class Clock:
    """Stands in for ``time`` in the module."""

    seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_it_counts_from_the_beginning_from_what_was_loaded_and_from_what_is_durable(
    clock: Clock,
) -> None:
    age = CheckpointAge(interval=10)
    clock.seconds += 5
    assert age.newest_good is None and age.at(3) == Age(3, 5.0)
    age.began(40)
    clock.seconds += 7
    assert age.newest_good == (40, 1005.0) and age.at(43) == Age(3, 7.0)
    age.saved(50, clock.seconds - 2)
    assert age.newest_good == (50, 1010.0) and age.at(51) == Age(1, 2.0)
    # A save that is over before the step that made it is.
    assert age.at(50).steps == 0
    age.began(0)  # only weights were loaded
    assert age.newest_good is None and age.at(2) == Age(2, 0.0)


def test_it_is_told_past_three_intervals_and_again_only_after_a_newer_one(clock: Clock) -> None:
    age = CheckpointAge(interval=10)
    clock.seconds += 3723
    assert [step for step in range(1, 60) if age.warning(step, "/run")] == [31]
    age.saved(50, clock.seconds)
    told = {step: age.warning(step, "/run") for step in range(60, 90)}
    assert [step for step, text in told.items() if text] == [81]


def test_the_warning_says_how_old_what_may_be_wrong_and_where(clock: Clock) -> None:
    age = CheckpointAge(interval=10)
    clock.seconds += 3723
    first = age.warning(31, "/run") or ""
    assert "31 steps (1:02:03) after its beginning this run has no checkpoint" in first
    age.began(40)
    clock.seconds += 60
    second = age.warning(71, "/run") or ""
    assert "of step 40, is 31 steps (0:01:00) old: more than 3 times" in second
    assert "--checkpoint.interval (10)" in second and "/run is full, slow or away" in second


class Saving(BareManager):
    """A manager whose saves end when the test says so."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(folder="/run", interval=2, last_save_model_only=True, **attributes)
        self._age = CheckpointAge(self.interval)
        self.saving: Future[None] = Future()

    def _save(self, curr_step: int, last_step: bool) -> bool:
        if curr_step % self.interval and not last_step:
            return False
        self.saving = Future()
        self._report = SaveReport(
            curr_step, f"/run/step-{curr_step}", folder_of(), background=True, is_speaker=True
        )
        self._report.follow(self.saving)
        return True


@pytest.fixture
def manager(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Saving:
    monkeypatch.setattr("torchtitan.components.checkpointer.save_report.time", clock)
    return Saving()


def test_a_save_in_flight_does_not_count_before_it_is_durable(
    manager: Saving, clock: Clock
) -> None:
    manager.save(2)
    clock.seconds += 9
    manager.save(3)
    assert manager.newest_good is None and manager.checkpoint_age(3) == Age(3, 9.0)
    manager.saving.set_result(None)
    clock.seconds += 1
    assert manager.newest_good == (2, 1009.0) and manager.checkpoint_age(3) == Age(1, 1.0)


def test_a_save_that_was_over_at_once_counts_as_well(manager: Saving, clock: Clock) -> None:
    report = SaveReport(4, "/run/step-4", folder_of(), background=False, is_speaker=True)
    report.completed_now()
    clock.seconds += 1
    heard = MagicMock()
    report.tell(heard)
    heard.assert_called_once_with(4, 1000.0)


def test_a_save_that_failed_and_one_of_weights_alone_do_not_count(
    manager: Saving, clock: Clock
) -> None:
    manager.save(2)
    manager.saving.set_exception(OSError("the disk is full"))
    manager.save(3, last_step=True)
    manager.saving.set_result(None)
    assert manager.newest_good is None


def test_saves_that_fail_are_warned_of_once(
    manager: Saving, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(1, 13):
        manager.save(step)
        if step % 2 == 0:
            manager.saving.set_exception(OSError("the disk is full"))
    assert [r.levelname for r in caplog.records if "has no checkpoint" in r.getMessage()] == [
        "WARNING"
    ]
    assert "7 steps (" in caplog.text


@pytest.mark.usefixtures("one_rank", "writers")
@over(ASYNC, DISABLED, TC, TC_WAITING)
def test_whatever_saves_counts_from_its_newest_full_checkpoint(way: Way, tmp_path: Path) -> None:
    run = build_run(tmp_path, interval=2, last_save_model_only=True, **way.settings)
    run.manager.load()
    run.train(3)
    run.manager.maybe_wait_for_saving()
    durable = run.manager.newest_good
    assert durable is not None and durable[0] == 2
    age = run.manager.checkpoint_age(3)
    assert age is not None and age.steps == 1 and age.seconds >= 0
    run.manager.save(4, last_step=True)
    assert run.manager.newest_good == durable
    run.manager.close()
    again = build_run(tmp_path, interval=2, **way.settings)
    assert again.manager.newest_good is None
    again.manager.load()
    assert again.manager.newest_good is not None and again.manager.newest_good[0] == 2
    again.manager.close()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("settings", [{"enable": False}, {"load_only": True}])
def test_what_saves_nothing_has_no_age(settings: dict[str, Any], tmp_path: Path) -> None:
    manager = build_run(tmp_path, **settings).manager
    manager.load()
    manager.save(40)
    assert manager.checkpoint_age(40) is None and manager.newest_good is None
