"""What ranks say to each other in a save and a load anyway is enough: digests to rank 0, damage to all."""

import errno
import io
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torchtitan.components.checkpointer.errors import CheckpointDamagedError, CheckpointReadError
from torchtitan.components.checkpointer.integrity.manifest import RunDescription
from torchtitan.components.checkpointer.tc.reading import _read_on_all_ranks
from torchtitan.components.checkpointer.tc.storage import DurableStorage

from tests.ranks import bare_tc_reader
from tests.ranks.pool import run_on_ranks
from tests.ranks.trouble import as_saved, load_in_trouble, noted_collectives
from tests.unit_tests.components.checkpointer.recomputed import require_true
from tests.unit_tests.components.checkpointer.runs import build_run, message_of
from tests.unit_tests.components.checkpointer.ways import stager_of, TC, TC_WAITING

pytestmark = pytest.mark.ranks

WAYS = [TC, TC_WAITING]
RUN = RunDescription({"training": {"steps": 3}}, {"dp_shard": 2})


def save_in_each_way(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """One and the same run, saved twice; the keys that are left where the writers meet."""
    snapshots, left = [], []
    for way in WAYS:
        run = build_run(folder / way.name, **way.settings)
        run.manager.describe_run(RUN)
        run.train(2)
        run.manager.maybe_wait_for_saving()
        snapshots.append(run.snapshot())
        stager = stager_of(run.manager)
        if stager is not None and stager._store is not None:
            left = stager._store.list_keys()
        run.train(3, last_step=3)
        run.manager.close()
    assert snapshots[0] == snapshots[1]
    return snapshots[0], left


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, dict[str, Any]]]:
    """By number of ranks: where they have saved, what they had at step 2."""
    found = {}
    for num_ranks in (1, 2):
        folder = tmp_path_factory.mktemp("saved")
        snapshot, left = run_on_ranks(num_ranks, save_in_each_way, folder)[0]
        assert (num_ranks == 1) == (not left) and not [key for key in left if "/files/" in key]
        found[num_ranks] = folder, snapshot
    return found


def test_the_library_alone_reads_what_is_written_in_every_way(saved: Any) -> None:
    snapshots = {
        str(folder / way.name / "checkpoint/step-2"): snapshot
        for folder, snapshot in saved.values()
        for way in WAYS
    }
    command = [sys.executable, "-P", bare_tc_reader.__file__, *snapshots]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for step, found in json.loads(output).items():
        wanted = json.loads(json.dumps(as_saved(snapshots[step], model_prefix="model.")))
        assert len(wanted) > 20
        assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_manifest_tells_what_a_save_is_and_what_every_rank_has_written(
    saved: Any, num_ranks: int, way: Any
) -> None:
    folder = saved[num_ranks][0] / way.name / "checkpoint"
    manifest = require_true(folder / "step-2")
    own = {f"{key}_{rank}.pt" for key in ("model", "optimizer") for rank in range(num_ranks)}
    equal = {f"{key}_0.pt" for key in ("lr_scheduler", "dataloader", "train_state")}
    assert manifest.files.keys() == {"metadata.pkl"} | own | equal
    head = manifest.head
    assert (head.step, head.kind, head.world_size) == (2, "full", num_ranks)
    assert head.backend == "torch_checkpointing"
    assert (head.config, head.parallel) == (RUN.config, RUN.parallel)
    assert head.versions["torch"] == torch.__version__
    # The last save is one that training waits for, in every way, and of the model alone.
    last = require_true(folder / "step-3")
    assert (last.head.step, last.head.kind) == (3, "model_only")
    assert last.files.keys() == {"metadata.pkl", *(f"model_{rank}.pt" for rank in range(num_ranks))}


def collectives_of_a_save(folder: Path, *, with_manifest: bool) -> list[str]:
    """The collectives of the second save of a run that waits for it."""
    run = build_run(folder, **TC_WAITING.settings)
    if not with_manifest:
        run.manager._head_of = lambda *given, **more: None
    run.train(1)
    run.train(2, save=False)
    names = ("all_gather", "broadcast", "gather", "barrier", "all_gather_object", "gather_object")
    with noted_collectives(names) as called:
        run.manager.save(2)
    run.manager.close()
    return called


def test_digests_reach_rank_0_without_a_collective_of_their_own(tmp_path: Path) -> None:
    without = run_on_ranks(2, collectives_of_a_save, tmp_path / "a", with_manifest=False)
    made = run_on_ranks(2, collectives_of_a_save, tmp_path / "b", with_manifest=True)
    assert made == without and "all_gather" in made[0]
    assert not (tmp_path / "a/checkpoint/step-2/manifest.json").exists()
    require_true(tmp_path / "b/checkpoint/step-2")


