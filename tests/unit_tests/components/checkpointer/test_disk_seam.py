"""Nothing that a run does to its folder goes past the disk of the process, in no way of saving.

What the disk has recorded is done to a model of one; the folder must hold the same afterwards, names
and contents.
"""

from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.checkpointer.formats import CheckpointFiles
from torchtitan.components.checkpointer.integrity.manifest import RunDescription
from torchtitan.components.checkpointer.storage import MovingStorage
from torchtitan.components.checkpointer.tc.storage import (
    BackendCheckpointStorage,
    DurableStorage,
    DurableStorageConfig,
)
from torchtitan.tools import disk, filesystem

from tests.crash.model import DiskModel
from tests.crash.operations import Kind, Operation, read_log
from tests.crash.recording import RecordingDisk
from tests.crash.tree import read_tree
from tests.unit_tests.components.checkpointer.runs import build_run
from tests.unit_tests.components.checkpointer.ways import DISABLED, over, TC_WAITING, Way
from tests.unit_tests.noting_disk import NotingDisk


class Recorded:
    """Runs into the folder ``root`` whose every operation is recorded."""

    def __init__(self, folder: Path) -> None:
        self.root, self._log = folder / "run", folder / "log"
        self.root.mkdir()
        self.disk = RecordingDisk(str(self.root), str(self._log))

    def operations(self) -> list[Operation]:
        return read_log(str(self._log))

    def require_whole(self) -> None:
        """Check that the record leads to what is there."""
        model = DiskModel()
        for operation in self.operations():
            model.apply(operation)
        assert str(model.tree()) == str(read_tree(self.root))


def train(recorded: Recorded, way: Way, until: int, **settings: Any) -> None:
    options = {"keep_latest_k": 2, "last_save_model_only": False, **way.settings, **settings}
    with disk.using(recorded.disk):
        run = build_run(recorded.root, **options)
        try:
            run.manager.describe_run(RunDescription({}, {}))  # else it takes no lock
            run.manager.load(step=options.get("load_step", -1))
            run.train(until, last_step=until)
        finally:
            run.manager.close()
    recorded.require_whole()
    assert f"step-{until}" in way.complete(recorded.root)


@over()
@pytest.mark.usefixtures("one_rank")
def test_all_that_a_run_does_to_its_folder_goes_through_the_disk(tmp_path: Path, way: Way) -> None:
    recorded = Recorded(tmp_path)
    train(recorded, way, 4)
    # What a save that died has left.
    recorded.disk.mkdir(f"{recorded.root}/checkpoint/{way.unfinished(6)}")
    train(recorded, way, 6)
    train(recorded, way, 6, load_step=5)  # writes step 6 again, and moves the older one aside
    kinds = {operation.kind for operation in recorded.operations()}
    assert kinds >= {
        *(Kind.CREATE, Kind.WRITE, Kind.SYNC, Kind.SYNC_DIRECTORY),
        *(Kind.MKDIR, Kind.RENAME, Kind.LINK, Kind.UNLINK, Kind.RMDIR),
    }


STORAGES: dict[str, MovingStorage] = {
    "ours": CheckpointFiles(),
    "library": BackendCheckpointStorage(DurableStorage(DurableStorageConfig())),
}


@pytest.mark.parametrize("name", STORAGES)
def test_a_link_has_its_new_name_for_good_before_it_loses_the_old_one(
    name: str, tmp_path: Path
) -> None:
    filesystem.makedirs(f"{tmp_path}/elsewhere")
    (tmp_path / "step-9").symlink_to("elsewhere")
    noting = NotingDisk(tmp_path)
    with disk.using(noting):
        STORAGES[name].move(f"{tmp_path}/step-9", f"{tmp_path}/superseded/step-9")
        STORAGES[name].remove(f"{tmp_path}/superseded/step-9")
    assert noting.noted == [
        "mkdir superseded",
        "sync_directory .",
        "symlink superseded/step-9",
        "sync_directory superseded",
        "unlink step-9",
        "sync_directory .",
        "unlink superseded/step-9",
        "sync_directory superseded",
    ]


@over(DISABLED, TC_WAITING)
@pytest.mark.usefixtures("one_rank")
def test_names_that_an_earlier_run_has_left_are_synced_once_or_that_is_told(
    way: Way, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "replaced").mkdir(parents=True)

    class Refusing(NotingDisk):
        def sync_directory(self, path: str) -> None:
            is_first = "sync_directory checkpoint" not in self.noted
            super().sync_directory(path)
            if is_first and path == str(folder):
                raise OSError(5, "Input/output error")

    noting = Refusing(tmp_path)
    with disk.using(noting):
        run = build_run(tmp_path, **way.settings)
        run.train(2)
        run.manager.close()
    assert noting.noted[0] == "sync_directory checkpoint"
    assert caplog.text.count("could not be synced") == 1 and "Look whether" in caplog.text
    assert way.complete(tmp_path) == ["step-1", "step-2"]
