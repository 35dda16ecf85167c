"""Of torch_checkpointing 0.1.1: what its managers, savers and readers do that ours build on.

Its files and its records are in test_library_facts_files.py.
"""

import inspect
import pickle
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_checkpointing.checkpoint_base import CheckpointBase, CheckpointItem, CheckpointWriteInfo
from torch_checkpointing.checkpoint_loader import CheckpointLoader
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.checkpoint_process import CheckpointProcess
from torch_checkpointing.checkpoint_reader import CheckpointReader
from torch_checkpointing.checkpoint_saver import AsyncCheckpointSaver, SyncCheckpointSaver
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.distributed_metadata import CheckpointMetadata, DistributedMetadata
from torch_checkpointing.lock import RWLock
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.metadata_serialization import (
    METADATA_FILE_NAME,
    TorchDistributedMetadataFormat,
)
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
from torch_checkpointing.types import RankInfo
from torch_checkpointing.utils import ensure_future, fut_then
from torchtitan.components.checkpointer.tc import index, library
from torchtitan.components.checkpointer.tc.metadata_file import parse_metadata

from tests.unit_tests.components.checkpointer.tc.facts import (
    attributes_used,
    parameters_of,
    relied_on_by,
    VERSION,
)
from tests.unit_tests.structure.sources import ROOT

ALONE = RankInfo(global_rank=0, global_world_size=1, role_rank=0, role_world_size=1)
BUFFERED = LocalFileSystemStorageConfig(use_direct_io=False)
OF_A_MANAGER = {
    *("_config", "_schema", "_rank", "_storage_config", "_metadata_manager", "_closed"),
    *("_saver", "_reader", "_loader"),
    *("_prewarm_staging_future", "_staging_future", "_write_future"),
}


@relied_on_by("tc/library.py", "tc/background.py", "tc/resharder.py", "tc/reading.py")
def test_the_version_is_the_one_that_was_read_and_the_one_that_is_pinned() -> None:
    assert version("torch_checkpointing") == VERSION
    pins = (ROOT / "requirements.txt").read_text().splitlines()
    assert f"torch-checkpointing=={VERSION}" in pins


def test_a_fact_that_has_changed_names_the_module_that_relied_on_it() -> None:
    def refuses_no_more() -> None:
        with pytest.raises(OSError):
            pass

    def is_another() -> None:
        assert VERSION == "another"

    for fact in (refuses_no_more, is_another):
        with pytest.raises(AssertionError, match="look at torchtitan/.*/tc/writer.py before going"):
            relied_on_by("tc/writer.py")(fact)()


@relied_on_by("tc/library.py: Backend")
def test_a_manager_has_the_attributes_that_ours_sets_and_no_others() -> None:
    writer = CheckpointWriterConfig(barrier_config=None, write_to_temp_dir=False)
    manager = CheckpointManager(
        CheckpointManager.Config(save=SyncCheckpointSaverConfig(writer_config=writer))
    )
    assert set(vars(manager)) == OF_A_MANAGER
    manager.close()


@relied_on_by("tc/library.py: Backend")
def test_saving_and_loading_use_these_attributes_and_no_others() -> None:
    used = {
        name: attributes_used(getattr(CheckpointManager, name)) for name in ("save", "load", "lock")
    }
    futures = {"_prewarm_staging_future", "_staging_future", "_write_future"}
    assert used == {
        "save": {"_closed", "_config", "_schema", "_rank", "_saver", *futures},
        "load": {"_closed", "_schema", "_rank", "_loader"},
        "lock": {"_saver"},
    }
    # Ours overrides these two whole.
    assert {"prewarm_staging", "close"} <= set(vars(CheckpointManager))
    assert attributes_used(CheckpointLoader, "self._metadata_manager") == {
        "extract_object_metadata"
    }
    assert attributes_used(AsyncCheckpointSaver, "self._checkpoint_stager") == {"stage", "close"}
    assert attributes_used(AsyncCheckpointSaver, "self._checkpoint_process") == {"write", "close"}