TROUBLES = {
    "damaged data": ("CheckpointDamagedError", "expected xxh3"),
    "missing data": ("CheckpointDamagedError", "is missing"),
    "cut data": ("CheckpointDamagedError", "expected"),
    "a disk that fails": ("CheckpointReadError", "Input/output error"),
}


def trouble_on_rank_1(trouble: str) -> Any:
    """Lets rank 1 alone see another disk than the others."""
    real = DurableStorage._open_for_read

    class Broken(io.FileIO):
        def readinto(self, buffer: Any) -> Any:
            raise OSError(errno.EIO, "Input/output error")

        def read(self, size: int | None = -1) -> Any:
            self.readinto(b"")

        def readall(self) -> Any:
            self.readinto(b"")

    def other_open(storage: DurableStorage, path: Path, use_direct_io: bool) -> Any:
        if path.name != "model_1.pt":
            return real(storage, path, use_direct_io)
        if trouble == "missing data":
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        if trouble == "a disk that fails":
            return Broken(path)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        return io.BytesIO(content[:-1] if trouble == "cut data" else content)

    is_here = dist.get_rank() == 1
    return patch.object(DurableStorage, "_open_for_read", other_open) if is_here else nullcontext()


def test_what_one_rank_finds_all_ranks_raise_before_an_object_changes(tmp_path: Path) -> None:
    first, second = run_on_ranks(
        2, load_in_trouble, tmp_path, TC_WAITING, list(TROUBLES), trouble_on_rank_1
    )
    assert first == second
    step = str(tmp_path / "checkpoint/step-2")
    for (name, words), (found, text, is_same, is_loaded) in zip(
        TROUBLES.values(), first, strict=True
    ):
        assert found == name, text
        assert f"rank 1: {step}/model_1.pt" in text or f"rank 1: Could not read {step}" in text
        assert words in text and is_same and is_loaded


DAMAGED, FAILING = CheckpointDamagedError("it is damaged."), CheckpointReadError("it fails.")
ENDS: list[tuple[list[Exception | None], str, str]] = [
    ([None, None], "", ""),
    ([FAILING, None], "CheckpointReadError", "rank 0: it fails."),
    # An older checkpoint is good for all ranks, so damage is what all of them tell.
    ([FAILING, DAMAGED], "CheckpointDamagedError", "rank 1: it is damaged."),
    ([DAMAGED, DAMAGED], "CheckpointDamagedError", "rank 0: it is damaged."),
    ([None, FileNotFoundError(2, "gone")], "CheckpointDamagedError", "rank 1: FileNotFoundError("),
    (
        [None, RuntimeError("no kernel")],
        "CheckpointReadError",
        "rank 1: RuntimeError('no kernel').",
    ),
]


def ends_of_reads() -> list[tuple[str, str]]:
    found = []
    for errors, _, _ in ENDS:
        error = errors[dist.get_rank()]
        try:
            _read_on_all_ranks(Mock(side_effect=error), "/run/step-7", None)
            found.append(("", ""))
        except CheckpointReadError as caught:
            found.append((type(caught).__name__, str(caught)))
    return found


def test_damage_on_any_rank_is_damage_on_all() -> None:
    first, second = run_on_ranks(2, ends_of_reads)
    assert first == second
    for (_, name, words), (found, text) in zip(ENDS, first, strict=True):
        assert found == name and words in text and ("/run/step-7" in text) == bool(name)


class Custom:
    """Of this program, so a load would have to import it."""


class Reader:
    """State that becomes one which rank 1 alone cannot save."""

    has_object = False

    def state_dict(self) -> dict[str, Any]:
        own = Custom() if self.has_object and dist.get_rank() == 1 else 7
        return {f"dp_rank_{dist.get_rank()}": {"inner": own}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def save_an_object(folder: Path) -> str:
    run, reader = build_run(folder, **TC_WAITING.settings), Reader()
    run.manager.states["reader"] = reader
    reader.has_object = True
    message = message_of(run.train, 1)
    reader.has_object = False
    run.train(2)
    run.manager.close()
    return message


def test_an_object_of_one_rank_fails_the_save_on_all_by_its_key(tmp_path: Path) -> None:
    for message in run_on_ranks(2, save_an_object, tmp_path):
        assert "step 1" in message and "rank 1" in message
        assert "reader.dp_rank_1.inner cannot be saved" in message and "Custom" in message
    assert not (tmp_path / "checkpoint/step-1").exists()
    require_true(tmp_path / "checkpoint/step-2")
