"""Where no directory is renamed two histories of one folder are kept apart all the same."""

import logging
from pathlib import Path

import pytest

from tests.unit_tests.components.checkpointer.runs import build_run, Run
from tests.unit_tests.components.checkpointer.tc.memory_storage import InMemory, ROOT
from tests.unit_tests.components.checkpointer.ways import TC_WAITING

FOLDER = ROOT / "checkpoint"


def run_in(memory: InMemory, **settings: int) -> Run:
    keywords = {"storage_config": memory}
    return build_run(ROOT, keywords=keywords, **settings, **TC_WAITING.settings)


def files_of(memory: InMemory, step: int) -> dict[Path, bytes]:
    path = FOLDER / f"step-{step}"
    return {name: content for name, content in memory.files.items() if name.is_relative_to(path)}


@pytest.mark.usefixtures("one_rank")
def test_a_run_that_goes_back_in_an_object_store_neither_mixes_histories_nor_loses_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = InMemory()
    first = run_in(memory)
    first.train(4)
    first.manager.close()
    left = {step: files_of(memory, step) for step in (3, 4)}
    assert all(left.values())

    back = run_in(memory, keep_latest_k=2)
    caplog.clear()
    assert back.manager.load(1)
    (said,) = [it.getMessage() for it in caplog.records if it.levelno == logging.WARNING]
    assert "lists step-2, step-3, step-4" in said and "what it lists stays in place" in said
    back.dataloader.values["row"] = 1000
    back.train(2)
    moved = FOLDER / "superseded/step-2"
    back.manager.close()
    assert moved in memory.folders, "the one whose step is saved again is moved out of the way"

    again = run_in(memory, keep_latest_k=2)
    assert again.manager.load() and again.step == 2
    assert again.dataloader.values["row"] == 1005, "of the history that was begun"
    again.train(3)
    again.train(5)
    again.manager.close()
    assert files_of(memory, 4) != left[4] and FOLDER / "superseded/step-4" in memory.folders
    for step, files in left.items():
        aside = FOLDER / f"superseded/step-{step}"
        before = {aside / name.name: content for name, content in files.items()}
        assert before.items() <= memory.files.items()
    names = sorted(each.name for each in memory.folders if each.parent == FOLDER)
    assert names == ["step-4", "step-5", "superseded"]
