"""Our parts in place of those of torch_checkpointing, one by one."""

import os
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch_checkpointing.checkpoint_base import CheckpointInfo, CheckpointItem
from torch_checkpointing.checkpoint_process import CheckpointProcess
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torchtitan.components.checkpointer.errors import CheckpointDamagedError
from torchtitan.components.checkpointer.integrity.manifest import head_of
from torchtitan.components.checkpointer.integrity.verification import Verification, Verify
from torchtitan.components.checkpointer.tc import background, defaults
from torchtitan.components.checkpointer.tc.library import (
    Backend,
    BackendConfig,
    Metadata,
    on_this_rank,
)
from torchtitan.components.checkpointer.tc.ranks import rank_info_of_this_process
from torchtitan.components.checkpointer.tc.resharder import Resharder
from torchtitan.components.checkpointer.tc.storage import DurableStorageConfig
from torchtitan.components.checkpointer.tc.writer_main import Job

from tests.unit_tests.components.checkpointer.recomputed import manifest_in, require_true

ALONE = rank_info_of_this_process()


def config(**settings: Any) -> BackendConfig:
    return on_this_rank(
        defaults.with_sync_save(
            defaults.for_this_run(
                defaults.default_backend_config(),
                {},
                storage_config=DurableStorageConfig(),
                limit_seconds=60,
                load_only=False,
            ),
            **settings,
        ),
        group=None,
        stager=None,
    )


@pytest.fixture
def backend() -> Iterator[Backend]:
    built = config().build()
    yield built
    built.close()


def state(**more: Any) -> dict[str, Any]:
    return {"model": {"w": torch.arange(4.0), **more}}


def test_a_synchronous_save_is_there_when_it_returns_and_comes_back_in_place(
    backend: Backend, tmp_path: Path
) -> None:
    assert backend.save(f"{tmp_path}/step-1", {**state(), "train_state": {"step": 1}}) is None
    assert sorted(os.listdir(tmp_path / "step-1")) == [
        *("metadata.pkl", "model_0.pt", "train_state_0.pt"),
    ]
    target = torch.zeros(4)
    loaded = backend.load(f"{tmp_path}/step-1", into={"model": {"w": target}}, strict=True)
    assert loaded["model"]["w"] is target and target.tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(RuntimeError, match="missing keys.*other"):
        backend.load(f"{tmp_path}/step-1", into=state(other=torch.zeros(1)), strict=True)


def test_every_save_has_the_metadata_of_its_own_state(backend: Backend, tmp_path: Path) -> None:
    for step, more in enumerate([{}, {}, {"new": torch.zeros(2)}, {"new": torch.zeros(3)}]):
        backend.save(f"{tmp_path}/step-{step}", state(**more))
        into = state(**{name: torch.ones_like(tensor) for name, tensor in more.items()})
        backend.load(f"{tmp_path}/step-{step}", into=into, strict=True)
        assert all(not tensor.any() for name, tensor in into["model"].items() if name == "new")


def test_a_checkpoint_without_metadata_is_not_read(backend: Backend, tmp_path: Path) -> None:
    backend.save(f"{tmp_path}/step-1", state())
    (tmp_path / "step-1/metadata.pkl").unlink()
    with pytest.raises(FileNotFoundError, match="No distributed metadata"):
        backend.load(f"{tmp_path}/step-1", into=state())


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_metadata_with_code_in_it_is_refused_by_the_reader_too(
    backend: Backend, tmp_path: Path
) -> None:
    backend.save(f"{tmp_path}/step-1", state())
    content = pickle.dumps({"metadata": {}, "more": Harmful(tmp_path / "trace")})
    (tmp_path / "step-1/metadata.pkl").write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match="holds no code"):
        backend.load(f"{tmp_path}/step-1", into=state())
    assert not (tmp_path / "trace").exists()


def test_an_item_without_metadata_is_read_as_data_too(backend: Backend, tmp_path: Path) -> None:
    backend.save(f"{tmp_path}/step-1", state())
    torch.save({"n": 1}, tmp_path / "step-1/extra_0.pt")
    assert backend.load(f"{tmp_path}/step-1", into={"extra": {"n": 0}})["extra"] == {"n": 1}
    torch.save({"n": Harmful(tmp_path / "trace")}, tmp_path / "step-1/extra_0.pt")
    with pytest.raises(CheckpointDamagedError, match="extra_0.pt .*asks for posix.mkdir"):
        backend.load(f"{tmp_path}/step-1", into={"extra": {"n": 0}})
    assert not (tmp_path / "trace").exists()


def verification(path: Path) -> Verification:
    return Verification(str(path), manifest_in(path), Verify.FULL)


def test_what_a_save_is_stands_in_its_manifest_and_not_in_that_of_another(
    backend: Backend, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        is_described = step < 3
        backend.head = head_of(step, "full", "tc", 1, None) if is_described else None
        backend.save(f"{tmp_path}/step-{step}", state())
        if is_described:
            assert require_true(tmp_path / f"step-{step}").head.step == step
    assert not (tmp_path / "step-3/manifest.json").exists()


@pytest.mark.parametrize("file", ["metadata.pkl", "model_0.pt"])
def test_a_load_checks_what_it_reads_as_far_as_it_is_told_to(
    backend: Backend, tmp_path: Path, file: str
) -> None:
    backend.head = head_of(1, "full", "tc", 1, None)
    path = tmp_path / "step-1"
    backend.save(str(path), {"model": {"w": torch.zeros(1000, dtype=torch.int8)}})
    content = bytearray((path / file).read_bytes())
    backend.check_with(verification(path))
    into = {"model": {"w": torch.ones(1000, dtype=torch.int8)}}
    backend.load(str(path), into=into, strict=True)
    assert not into["model"]["w"].any()
    # In the middle of the tensor: nothing but its digest tells.
    content[content.find(bytes(999)) + 500 if file == "model_0.pt" else 1] ^= 1
    (path / file).write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match=f"{path}/{file} is damaged.*expected xxh3"):
        backend.load(str(path), into=into, strict=True)
    if file == "model_0.pt":
        backend.check_with(None)
        backend.load(str(path), into=into, strict=True)
        assert into["model"]["w"].sum().item() == 1


