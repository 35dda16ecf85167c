"""A save that has failed and is complete all the same: nothing older is deleted on its account."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed.checkpoint.metadata import Metadata
from torchtitan.components.checkpointer import dcp
from torchtitan.components.checkpointer.dcp_writer import DurableFileSystemWriter

from tests.ranks.steering import await_end_of_save
from tests.unit_tests.components.checkpointer.runs import build_run, names, Run
from tests.unit_tests.components.checkpointer.ways import ASYNC, DISABLED, over, Way

pytestmark = pytest.mark.usefixtures("one_rank")


class LateFailure(DurableFileSystemWriter):
    """Fails when all is done, on a disk that lets nothing be taken back."""

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        raise OSError(5, "Input/output error")


@contextmanager
def failing_late() -> Generator[None]:
    with patch.object(dcp, "DurableFileSystemWriter", LateFailure):
        yield


def going_on(folder: Path, way: Way) -> Run:
    return build_run(folder, on_save_failure="warn", keep_latest_k=2, **way.settings)


def train(run: Run, until: int) -> None:
    run.train(until)
    await_end_of_save(run.manager)


@over(DISABLED, ASYNC)
def test_it_takes_no_place_among_those_that_are_kept(tmp_path: Path, way: Way) -> None:
    run = going_on(tmp_path, way)
    train(run, 1)
    with failing_late():
        train(run, 2)
    train(run, 3)
    run.manager.purge_queue.join()
    assert names(tmp_path) == ["step-1", "step-2", "step-3"]
    train(run, 4)
    run.manager.close()
    assert names(tmp_path) == ["step-2", "step-3", "step-4"]


@over(DISABLED, ASYNC)
def test_what_it_was_to_replace_stays(tmp_path: Path, way: Way) -> None:
    run = going_on(tmp_path, way)
    train(run, 2)
    run.progress.values["step"] = 1
    with failing_late():
        train(run, 2)
    train(run, 3)
    run.manager.purge_queue.join()
    assert names(tmp_path) == ["replaced", "step-2", "step-3"]
    assert [path.name for path in (tmp_path / "checkpoint/replaced").iterdir()] == ["step-2"]
    run.manager.close()


@over(DISABLED, ASYNC)
def test_it_counts_once_its_step_is_saved_again_for_good(tmp_path: Path, way: Way) -> None:
    run = going_on(tmp_path, way)
    with failing_late():
        train(run, 1)
    run.progress.values["step"] = 0
    train(run, 3)
    run.manager.close()
    assert names(tmp_path) == ["step-2", "step-3"]
