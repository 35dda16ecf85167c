"""What DCP's collectives carry anyway is enough: digests to rank 0, damage found by one rank to all."""

import errno
import io
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torchtitan.components.checkpointer import dcp_index
from torchtitan.components.checkpointer.dcp_writer import DurableFileSystemWriter
from torchtitan.components.checkpointer.integrity.manifest import head_of

from tests.ranks import bare_dcp_reader
from tests.ranks.pool import run_on_ranks
from tests.ranks.trouble import as_saved, load_in_trouble, noted_collectives
from tests.unit_tests.components.checkpointer.recomputed import require_true
from tests.unit_tests.components.checkpointer.runs import build_run, message_of
from tests.unit_tests.components.checkpointer.ways import ASYNC, DISABLED, PINNED

pytestmark = pytest.mark.ranks

MODES = [DISABLED, ASYNC, PINNED]


def save_in_each_mode(folder: Path) -> Any:
    """One and the same run, saved three times."""
    snapshots = []
    for way in MODES:
        run = build_run(folder / way.name, **way.settings)
        run.train(2)
        run.manager.close()
        snapshots.append(run.snapshot())
    return snapshots[0]


def test_torch_alone_reads_what_every_mode_writes_and_the_manifest_tells_of_all_of_it(
    tmp_path: Path,
) -> None:
    snapshots = {n: run_on_ranks(n, save_in_each_mode, tmp_path / str(n))[0] for n in (1, 2)}
    steps = {
        str(tmp_path / str(n) / way.name / "checkpoint/step-2"): n for n in (1, 2) for way in MODES
    }
    command = [sys.executable, "-P", bare_dcp_reader.__file__, *steps]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for step, found in json.loads(output).items():
        num_ranks = steps[step]
        wanted = json.loads(json.dumps(as_saved(snapshots[num_ranks], model_prefix="")))
        assert len(wanted) > 20
        assert {name: found.get(name) for name in wanted} == wanted
        manifest = require_true(Path(step))
        assert manifest.head.world_size == num_ranks
        data = {f"__{rank}_0.distcp" for rank in range(num_ranks)}
        assert manifest.files.keys() == {".metadata", *data}


COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(("all_", "broadcast", "gather", "scatter", "reduce", "barrier", "send"))
]


def collectives_of_a_save(path: Path, *, with_manifest: bool) -> list[str]:
    head = head_of(1, "full", "dcp", 2, None) if with_manifest else None
    writer = DurableFileSystemWriter(str(path), head=head)
    state = {"w": torch.ones(3), f"of_{dist.get_rank()}": torch.ones(2)}
    with noted_collectives(COLLECTIVES) as called:
        torch_dcp.save(state, storage_writer=writer, checkpoint_id=str(path))
    return called


def test_digests_reach_rank_0_without_a_collective_of_their_own(tmp_path: Path) -> None:
    without = run_on_ranks(2, collectives_of_a_save, tmp_path / "a", with_manifest=False)
    made = run_on_ranks(2, collectives_of_a_save, tmp_path / "b", with_manifest=True)
    assert made == without and "gather_object" in made[0]
    assert require_true(tmp_path / "b").files.keys() == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    }


TROUBLES = {
    "damaged data": ("CheckpointDamagedError", "__1_0.distcp"),
    "missing data": ("CheckpointDamagedError", "__1_0.distcp"),
    "a damaged index": ("CheckpointDamagedError", ".metadata"),
    "a disk that fails": ("CheckpointReadError", "__1_0.distcp"),
}


def trouble_on_rank_1(trouble: str) -> Any:
    """Lets rank 1 alone see another disk than the others."""
    real = Path.open

    class Broken(io.FileIO):
        def readinto(self, buffer: Any) -> Any:
            raise OSError(errno.EIO, "Input/output error")

    def other_open(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name != "__1_0.distcp":
            return real(path, *args, **kwargs)
        if trouble == "missing data":
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        if trouble == "a disk that fails":
            return Broken(path)
        with real(path, "rb") as file:
            content = bytearray(file.read())
        content[len(content) // 2] ^= 1
        return io.BytesIO(content)

    if dist.get_rank() != 1:
        return nullcontext()
    if trouble == "a damaged index":
        return patch.object(dcp_index, "open", lambda *_: io.BytesIO(b"no index"), create=True)
    return patch.object(Path, "open", other_open)


def test_what_one_rank_finds_all_ranks_raise_before_an_object_changes(tmp_path: Path) -> None:
    first, second = run_on_ranks(
        2, load_in_trouble, tmp_path, DISABLED, list(TROUBLES), trouble_on_rank_1
    )
    assert first == second
    step = str(tmp_path / "checkpoint/step-2")
    for (name, file), (found, text, is_same, is_loaded) in zip(
        TROUBLES.values(), first, strict=True
    ):
        assert found == name, text
        assert "rank 1" in text.lower() and step in text and file in text
        assert is_same and is_loaded


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
    run, reader = build_run(folder), Reader()
    run.manager.states["reader"] = reader
    run.train(1)
    reader.has_object = True
    message = message_of(run.train, 2)
    reader.has_object = False
    run.train(3)
    run.manager.close()
    return message


def test_an_object_of_one_rank_fails_the_save_on_all_by_its_key(tmp_path: Path) -> None:
    for message in run_on_ranks(2, save_an_object, tmp_path):
        assert "step 2" in message and "rank 1" in message
        assert "reader.dp_rank_1.inner cannot be saved" in message and "Custom" in message
    assert not (tmp_path / "checkpoint/step-2/.metadata").exists()
    require_true(tmp_path / "checkpoint/step-3")
