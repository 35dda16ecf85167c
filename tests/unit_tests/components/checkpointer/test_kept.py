"""What a user asks to keep is kept, and what is to go is gone, on a disk and with both managers."""

import os
import shutil
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torchtitan.components.checkpointer.deletions import PIN
from torchtitan.components.checkpointer.errors import CheckpointNotFoundError, CheckpointSaveError
from torchtitan.components.checkpointer.storage import DELETED
from torchtitan.tools import disk, signals

from tests.unit_tests.components.checkpointer.fakes import wait_until
from tests.unit_tests.components.checkpointer.runs import build_run, names, Run
from tests.unit_tests.components.checkpointer.ways import DISABLED, over, TC_WAITING, Way
from tests.unit_tests.noting_disk import RefusingDisk

pytestmark = pytest.mark.usefixtures("one_rank")

of_each_manager = over(DISABLED, TC_WAITING)


def trained(folder: Path, way: Way, until: int, **settings: Any) -> Path:
    """The checkpoint folder of a run that was closed."""
    run = build_run(folder, **{"keep_latest_k": 2, **way.settings, **settings})
    run.train(until)
    run.manager.close()
    return folder / "checkpoint"


def goes_on(folder: Path, way: Way, until: int, **settings: Any) -> Run:
    run = build_run(folder, seed=3, **{"keep_latest_k": 2, **way.settings, **settings})
    assert run.manager.load()
    run.train(until)
    run.manager.close()
    return run


@contextmanager
def stopping_in_deletions(run: Run) -> Generator[tuple[threading.Event, threading.Event]]:
    """Deletions that stop before their first file; events for when they do, and to go on."""
    reached, let_go = threading.Event(), threading.Event()
    remove = run.manager._storage.remove

    def held(path: str) -> None:
        reached.set()
        assert let_go.wait(60)
        remove(path)

    with patch.object(run.manager._storage, "remove", held):
        try:
            yield reached, let_go
        finally:
            let_go.set()


@of_each_manager
def test_multiples_and_pinned_ones_stay_for_ever_and_take_no_place(
    tmp_path: Path, way: Way
) -> None:
    folder = trained(tmp_path, way, 2, keep_every=4)
    (folder / "step-1" / PIN).touch()
    goes_on(tmp_path, way, 10, keep_every=4)
    assert names(tmp_path) == ["step-1", "step-10", "step-4", "step-8", "step-9"]
    (folder / "step-1" / PIN).unlink()
    goes_on(tmp_path, way, 11, keep_every=4)
    assert names(tmp_path) == ["step-10", "step-11", "step-4", "step-8"]


@of_each_manager
def test_a_pinned_checkpoint_whose_step_is_saved_again_is_put_aside_and_not_deleted(
    tmp_path: Path, way: Way
) -> None:
    folder = trained(tmp_path, way, 2, keep_latest_k=0)
    (folder / "step-2" / PIN).touch()
    run = build_run(tmp_path, keep_latest_k=0, **way.settings)
    assert run.manager.load() and run.manager.save(2)
    run.manager.close()
    assert names(tmp_path) == ["step-1", "step-2", "superseded"]
    assert (folder / "superseded/step-2" / PIN).exists()
    assert not (folder / "step-2" / PIN).exists()


@of_each_manager
def test_what_a_save_left_that_died_is_kept_aside_if_it_is_pinned(tmp_path: Path, way: Way) -> None:
    folder = trained(tmp_path, way, 1)
    died = folder / way.unfinished(3)
    died.mkdir()
    (died / PIN).touch()
    (folder / way.unfinished(5)).mkdir()
    goes_on(tmp_path, way, 2)
    assert names(tmp_path) == sorted(
        ["step-1", "step-2", died.name]
    ), "only what is not pinned goes"
    goes_on(tmp_path, way, 3)
    assert (folder / "superseded" / died.name / PIN).exists()
    assert way.complete(tmp_path) == ["step-2", "step-3"]


@of_each_manager
@pytest.mark.parametrize("keep", [0, 2])
def test_what_a_dead_run_has_half_deleted_is_never_loaded_and_goes_before_the_next_save(
    tmp_path: Path, way: Way, keep: int
) -> None:
    folder = trained(tmp_path, way, 3, keep_latest_k=0)
    os.rename(folder / "step-3/manifest.json", folder / "step-3" / DELETED)
    run = build_run(tmp_path, seed=3, keep_latest_k=keep, **way.settings)
    assert run.manager.newest_checkpoint() == str(folder / "step-2")
    assert run.manager.load() and run.step == 2
    run.progress.values["step"] = 3  # that its own step is saved is another test
    run.train(4)
    run.manager.close()
    assert names(tmp_path) == (
        ["step-1", "step-2", "step-4"] if keep == 0 else ["step-2", "step-4"]
    )


