"""A save that a thread begins: training goes on meanwhile, and is told what came of it after the next step."""

import logging
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import torch_checkpointing, waiting
from torchtitan.components.checkpointer.beginning import Beginning
from torchtitan.components.checkpointer.errors import (
    CheckpointInUseError,
    CheckpointSaveError,
    CheckpointSaveTimeoutError,
)
from torchtitan.components.checkpointer.saving import SavingManager
from torchtitan.components.checkpointer.state import ModelWrapper

from tests.unit_tests.components.checkpointer.runs import build_run, message_of, names, Run
from tests.unit_tests.components.checkpointer.tc.stand_ins import Writers
from tests.unit_tests.components.checkpointer.ways import TC

pytestmark = pytest.mark.usefixtures("one_rank", "writers")
DENIED = PermissionError(13, "Permission denied")


def run_in(folder: Path, **settings: Any) -> Run:
    """One whose first save is complete."""
    run = build_run(folder, **TC.settings, **{"keep_latest_k": 0, **settings})
    run.train(1)
    run.manager.maybe_wait_for_saving()
    return run


@contextmanager
def held(run: Run) -> Generator[Callable[[], None]]:
    """The next saves stop before the folder is made ready, until what this gives is called."""
    may_go_on, make_ready = Event(), run.manager._make_ready

    def hold(*arguments: Any, **keywords: Any) -> None:
        assert may_go_on.wait(60)
        make_ready(*arguments, **keywords)

    with patch.object(run.manager, "_make_ready", hold):
        yield may_go_on.set
        may_go_on.set()
        run.manager.maybe_wait_for_staging()


def failing(run: Run, error: Exception) -> Any:
    return patch.object(run.manager, "_make_ready", side_effect=error)


def complete(folder: Path) -> list[str]:
    return TC.complete(folder)