def test_it_ends_once_and_is_of_no_use_then(tmp_path: Path) -> None:
    backend = config().build()
    backend.prewarm_staging(state())  # nothing to do for saves that are waited for
    for _ in range(2):
        backend.close()
    with pytest.raises(RuntimeError, match="closed"):
        backend.save(f"{tmp_path}/step-1", state())
    with pytest.raises(RuntimeError, match="closed"):
        backend.load(f"{tmp_path}/step-1", into=state())


def test_a_failed_save_is_forgotten_where_the_library_would_raise_it_for_ever(
    backend: Backend,
) -> None:
    failed: Future[Any] = Future()
    failed.set_exception(OSError("full"))
    backend._write_future = backend._staging_future = failed
    backend.forget_failure()
    assert backend._write_future is None and backend._staging_future is None


def described(**tensors: Any) -> CheckpointInfo:
    return CheckpointInfo({"model": CheckpointItem(value=tensors, resharder=Resharder())})


def test_metadata_is_made_anew_only_when_it_has_changed() -> None:
    metadata = Metadata(ALONE, None)
    assert metadata.get_serialized_metadata() is None
    first = metadata.compute_metadata(described(w=torch.zeros(2)))
    content = metadata.get_serialized_metadata()
    with patch.object(DefaultMetadataManager, "_aggregate_metadata", side_effect=AssertionError):
        assert metadata.compute_metadata(described(w=torch.ones(2))) is first
    assert metadata.get_serialized_metadata() is content
    for changed in (torch.zeros(3), torch.zeros(2, dtype=torch.int64)):
        assert metadata.compute_metadata(described(w=changed)) is not first
        assert metadata.get_serialized_metadata() != content
    metadata.close()


def test_a_tensor_that_could_not_be_read_back_fails_the_save_by_its_rank() -> None:
    metadata = Metadata(ALONE, None)
    with pytest.raises(ValueError, match="rank 0: model has two tensors .*Rename"):
        metadata.compute_metadata(described(**{"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}))
    metadata.close()


class Memory:
    """A stager and what it has staged."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.copying: Future[Any] = Future()
        self.jobs: list[tuple[Job, str]] = []

    def stage(self, state_dict: Any) -> "Future[Any]":
        self.given.append(state_dict)
        return self.copying

    def deliver(self, job: Job, path: str) -> None:
        self.jobs.append((job, path))


def test_all_items_are_staged_together_whatever_the_library_would_copy() -> None:
    memory: Any = Memory()
    stager = background.SharedMemory(memory)
    found = stager.stage({"model": 1, "train_state": 2}, ("train_state",))
    assert memory.given == [{"model": 1, "train_state": 2}] and not found.done()
    memory.copying.set_result(memory)
    assert found.result(0) == {"model": memory, "train_state": memory}
    assert stager.get_staged_state_dict() is None
    stager.close()
    failed: Any = Memory()
    failing = background.SharedMemory(failed).stage({"model": 1})
    failed.copying.set_exception(OSError("no memory"))
    assert isinstance(failing.exception(0), OSError)


def test_a_job_is_what_the_writer_process_needs_of_this_save(backend: Backend) -> None:
    memory: Any = Memory()
    args: Any = "the arguments of the writer"
    head = head_of(5, "full", "tc", 1, None)
    heads = [head]
    process = background.Process(args, (print, ("prepared",)), find_head=lambda: heads[-1])
    assert isinstance(process, CheckpointProcess)
    background.checkpoint_logging_context.update(step=5)
    items = {key: CheckpointItem(value=memory) for key in ("model", "train_state")}
    ready: Future[Any] = Future()
    future = process.write(ready, "/run/step-5")
    background.checkpoint_logging_context.update(step=6)  # training goes on
    heads.append(head_of(6, "full", "tc", 1, None))
    ready.set_result(CheckpointInfo(items).for_writes(b"metadata"))
    assert future.result(60) is None
    ((job, path),) = memory.jobs
    assert path == "/run/step-5" and job.args is args and job.metadata == b"metadata"
    assert job.head is head
    assert job.log_context["step"] == 5 and job.init == (print, ("prepared",))
    assert dict(job.layouts) == {"model": None, "train_state": None}
    process.close()
    with pytest.raises(RuntimeError):
        process.write(ready, "/run/step-6")


def test_the_end_of_the_process_waits_for_nobody() -> None:
    memory: Any = Memory()
    args: Any = None
    process = background.Process(args, None)
    never: Future[Any] = Future()
    future = process.write(never, "/run/step-1")
    started_at = time.monotonic()
    process.close()
    assert time.monotonic() - started_at < 30 and not future.done()
    never.set_exception(OSError("given up"))
    assert isinstance(future.exception(60), OSError)
    assert not memory.jobs


def test_items_get_our_resharder_and_not_that_of_the_library(backend: Backend) -> None:
    items = backend._schema.build_items({"model": 1, "anything": 2}, rank=0)
    assert {type(item.resharder) for item in items.values()} == {Resharder}
    assert issubclass(Resharder, DefaultResharder)
