"""A load from a checkpoint that is not what was saved: told as that, before an object has changed."""

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torchtitan.components.checkpointer.errors import CheckpointDamagedError, CheckpointReadError
from torchtitan.components.checkpointer.pinned import means
from torchtitan.components.checkpointer.tc.library import Backend
from torchtitan.components.checkpointer.tc.reading import look
from torchtitan.components.checkpointer.tc.storage import (
    BackendCheckpointStorage,
    DurableStorage,
    DurableStorageConfig,
)
from torchtitan.components.checkpointer.torch_checkpointing import TorchCheckpointingManager

from tests.unit_tests.components.checkpointer.recomputed import require_true
from tests.unit_tests.components.checkpointer.runs import build_run, Counter, Run
from tests.unit_tests.components.checkpointer.tc.memory_storage import InMemory

pytestmark = pytest.mark.usefixtures("one_rank")


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class Noting(Counter):
    """State that notes when it is changed."""

    num_changes = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_changes += 1
        super().load_state_dict(state_dict)


def run_in(folder: Path, **settings: Any) -> Run:
    with patch.object(means, "no_shared_memory", return_value="the test says so"):
        run = build_run(folder, manager=TorchCheckpointingManager, **settings)
    run.manager.states["noting"] = Noting(n=1)
    return run


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A checkpoint of step 1."""
    run = run_in(tmp_path, last_save_model_only=False)
    run.train(1)
    run.manager.close()
    return tmp_path / "checkpoint/step-1"


def refusal(step: Path, **settings: Any) -> CheckpointReadError:
    """What a run is told that is to load ``step``, and in which no object has changed."""
    run = run_in(step.parents[1], seed=5, load_only=True, **settings)
    with pytest.raises(CheckpointReadError) as caught:
        run.manager.load(1)
    assert run.step == 0 and run.manager.states["noting"].num_changes == 0
    run.manager.close()
    return caught.value


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


FILES = ["metadata.pkl", "manifest.json", "model_0.pt", "optimizer_0.pt", "noting_0.pt"]


@pytest.mark.parametrize("file", FILES)
def test_one_changed_bit_is_found_wherever_it_is(step: Path, file: str) -> None:
    flip(step / file)
    error = refusal(step)
    assert isinstance(error, CheckpointDamagedError)
    assert f"{step}/{file}" in str(error) and "expected xxh3" in str(error)


def test_a_save_that_is_good_is_loaded_and_its_objects_change_once(step: Path) -> None:
    require_true(step)
    run = run_in(step.parents[1], seed=5, load_only=True)
    assert run.manager.load(1)
    assert run.step == 1 and run.manager.states["noting"].num_changes == 1
    run.manager.close()


def arm(path: Path, trace: Path) -> None:
    tree = torch.load(path, weights_only=True)
    torch.save({**tree, "armed": Harmful(trace)}, path)


@pytest.mark.parametrize("verify", ["full", "off"])
@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("file", ["model_0.pt", "optimizer_0.pt", "noting_0.pt"])
def test_a_tensor_file_that_asks_for_code_is_refused_and_runs_nothing(
    step: Path, tmp_path: Path, file: str, foreign: bool, verify: str
) -> None:
    trace = tmp_path / "trace"
    arm(step / file, trace)
    if foreign:
        (step / "manifest.json").unlink()
    error = refusal(step, verify=verify)
    assert isinstance(error, CheckpointDamagedError)
    assert not trace.exists() and file in str(error)
    if foreign or verify == "off":
        assert "asks for posix.mkdir" in str(error)
    torch.load(step / file, weights_only=False)
    assert trace.exists()


@pytest.mark.parametrize("lead_to", ["../step-0/model_0.pt", "/etc/passwd"])
def test_an_index_that_leads_out_of_the_checkpoint_is_damage(step: Path, lead_to: str) -> None:
    (step / "manifest.json").unlink()
    index = pickle.loads((step / "metadata.pkl").read_bytes())
    layout = {"file_path": lead_to, "serialization_format": {"type": "TorchSerialization"}}
    index["metadata"]["model"]["rank_to_layout_info"] = {0: layout}
    (step / "metadata.pkl").write_bytes(pickle.dumps(index))
    error = refusal(step)
    assert isinstance(error, CheckpointDamagedError)
    assert "which is outside of it" in str(error)


def fails_with(error: OSError) -> Callable[..., Any]:
    def fail(*given: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("asked", ["exists", "ls", "_open_for_read"])
def test_a_disk_that_does_not_answer_is_no_damage(step: Path, asked: str) -> None:
    storage = DurableStorage(DurableStorageConfig())
    with patch.object(storage, asked, fails_with(OSError(errno.EIO, "Input/output error"))):
        with pytest.raises(CheckpointReadError, match="says nothing about the check") as caught:
            look(storage, str(step))
    assert type(caught.value) is CheckpointReadError


def test_an_error_of_the_library_that_is_none_of_the_files_is_no_damage(step: Path) -> None:
    with patch.object(Backend, "load", side_effect=RuntimeError("no kernel")):
        assert type(refusal(step)) is CheckpointReadError
    with patch.object(Backend, "load", side_effect=FileNotFoundError(2, "No such file")):
        assert type(refusal(step)) is CheckpointDamagedError


@pytest.mark.parametrize("is_seekable", [True, False])
def test_a_storage_of_somebody_else_is_held_to_the_same(is_seekable: bool) -> None:
    memory = InMemory(is_seekable=is_seekable)
    keywords = {"keywords": {"storage_config": memory}}
    folder = Path("/nowhere")
    run = run_in(folder, last_save_model_only=False, **keywords)
    run.train(1)
    run.manager.close()
    expected = run.snapshot()
    step = folder / "checkpoint/step-1"
    storage = BackendCheckpointStorage(memory.create_storage())
    names = set(storage.listdir(str(step)))
    assert {"manifest.json", "metadata.pkl", "model_0.pt", "noting_0.pt"} <= names
    again = run_in(folder, seed=5, load_only=True, **keywords)
    assert again.manager.load(1) and again.snapshot() == expected
    again.manager.close()
    for name in ("model_0.pt", "metadata.pkl", "noting_0.pt"):
        good = memory.files[step / name]
        damaged = bytearray(good)
        damaged[len(good) // 2] ^= 1
        memory.files[step / name] = bytes(damaged)
        error = refusal(step, **keywords)
        assert isinstance(error, CheckpointDamagedError) and f"{step}/{name}" in str(error)
        memory.files[step / name] = good


# Each of them reads files of its own: the small values, the tensors, and how they are laid out.
READERS = [
    "torchtitan.components.checkpointer.tc.reading.contents_of",
    "torchtitan.components.checkpointer.tc.resharder.read_into",
    "torch_checkpointing.distributed_metadata.DistributedMetadata.from_dict",
]


@pytest.mark.parametrize("verify", ["full", "size"])
@pytest.mark.parametrize("reader", READERS, ids=["values", "tensors", "index"])
def test_a_mistake_of_this_program_is_damage_only_if_nothing_has_checked_the_bytes(
    step: Path, reader: str, verify: str
) -> None:
    with patch(reader, side_effect=KeyError("a mistake")):
        error = refusal(step, verify=verify)
    assert "a mistake" in str(error)
    assert isinstance(error, CheckpointDamagedError) == (verify == "size")
