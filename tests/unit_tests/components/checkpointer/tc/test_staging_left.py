"""Where a save is staged nothing else is deleted."""

import threading
from pathlib import Path

import pytest

from tests.unit_tests.components.checkpointer.runs import build_run
from tests.unit_tests.components.checkpointer.ways import TC_WAITING


@pytest.mark.usefixtures("one_rank")
def test_what_a_cut_deletion_has_left_is_not_deleted_beside_the_save_that_is_staged_there(
    tmp_path: Path,
) -> None:
    run = build_run(tmp_path, keep_latest_k=2, **TC_WAITING.settings)
    run.train(1)
    manager, goes_on = run.manager, threading.Event()
    # The thread that deletes is held up by what came before.
    manager._deletions.is_ours = goes_on.wait
    manager._deletions.add("before")
    manager.purge_queue.put("before")
    left = Path(manager.folder, "tmp_step-2")
    left.mkdir()
    (left / "manifest.deleted").touch()
    run.train(2)
    try:
        assert str(left) not in manager._deletions.waiting
    finally:
        goes_on.set()
        manager.close()
    assert Path(manager.folder, "step-2", "metadata.pkl").is_file()