@of_each_manager
@pytest.mark.parametrize("keep", [0, 2])
def test_the_step_of_a_half_deleted_one_can_be_saved_again(
    tmp_path: Path, way: Way, keep: int
) -> None:
    folder = trained(tmp_path, way, 2, keep_latest_k=0)
    os.rename(folder / "step-2/manifest.json", folder / "step-2" / DELETED)
    run = goes_on(tmp_path, way, 2, keep_latest_k=keep)
    assert names(tmp_path) == way.complete(tmp_path) == ["step-1", "step-2"]
    assert not (folder / "step-2" / DELETED).exists()
    assert run.manager.newest_checkpoint() == str(folder / "step-2")


@of_each_manager
def test_a_half_deleted_one_is_told_from_a_save_that_died(
    tmp_path: Path, way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    folder = trained(tmp_path, way, 3, keep_latest_k=0)
    os.rename(folder / "step-3/manifest.json", folder / "step-3" / DELETED)
    run = build_run(tmp_path, seed=3, keep_latest_k=0, **way.settings)
    with caplog.at_level("INFO"):
        with pytest.raises(CheckpointNotFoundError, match="step .its deletion did not finish"):
            run.manager.load(3)
        assert run.manager.load()
        run.train(3)
    run.manager.close()
    assert "passed over: step-3 (its deletion did not finish)" in caplog.text
    assert f"Deleted {folder}/step-3, whose deletion had not ended." in caplog.text
    assert "save did not finish" not in caplog.text


@of_each_manager
def test_what_a_dead_run_has_replaced_goes_with_the_folder_around_it(
    tmp_path: Path, way: Way
) -> None:
    folder = trained(tmp_path, way, 2)
    shutil.copytree(folder / "step-2", folder / "replaced/step-2")
    goes_on(tmp_path, way, 3)
    assert names(tmp_path) == ["step-2", "step-3"]


@of_each_manager
def test_one_without_a_manifest_is_gone_on_from_until_its_step_is_saved_again_and_stays(
    tmp_path: Path, way: Way
) -> None:
    folder = trained(tmp_path, way, 1)
    (folder / "step-1/manifest.json").unlink()  # killed right before that
    again = build_run(tmp_path, **way.settings)
    with disk.using(RefusingDisk("step-1")):
        assert again.manager.load()
        with pytest.raises(CheckpointSaveError):
            again.manager.save(1)
        again.manager.close()
    assert again.manager.newest_checkpoint() == str(folder / "replaced/step-1")
    run = build_run(tmp_path, **way.settings)
    assert run.manager.load() and run.step == 1 and run.manager.save(1)
    run.manager.close()
    assert names(tmp_path) == ["step-1", "superseded"]
    assert (folder / "superseded/step-1" / way.format.marker).exists()


@of_each_manager
def test_what_waits_is_not_pushed_out_by_a_save_of_its_step_that_nobody_has_called_complete(
    tmp_path: Path, way: Way
) -> None:
    folder = trained(tmp_path, way, 1)
    shutil.copytree(folder / "step-1", folder / "replaced/step-1")
    (folder / "step-1/manifest.json").unlink()  # killed right before that
    with disk.using(RefusingDisk("step-1")):
        run = build_run(tmp_path, **way.settings)
        assert run.manager.load()
        with pytest.raises(CheckpointSaveError):
            run.manager.save(1)
        run.manager.close()
    assert run.manager.newest_checkpoint() == str(folder / "replaced/step-1")
    assert (folder / "replaced/step-1/manifest.json").exists()


@of_each_manager
@pytest.mark.parametrize("is_empty", [False, True], ids=["half", "all but the directory"])
def test_what_was_being_deleted_is_not_kept_by_a_run_that_goes_back(
    tmp_path: Path, way: Way, is_empty: bool
) -> None:
    folder = trained(tmp_path, way, 3, keep_latest_k=0)
    shutil.copytree(folder / "step-3", folder / "replaced/step-3")
    os.rename(folder / "replaced/step-3/manifest.json", folder / "replaced/step-3" / DELETED)
    if is_empty:
        shutil.rmtree(folder / "replaced/step-3")
        (folder / "replaced/step-3").mkdir()
    run = build_run(tmp_path, seed=3, keep_latest_k=0, **way.settings)
    assert run.manager.load(1)
    run.train(2)
    run.manager.close()
    assert names(tmp_path) == ["step-1", "step-2", "superseded"]
    assert sorted(each.name for each in (folder / "superseded").iterdir()) == ["step-2", "step-3"]


@of_each_manager
@pytest.mark.parametrize("by", ["its name", "a link"])
def test_what_the_run_begins_from_stays_in_the_own_folder_as_well(
    tmp_path: Path, way: Way, by: str
) -> None:
    folder = trained(tmp_path, way, 1)
    begun_from = folder / "step-1"
    if by == "a link":
        (tmp_path / "link").symlink_to(begun_from)
        begun_from = tmp_path / "link"
    goes_on(tmp_path, way, 5, initial_load_path=f"{begun_from}/")
    assert names(tmp_path) == ["step-1", "step-4", "step-5"]
    goes_on(tmp_path, way, 6)
    assert names(tmp_path) == ["step-5", "step-6"]


@of_each_manager
def test_weights_push_out_no_full_checkpoint_and_go_among_themselves(
    tmp_path: Path, way: Way
) -> None:
    run = build_run(tmp_path / "other", keep_latest_k=0, **way.settings)
    run.train(9, save=False)
    run.manager.save(9, last_step=True)
    run.manager.close()
    weights = tmp_path / "other/checkpoint/step-9"
    folder = trained(tmp_path, way, 4, keep_latest_k=0)
    shutil.rmtree(folder / "step-2")
    for step in (1, 2, 3):
        # Renamed, it is no full one either; without its manifest the back end's index tells.
        shutil.rmtree(folder / f"step-{step}", ignore_errors=True)
        shutil.copytree(weights, folder / f"step-{step}")
        (folder / f"step-{step}/manifest.json").unlink()
    goes_on(tmp_path, way, 6)
    assert names(tmp_path) == ["step-2", "step-3", "step-5", "step-6"]


@of_each_manager
def test_what_is_queued_at_the_end_is_gone_after_it(tmp_path: Path, way: Way) -> None:
    run = build_run(tmp_path, keep_latest_k=2, **way.settings)
    with stopping_in_deletions(run) as (reached, let_go):
        run.train(6)
        assert reached.wait(60)
        assert len(names(tmp_path)) == 6, "nothing has gone yet"
        closing = threading.Thread(target=run.manager.close)
        closing.start()
        let_go.set()
        closing.join(60)
        assert not closing.is_alive()
    assert names(tmp_path) == ["step-5", "step-6"]
    assert run.manager.purge_queue.empty() and not run.manager._deletions.waiting


@of_each_manager
def test_a_load_in_the_middle_of_a_run_finds_what_was_queued(tmp_path: Path, way: Way) -> None:
    run = build_run(tmp_path, keep_latest_k=2, **way.settings)
    deletions = run.manager._deletions
    with stopping_in_deletions(run) as (reached, let_go):
        run.train(5)
        assert reached.wait(60)  # at step-1; step-2 and step-3 are queued

        def let_go_in_the_load() -> None:
            try:
                wait_until(lambda: len(deletions.waiting) == 1)
            finally:
                let_go.set()

        letting_go = threading.Thread(target=let_go_in_the_load)
        letting_go.start()
        assert run.manager.load(3) and run.step == 3
        letting_go.join(60)
        run.manager.close()
    assert names(tmp_path) == ["step-2", "step-3", "step-4", "step-5"]


def delete_and_end(run: Run, path: str) -> None:
    run.manager._delete_beside_training(path)
    run.manager._stop_purging()


def interrupt_and_end(run: Run) -> None:
    threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()
    run.manager._stop_purging()


@of_each_manager
def test_ctrl_c_ends_the_wait_for_deletions_and_a_second_one_ends_the_process(
    tmp_path: Path, way: Way
) -> None:
    run = build_run(tmp_path, keep_latest_k=2, **way.settings)
    ends, hold = [], threading.Event()

    class Ended(BaseException):
        pass

    def end_at_once(self: signals.StopSignals) -> None:
        ends.append(True)
        raise Ended

    def interrupting(path: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)  # the main thread waits for this one
        assert hold.wait(60)

    with (
        patch.object(signals, "_ECHO_SECONDS", 0),
        patch.object(signals.StopSignals, "end_at_once", end_at_once),
        patch.object(run.manager._storage, "remove", interrupting),
        signals.StopSignals(),
    ):
        with pytest.raises(signals.StopRequested):
            delete_and_end(run, str(tmp_path / "checkpoint/step-2"))
        with pytest.raises(Ended):
            interrupt_and_end(run)
        hold.set()
        run.manager.close()
    assert ends == [True]