@relied_on_by("tc/library.py: BackendConfig", "tc/defaults.py")
def test_the_config_of_a_manager_has_these_fields() -> None:
    assert [each.name for each in fields(CheckpointManager.Config)] == [
        *("items", "default", "save", "load", "storage_config"),
        *("subprocess_init_fn", "subprocess_init_args"),
        *("pre_finalize_callback", "finalize_callback"),
    ]
    assert isinstance(CheckpointManager.Config().default, ItemSpec)
    assert parameters_of(library._CheckpointSchema) == ["items", "default"]


class Payload(CheckpointBase):
    def __init__(self, **values: Any) -> None:
        self.items = {
            key: CheckpointItem(value=value, resharder=DefaultResharder())
            for key, value in values.items()
        }
        self.loaded: dict[str, Any] = {}

    def get_items(self) -> dict[str, CheckpointItem]:
        return self.items

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.loaded = dict(state_dict)


class Recorded:
    """Stager, process, writer and metadata manager of a saver at once; what it is told is kept."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.staging: Future[Any] = Future()
        self.writing: Future[None] = Future()

    def stage(self, state_dict: Any, keys_not_requiring_copy: Any) -> "Future[Any]":
        self.calls.append(("stage", state_dict, set(keys_not_requiring_copy)))
        return self.staging

    def write(self, first: Any, second: Any) -> Any:
        self.calls.append(("write", first, second))
        return self.writing

    def compute_metadata(self, checkpoint_info: Any) -> CheckpointMetadata:
        self.calls.append(("compute", list(checkpoint_info.state_dict)))
        return CheckpointMetadata(DistributedMetadata(metadata={}, world_size=1), {})

    def close(self) -> None:
        self.calls.append(("close",))


class CountingSaver(AsyncCheckpointSaver):
    asked: list[str]

    def _prepare_checkpoint_write_info(
        self, checkpoint: CheckpointBase, validate: bool = False
    ) -> CheckpointWriteInfo:
        self.asked.append("prepare")
        return super()._prepare_checkpoint_write_info(checkpoint, validate)

    def _get_serialized_metadata_if_needed(self) -> bytes | None:
        self.asked.append("metadata")
        return b"metadata"


@relied_on_by("tc/background.py: Saver, SharedMemory, Process")
def test_an_asynchronous_saver_asks_for_the_metadata_of_each_save() -> None:
    recorded: Any = Recorded()
    saver = CountingSaver(recorded, recorded, recorded, 3.0)
    saver.asked = []
    for number in range(2):
        recorded.staging, recorded.writing = Future(), Future()
        recorded.calls.clear()
        saver.asked.clear()
        given = Payload(model=number)
        found = saver.save(f"/run/step-{number}", given)
        assert found is not None and found[1] is recorded.writing
        assert saver.asked == ["prepare"]
        stage, write = recorded.calls[-2:]
        assert stage == ("stage", {"model": number}, set())
        assert isinstance(write[1], Future) and write[2] == f"/run/step-{number}"
        assert saver.staging_lock.locked_mode() == "write"
        recorded.staging.set_result({"model": "staged"})
        info = write[1].result(0)
        assert saver.asked == ["prepare", "metadata"]
        assert info.serialized_distributed_metadata == b"metadata"
        assert info.state_dict == {"model": "staged"}
        assert info.layout_info_mappings == {"model": None}
        assert saver.staging_lock.locked_mode() == "read"
        recorded.writing.set_result(None)
        assert saver.staging_lock.locked_mode() is None
    saver.close()
    assert recorded.calls[-2:] == [("close",), ("close",)]


@relied_on_by("tc/background.py: Saver")
def test_without_ours_a_saver_would_look_at_the_metadata_once() -> None:
    recorded: Any = Recorded()
    saver = AsyncCheckpointSaver(recorded, recorded, recorded, 3.0)
    given = Payload(model=1)
    saver._prepare_checkpoint_write_info(given)
    saver._metadata_sent = True
    saver._prepare_checkpoint_write_info(given)
    assert [call[0] for call in recorded.calls] == ["compute"]
    assert saver._get_serialized_metadata_if_needed() is None
    saver._prepare_checkpoint_write_info(given, validate=True)
    assert [call[0] for call in recorded.calls] == ["compute", "compute"]


@relied_on_by("tc/background.py: Saver.forget_failure")
def test_a_saver_raises_an_old_failure_until_it_is_taken_away() -> None:
    recorded: Any = Recorded()
    saver = CountingSaver(recorded, recorded, recorded, 3.0)
    saver.asked = []
    saver.save("/run/step-1", Payload(model=1))
    recorded.writing.set_exception(OSError("the disk is full"))
    recorded.staging.set_result({"model": 1})
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is full"):
            saver.save("/run/step-2", Payload(model=1))
    saver._write_future = None
    assert saver.save("/run/step-3", Payload(model=1)) is not None


@relied_on_by("tc/library.py: Backend")
def test_a_synchronous_saver_hands_on_what_was_computed_and_has_no_lock() -> None:
    recorded: Any = Recorded()
    saver = SyncCheckpointSaver(recorded, recorded)
    for _ in range(2):
        recorded.calls.clear()
        assert saver.save("/run/step-1", Payload(model=1)) is None
        compute, (name, path, info) = recorded.calls
        assert (compute, name, path) == (("compute", ["model"]), "write", "/run/step-1")
        assert pickle.loads(info.serialized_distributed_metadata)["world_size"] == 1
    assert saver.stager is None and not hasattr(saver, "staging_lock")
    manager = object.__new__(CheckpointManager)
    manager._saver = saver
    assert isinstance(manager.lock(), nullcontext)


@relied_on_by("tc/background.py: Process")
def test_the_process_of_the_library_is_started_by_its_construction() -> None:
    assert "_create_subprocess" in attributes_used(CheckpointProcess.__init__)
    assert parameters_of(CheckpointProcess.write) == ["checkpoint_info", "path"]
    assert parameters_of(CheckpointProcess.close) == []


class Gathering(DefaultMetadataManager):
    """One of two ranks, which have the same."""

    def __init__(self) -> None:
        super().__init__(RankInfo(0, 2, 0, 2), None, False, False)
        self.calls: list[str] = []

    def _all_gather_pickled_data(self, data: Any, process_group: Any = None) -> dict[int, Any]:
        self.calls.append("gather")
        return {rank: pickle.loads(pickle.dumps(data)) for rank in (0, 1)}

    def _merge_object_metadata_from_ranks(self, all_ranks_metadata: Any) -> Any:
        self.calls.append("merge")
        return super()._merge_object_metadata_from_ranks(all_ranks_metadata)


@relied_on_by("tc/library.py: Metadata")
def test_metadata_is_gathered_and_merged_through_these_two_methods(one_rank: None) -> None:
    manager = Gathering()
    local = manager.extract_object_metadata(
        CheckpointWriteInfo(Payload(model={"w": torch.ones(2)}).get_items())
    )
    assert list(local) == ["model"] and list(local["model"]) == [("w",)]
    found = manager._aggregate_metadata(local, {"model": None})
    assert manager.calls == ["gather", "merge", "gather"]
    assert found.world_size == 2
    assert found.metadata["model"].rank_to_layout_info == {0: None, 1: None}
    manager.close()


@relied_on_by("tc/library.py: Metadata")
def test_the_library_gathers_with_cuda_and_compares_with_the_first_save_alone() -> None:
    assert 'device="cuda"' in inspect.getsource(DefaultMetadataManager._all_gather_pickled_data)
    assert parameters_of(DefaultMetadataManager) == [
        *("rank_info", "process_group", "should_cache_metadata", "enable_serialization"),
    ]
    manager = DefaultMetadataManager(ALONE)
    first, second = (
        CheckpointWriteInfo(Payload(model={"w": torch.ones(n)}).get_items()) for n in (1, 2)
    )
    assert isinstance(manager.compute_metadata(first), CheckpointMetadata)
    assert manager.compute_metadata(first) is None
    with pytest.raises(RuntimeError, match="has changed"):
        manager.compute_metadata(second)
    manager.close()


@relied_on_by("tc/metadata_file.py", "tc/library.py: PlainMetadata")
def test_metadata_is_written_as_values_and_nothing_else() -> None:
    info = CheckpointWriteInfo(
        Payload(model={"a": [torch.ones(2), {"b": torch.ones(1, dtype=torch.bfloat16)}]}).items
    )
    manager = DefaultMetadataManager(ALONE, None, False, False)
    metadata = manager.compute_metadata(info)
    manager.close()
    assert metadata is not None
    content = metadata.distributed_metadata.to_dict()
    parsed = parse_metadata("/run/step-1", pickle.dumps(content))
    assert parsed == content and DistributedMetadata.from_dict(parsed).to_dict() == content
    assert METADATA_FILE_NAME == index.MARKER
    assert parameters_of(TorchDistributedMetadataFormat.maybe_load) == [
        *("checkpoint_dir", "storage"),
    ]


class NoFormat(TorchDistributedMetadataFormat):
    @classmethod
    def maybe_load(cls, checkpoint_dir: Path, storage: Any) -> None:
        return None


class Strict(CheckpointReader):
    _METADATA_FORMATS = (NoFormat,)
    _REQUIRE_METADATA = True


@relied_on_by("tc/library.py: WholeReader")
def test_a_reader_asks_its_own_formats_and_can_insist_on_metadata(tmp_path: Path) -> None:
    torch.save({"w": torch.full((2,), 5.0)}, tmp_path / "model_0.pt")
    (tmp_path / index.MARKER).write_bytes(b"not even read")
    payload = Payload(model={"w": torch.zeros(2)})
    manager = DefaultMetadataManager(ALONE, None, False, False)
    with pytest.raises(FileNotFoundError, match="No distributed metadata found in .*NoFormat"):
        CheckpointLoader(Strict(ALONE, BUFFERED), manager).load(tmp_path, payload, strict=True)
    # The library alone would read this rank's own file.
    (tmp_path / index.MARKER).unlink()
    CheckpointLoader(CheckpointReader(ALONE, BUFFERED), manager).load(tmp_path, payload)
    assert payload.loaded["model"]["w"].tolist() == [5.0, 5.0]
    missing = Payload(model={"w": torch.zeros(2), "other": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="is missing keys: .*other"):
        CheckpointLoader(CheckpointReader(ALONE, BUFFERED), manager).load(
            tmp_path, missing, strict=True
        )
    manager.close()


@relied_on_by("tc/library.py: Backend.lock")
def test_a_copy_excludes_readers_and_a_write_does_not() -> None:
    lock = RWLock(acquire_timeout=0.01)
    lock.write.acquire_or_raise()
    assert lock.read.acquire(timeout=0.01) is False
    with pytest.raises(RuntimeError, match="likely a deadlock"):
        lock.read.acquire_or_raise()
    lock.downgrade()
    assert lock.read.acquire(timeout=-1) is True
    with pytest.raises(RuntimeError, match="likely a deadlock"):
        lock.write.acquire_or_raise()
    for _ in range(2):
        lock.read.release()
    assert lock.locked_mode() is None


@relied_on_by("tc/background.py: SharedMemory, Process")
def test_a_future_goes_on_in_the_thread_that_ends_it_or_fails_alike() -> None:
    first: Future[int] = Future()
    second = fut_then(first, lambda value: value + 1)
    first.set_result(1)
    assert second.result(0) == 2
    failed: Future[int] = Future()
    failed.set_exception(OSError("full"))
    assert isinstance(fut_then(failed, lambda value: value).exception(0), OSError)
    assert ensure_future(3).result(0) == 3 and ensure_future(first) is first
