"""A run makes its folder and claims it before it trains; one that saves nothing leaves none."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.checkpointer.errors import CheckpointNotFoundError
from torchtitan.components.checkpointer.integrity.manifest import RunDescription
from torchtitan.components.checkpointer.run_lock import RUN_LOCK

from tests.unit_tests.components.checkpointer.runs import build_run, names, Run
from tests.unit_tests.components.checkpointer.ways import DISABLED, over, TC_WAITING, Way

pytestmark = pytest.mark.usefixtures("one_rank")
BOTH = over(DISABLED, TC_WAITING)
Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Makes a run as the trainer does, which saves every second step; all are closed at the end."""
    runs: list[Run] = []

    def started(way: Way, **settings: Any) -> Run:
        run = build_run(tmp_path, interval=2, **way.settings, **settings)
        run.manager.describe_run(RunDescription({}, {}))
        runs.append(run)
        return run

    yield started
    for run in runs:
        run.manager.close()


@BOTH
def test_a_new_folder_is_made_and_claimed_before_anything_is_trained(
    tmp_path: Path, way: Way, start: Start
) -> None:
    run = start(way)
    assert not run.manager.load()
    assert names(tmp_path) == [RUN_LOCK]
    run.train(2)
    assert names(tmp_path) == [RUN_LOCK, "step-2"]
    run.manager.close()
    run.manager.close()
    assert names(tmp_path) == ["step-2"]


@BOTH
def test_a_run_that_never_saves_leaves_no_folder(tmp_path: Path, way: Way, start: Start) -> None:
    run = start(way)
    run.manager.load()
    run.train(1)
    run.manager.close()
    assert os.listdir(tmp_path) == []


@BOTH
def test_a_run_whose_load_fails_leaves_none_either(tmp_path: Path, way: Way, start: Start) -> None:
    run = start(way)
    with pytest.raises(CheckpointNotFoundError):
        run.manager.load(7)
    run.manager.close()
    assert os.listdir(tmp_path) == []


@BOTH
def test_a_folder_that_was_there_stays_although_it_is_empty(
    tmp_path: Path, way: Way, start: Start
) -> None:
    (tmp_path / "checkpoint").mkdir()
    run = start(way)
    run.manager.load()
    run.manager.close()
    assert names(tmp_path) == []


@BOTH
def test_a_run_that_only_loads_makes_no_folder(tmp_path: Path, way: Way, start: Start) -> None:
    assert not start(way, load_only=True).manager.load()
    assert os.listdir(tmp_path) == []


@BOTH
def test_one_that_saves_without_a_load_claims_its_folder_then(
    tmp_path: Path, way: Way, start: Start
) -> None:
    run = start(way)
    run.train(1)
    assert os.listdir(tmp_path) == []
    run.train(2)
    assert names(tmp_path) == [RUN_LOCK, "step-2"]