def test_training_goes_on_before_the_folder_is_ready_and_what_was_is_saved(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    run.train(2, save=False)
    with held(run) as go_on:
        assert run.manager.save(2)
        expected = run.snapshot()
        future = run.manager.save_future
        # All that a step does before it updates; the model counts its forward passes.
        run.dataloader.values["row"] += 5
        run.progress.values["step"] += 1
        run.lr_schedulers.step()
        run.model(torch.arange(10)).backward()
        assert names(tmp_path) == ["step-1"] and not future.done()
        go_on()
        run.manager.maybe_wait_for_staging()
    run.optimizers.step()
    run.manager.close()
    assert future.result(60) is None and complete(tmp_path) == ["step-1", "step-2"]
    again = build_run(tmp_path, seed=9, load_only=True, **TC.settings)
    assert again.manager.load(2) and again.snapshot() == expected
    again.manager.close()


def test_the_parameters_do_not_change_before_the_save_has_begun(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    order: list[str] = []
    with held(run) as go_on:
        write = run.manager._write

        def noted(*arguments: Any) -> Any:
            order.append("write")
            return write(*arguments)

        with patch.object(run.manager, "_write", noted):
            run.train(2)
            go_on()
            run.manager.maybe_wait_for_staging()
            order.append("update")
    assert order == ["write", "update"]
    run.manager.close()


@pytest.mark.parametrize("tell", ["save", "maybe_wait_for_saving", "close"])
def test_what_prevents_a_save_is_told_once_by_what_comes_next(tmp_path: Path, tell: str) -> None:
    run = run_in(tmp_path, interval=2)
    run.train(2, save=False)
    with failing(run, DENIED):
        assert run.manager.save(2)
        run.manager.maybe_wait_for_staging()
    steps = [3] if tell == "save" else []
    text = message_of(getattr(run.manager, tell), *steps)
    assert f"step 2 to {tmp_path}/checkpoint/step-2 failed" in text and "Permission denied" in text
    if tell != "close":
        run.train(4)
    run.manager.close()
    assert complete(tmp_path) == (["step-4"] if tell != "close" else [])


def test_a_folder_that_has_become_another_runs_ends_the_run_also_before_the_last_save(
    tmp_path: Path,
) -> None:
    run = run_in(tmp_path)
    with failing(run, CheckpointInUseError("somebody else's")):
        run.train(2)
        run.manager.maybe_wait_for_staging()
    with pytest.raises(CheckpointInUseError, match="somebody else's"):
        run.train(3, last_step=3)
    run.manager.close()
    assert complete(tmp_path) == ["step-1"]


def test_the_last_save_is_tried_before_the_run_ends_with_what_the_one_before_met(
    tmp_path: Path,
) -> None:
    run = run_in(tmp_path, last_save_model_only=False)
    with failing(run, DENIED):
        run.train(2)
        run.manager.maybe_wait_for_staging()
    text = message_of(run.train, 3)
    assert "step 2 to" in text
    with failing(run, DENIED):
        run.manager.save(3)
        run.manager.maybe_wait_for_staging()
    with pytest.raises(CheckpointSaveError, match="step 3 to"):
        run.train(4, last_step=4)
    run.manager.close()
    assert complete(tmp_path) == ["step-1", "step-4"]


def test_a_last_save_that_fails_as_well_is_told_with_the_one_before(tmp_path: Path) -> None:
    run = run_in(tmp_path, last_save_model_only=False)
    with failing(run, DENIED):
        run.train(2)
        run.manager.maybe_wait_for_staging()
    with failing(run, OSError(5, "Input/output error")):
        with pytest.raises(CheckpointSaveError, match="step 3 to .*Input/output") as told:
            run.train(3, last_step=3)
    (note,) = told.value.__notes__
    assert note.startswith("Before that: ") and "step 2 to" in note
    run.manager.close()


def test_weights_that_are_exchanged_for_a_while_meanwhile_are_neither_saved_nor_changed(
    tmp_path: Path,
) -> None:
    run = run_in(tmp_path)
    run.train(2, save=False)
    expected = run.snapshot()
    with held(run) as go_on:
        assert run.manager.save(2)
        weights = [cast(DTensor, each).to_local() for each in run.model.parameters()]
        own = [weight.data for weight in weights]
        for weight in weights:
            weight.data = torch.full_like(weight, 7.0)
        go_on()
        run.manager._beginning.join(60)
        for weight, data in zip(weights, own, strict=True):
            weight.data = data
    assert run.snapshot() == expected
    run.manager.close()
    again = build_run(tmp_path, seed=9, load_only=True, **TC.settings)
    assert again.manager.load(2) and again.snapshot() == expected
    again.manager.close()


def test_a_save_that_a_run_goes_on_without_is_lost_and_not_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_in(tmp_path, on_save_failure="warn", max_failed_saves=3)
    with failing(run, DENIED):
        run.train(2)
        assert run.manager.has_lost(2) and not run.manager.has_lost(1)
    assert run.manager.newest_good[0] == 1 and run.manager.save_future is None
    assert caplog.text.count("Failed in a row: 1") == 1
    run.train(3)
    assert not run.manager.has_lost(3)
    with failing(run, DENIED):
        run.train(5)  # the count began anew
        run.manager.maybe_wait_for_staging()
    run.manager.close()
    assert "Failed in a row: 2" in caplog.text and "3 saves in a row" not in caplog.text
    assert complete(tmp_path) == ["step-1", "step-3"]


def test_a_thread_that_does_not_come_to_an_end_is_given_up(tmp_path: Path) -> None:
    run = run_in(tmp_path, timeout_seconds=1)
    with patch.object(waiting, "_has_given_up", False), held(run) as go_on:
        run.train(2)
        for wait in (run.manager.maybe_wait_for_staging, lambda: run.manager.save(3)):
            with pytest.raises(CheckpointSaveTimeoutError, match="step 2 to .* was given up"):
                wait()
        assert waiting._has_given_up
        beginning = run.manager._beginning
        go_on()
        beginning.join(60)
    run.manager.close()
    assert complete(tmp_path) == ["step-1", "step-2"]


def test_a_load_waits_for_the_save_to_have_begun(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    expected = run.snapshot()
    with held(run) as go_on:
        run.train(2)
        load = run.manager._choose_start

        def noted(step: int) -> Any:
            assert run.manager._beginning is None
            return load(step)

        with patch.object(run.manager, "_choose_start", noted):
            go_on()
            assert run.manager.load(1)
    assert run.snapshot() == expected
    run.manager.close()


def test_where_memory_turns_out_too_small_training_waits_for_the_write(
    tmp_path: Path, writers: Writers, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_in(tmp_path)
    run.train(2, save=False)
    run.manager._stager.shortages.append("the test says so")
    expected = run.snapshot()
    caplog.set_level(logging.INFO)
    assert run.manager.save(2)
    run.train(3, save=False)
    assert "From now on training waits for each save: the test says so." in caplog.text
    assert caplog.text.count("Saved checkpoint of step 2") == 1
    run.manager.close()
    assert complete(tmp_path) == ["step-1", "step-2"]
    again = build_run(tmp_path, seed=9, load_only=True, **TC.settings)
    assert again.manager.load(2) and again.snapshot() == expected
    again.manager.close()


def test_nothing_is_taken_beside_a_save_that_may_still_read_what_the_last_was_taken_into(
    tmp_path: Path,
) -> None:
    run = run_in(tmp_path, on_save_failure="warn", max_failed_saves=9)
    late = CheckpointSaveTimeoutError("given up")
    with (
        patch.object(run.manager, "_end_of_previous", return_value=late),
        patch.object(run.manager, "_captured", side_effect=AssertionError("it is taken")),
    ):
        assert not run.manager.save(2)
    run.manager.close()


def test_a_rank_whose_model_failed_goes_on_only_when_all_know_of_it(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    run.train(2, save=False)
    with patch.object(ModelWrapper, "state_dict_later", side_effect=OSError("gone")):
        assert run.manager.save(2) and run.manager._beginning is None
    with pytest.raises(CheckpointSaveError, match="the state model cannot be saved: OSError: gone"):
        run.train(3)
    run.manager.close()


def test_ranks_that_come_late_to_what_a_model_gathers_are_waited_for_as_in_a_save(
    tmp_path: Path,
) -> None:
    run = run_in(tmp_path, timeout_seconds=77)
    limits: list[float] = []

    @contextmanager
    def noting(limit: timedelta) -> Generator[None]:
        limits.append(limit.total_seconds())
        yield
        limits.clear()

    def taking(*arguments: Any) -> None:
        assert limits == [77.0]

    with (
        patch.object(torch_checkpointing, "patience", noting),
        patch.object(torch_checkpointing, "capture", side_effect=taking) as taken,
    ):
        run.train(2)
    assert taken.call_count == 1
    run.manager.close()


class Interrupt:
    """Raises KeyboardInterrupt at one line of a function, as a signal may."""

    def __init__(self, function: Any, number: int) -> None:
        self._code, self._left, self.was_raised = function.__code__, number, False

    def __enter__(self) -> "Interrupt":
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: Any) -> bool:
        sys.settrace(None)
        return bool(error[0]) and issubclass(error[0], KeyboardInterrupt)

    def _called(self, frame: Any, event: str, _: Any) -> Any:
        return self._line if frame.f_code is self._code else None

    def _line(self, frame: Any, event: str, _: Any) -> Any:
        if event == "line" and not self.was_raised:
            self._left -= 1
            if self._left < 0:
                self.was_raised = True
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize(
    "function",
    [SavingManager._begin_beside_training, SavingManager._join, Beginning.start],
    ids=lambda function: function.__name__,
)
def test_a_signal_at_any_line_loses_no_save_that_has_begun_and_frees_no_folder_under_it(
    tmp_path: Path, function: Any
) -> None:
    for number in range(100):
        run = run_in(tmp_path / str(number))
        begun: list[str] = []
        write = run.manager._write

        def noted(save: Any, payload: Any, write: Any = write, begun: Any = begun) -> Any:
            begun.append(Path(save.path).name)
            return write(save, payload)

        with patch.object(run.manager, "_write", noted):
            with Interrupt(function, number) as interrupt:
                run.train(3)
                run.manager.maybe_wait_for_staging()
            run.manager.close()
        assert complete(tmp_path / str(number)) == ["step-1", *begun]
        if not interrupt.was_raised:
            assert number > 2 and begun == ["step-2", "step-3"]
            return
