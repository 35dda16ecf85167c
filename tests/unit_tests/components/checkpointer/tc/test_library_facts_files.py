"""Of torch_checkpointing 0.1.1: how its files are written, described and read, and what it records."""

import inspect
import io
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_checkpointing import barriers, default_resharder, version as library_version
from torch_checkpointing.barriers import Barrier, BarrierConfig, DefaultStoreBarrierConfig
from torch_checkpointing.checkpoint_base import CheckpointItem, CheckpointWriteInfo
from torch_checkpointing.checkpoint_layout import default_torch_layout_info
from torch_checkpointing.checkpoint_reader import CheckpointReader
from torch_checkpointing.checkpoint_writer import (
    _temp_dir_path,
    CallbackArgs,
    CheckpointWriter,
    CheckpointWriterArgs,
    CheckpointWriterConfig,
)
from torch_checkpointing.config import (
    AsyncCheckpointSaverConfig,
    CheckpointSaverConfig,
    SyncCheckpointSaverConfig,
)
from torch_checkpointing.default_resharder import _collect_leaf_values, DefaultResharder
from torch_checkpointing.distributed_metadata import (
    DistributedItemMetadata,
    GlobalObjectMetadata,
    ShardingMetadata,
)
from torch_checkpointing.logging_utils import checkpoint_logging_context, EventLogger, EventType
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.resharding import LoadPlan
from torch_checkpointing.resharding_utils import (
    convert_nested_path_dict_to_fqn,
    dedupe_aliased_targets,
)
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.base_storage import ReadArgs, Storage
from torch_checkpointing.storage.filesystem import (
    LocalFileSystemStorage,
    LocalFileSystemStorageConfig,
    WriteStream,
)
from torch_checkpointing.types import NestedPath, RankInfo
from torch_checkpointing.walk_utils import walk_checkpoint_structure
from torchtitan.components.checkpointer.tc import index

from tests.unit_tests.components.checkpointer.tc.facts import (
    attributes_used,
    parameters_of,
    relied_on_by,
)
from tests.unit_tests.components.checkpointer.tc.stand_ins import plain_tensor

BUFFERED = LocalFileSystemStorageConfig(use_direct_io=False)


class Steps(LocalFileSystemStorageConfig):
    """The storage and the barrier of a writer; they keep the order of what happens."""

    def __init__(self) -> None:
        super().__init__(use_direct_io=False)
        self.seen: list[str] = []

    def create_storage(self) -> "SeenStorage":
        return SeenStorage(self)

    def note(self, what: str) -> Any:
        return lambda args: self.seen.append(f"{what} {Path(args.path).name}")


class SeenStorage(LocalFileSystemStorage):
    def __init__(self, config: Steps) -> None:
        super().__init__(config)
        self.seen = config.seen

    def stream_write(self, path: Path) -> io.IOBase:
        self.seen.append(f"stream {path.parent.name}/{path.name}")
        return super().stream_write(path)

    def write(self, path: Path, data: Any) -> None:
        self.seen.append(f"write {path.parent.name}/{path.name}")
        super().write(path, data)

    def rename(self, src_path: Path, dst_path: Path, *others: Any, **more: Any) -> None:
        self.seen.append(f"rename {src_path.name} {dst_path.name}")
        super().rename(src_path, dst_path, *others, **more)


class SeenBarrier(Barrier):
    def __init__(self, config: Any) -> None:
        self.seen = config.seen

    def execute_barrier(self, timeout_secs: int) -> None:
        self.seen.append(f"barrier {timeout_secs}")


class SeenBarrierConfig(BarrierConfig):
    def __init__(self, seen: list[str]) -> None:
        self.timeout_barrier_init_sec = 0
        self.seen = seen

    def create_barrier(self, rank_info: RankInfo) -> SeenBarrier:
        return SeenBarrier(self)


def writer_args(steps: Steps, rank: int) -> CheckpointWriterArgs:
    return CheckpointWriterArgs(
        config=CheckpointWriterConfig(
            checkpoint_write_barrier_timeout_sec=9, barrier_config=SeenBarrierConfig(steps.seen)
        ),
        rank_info=RankInfo(rank, 2, rank, 2),
        storage_config=steps,
        pre_finalize_callback=steps.note("pre_finalize"),
        finalize_callback=steps.note("finalize"),
    )


@relied_on_by("tc/writer.py", "tc/commit.py: CommitBarrier", "tc/writer_main.py")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_writer_goes_from_files_to_the_final_name_in_this_order(
    rank: int, tmp_path: Path
) -> None:
    steps = Steps()
    writer = CheckpointWriter(writer_args(steps, rank))
    assert isinstance(writer._barrier, SeenBarrier) and isinstance(writer._storage, SeenStorage)
    info = CheckpointWriteInfo(
        {"model": CheckpointItem(value={"w": 1})}, serialized_distributed_metadata=b"metadata"
    )
    assert writer.write(str(tmp_path / "step-1"), info) is None
    expected = [
        f"stream tmp_step-1/model_{rank}.pt",
        "write tmp_step-1/metadata.pkl",
        "pre_finalize tmp_step-1",
        "barrier 9",
        "rename tmp_step-1 step-1",
        "finalize step-1",
    ]
    of_rank_0 = ("metadata", "rename")
    assert steps.seen == [
        each for each in expected if rank == 0 or not any(word in each for word in of_rank_0)
    ]


@relied_on_by("tc/writer.py: Writer._folder")
def test_a_temporary_directory_stands_beside_the_final_one() -> None:
    assert _temp_dir_path(Path("/run/step-7"), "tmp_") == Path("/run/tmp_step-7")


@relied_on_by("tc/writer.py: Writer._write_key")
def test_each_file_of_a_writer_goes_through_one_method() -> None:
    assert parameters_of(CheckpointWriter._write_key) == [
        *("key", "layout_info", "full_path", "data_to_serialize"),
    ]
    assert "_write_key" in attributes_used(CheckpointWriter._write_keys)


@relied_on_by("tc/writer.py", "tc/defaults.py: with_sync_save", "tc/index.py")
def test_a_writer_without_a_barrier_writes_in_place(tmp_path: Path) -> None:
    config = CheckpointWriterConfig(barrier_config=None, write_to_temp_dir=False)
    with pytest.warns(UserWarning, match="requires `write_to_temp_dir=False`"):
        replace(CheckpointWriterConfig(), barrier_config=None)
    steps = Steps()
    writer = CheckpointWriter(replace(writer_args(steps, 0), config=config))
    assert writer._barrier is None
    writer.write(str(tmp_path / "step-1"), CheckpointWriteInfo({"m": CheckpointItem(value=1)}))
    assert steps.seen == ["stream step-1/m_0.pt", "pre_finalize step-1", "finalize step-1"]
    assert CheckpointWriterConfig().temp_dir_prefix == index.TEMP_DIR_PREFIX
    assert default_torch_layout_info("model", 12).file_path == "model_12.pt"


@relied_on_by("tc/commit.py: CommitBarrier, CommitBarrierConfig", "tc/defaults.py")
def test_a_barrier_is_one_method_and_its_config_one_more() -> None:
    assert Barrier.__abstractmethods__ == {"__init__", "execute_barrier"}
    assert BarrierConfig.__abstractmethods__ == {"create_barrier"}
    assert [each.name for each in fields(BarrierConfig)] == ["timeout_barrier_init_sec"]
    assert [each.name for each in fields(barriers.TCPStoreBarrierConfig)] == [
        *("timeout_barrier_init_sec", "use_checkpoint_barrier_tcpstore_libuv"),
        *("tcpstore_port", "master_address", "key_prefix"),
    ]


@relied_on_by("tc/defaults.py")
def test_the_configs_of_savers_and_items_have_these_fields() -> None:
    def names(kind: Any) -> list[str]:
        return [each.name for each in fields(kind)]

    assert names(ItemSpec) == ["requires_copy", "layout", "resharder", "required"]
    shared = ["writer_config", "wait_timeout_secs"]
    assert names(CheckpointSaverConfig) == names(SyncCheckpointSaverConfig) == shared
    assert names(AsyncCheckpointSaverConfig) == [*shared, "staging_config", "process_config"]
    assert {"use_pinned_memory", "use_non_blocking_copy"} <= set(names(CheckpointStagerConfig))
    assert isinstance(CheckpointWriterConfig().barrier_config, DefaultStoreBarrierConfig)
    assert names(CallbackArgs) == ["path", "storage", "event_logger"]


@relied_on_by("tc/storage.py")
def test_a_storage_has_these_methods_and_ours_sits_in_their_way(tmp_path: Path) -> None:
    assert Storage.__abstractmethods__ == {
        *("delete", "exists", "getsize", "isdir", "ls", "mkdir"),
        *("remap_path", "rename", "rmdir", "stream_read", "stream_write", "write"),
    }
    assert LocalFileSystemStorageConfig().use_direct_io is True
    assert "use_direct_io" in attributes_used(LocalFileSystemStorage.__init__, "config")
    assert LocalFileSystemStorage(BUFFERED)._use_direct_io is False
    assert attributes_used(LocalFileSystemStorage.stream_read) == {
        *("_read_full_file", "_open_for_read"),
    }
    with WriteStream(tmp_path / "file", "wb", False) as stream:
        assert stream._file is not None and stream.write(b"abc") == 3
        file = stream._file
    assert file.closed and stream._file is None
    with LocalFileSystemStorage(BUFFERED).stream_read(
        tmp_path / "file", ReadArgs(pre_read_full_file=False)
    ) as reading:
        assert reading.seekable() and reading.seek(1) == 1 and reading.read() == b"bc"


@relied_on_by("tc/storage.py: DurableStorage.rename", "tc/library.py")
def test_a_rename_takes_no_name_that_holds_something(tmp_path: Path) -> None:
    storage = LocalFileSystemStorage(BUFFERED)
    for name in ("tmp_step-1", "step-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(FileExistsError, match="Refusing to rename"):
        storage.rename(tmp_path / "tmp_step-1", tmp_path / "step-1", is_directory=True)
    assert (tmp_path / "step-1/file").read_text() == "step-1"
    storage.rmdir(tmp_path / "step-1")
    storage.rename(tmp_path / "tmp_step-1", tmp_path / "step-1", is_directory=True)
    assert os.listdir(tmp_path) == ["step-1"] and os.listdir(tmp_path / "step-1") == ["file"]


@relied_on_by("tc/resharder.py", "tc/payload.py")
def test_leaves_are_visited_with_their_path_and_only_tensors_are_described() -> None:
    tree = {"a": [torch.ones(1), {3: "x"}], "b": (torch.ones(2), 4)}
    seen: list[tuple[Any, ...]] = []

    def look(path: Any, leaf: Any, _: Any) -> Any:
        seen.append((path.nested_path, str(path), type(leaf).__name__))
        return leaf

    walk_checkpoint_structure(item_key="item", source=tree, leaf_fn=look)
    assert seen == [
        (("a", 0), "item::a.0", "Tensor"),
        (("a", 1, 3), "item::a.1.3", "str"),
        (("b", 0), "item::b.0", "Tensor"),
        (("b", 1), "item::b.1", "int"),
    ]
    assert parameters_of(DefaultResharder.extract_sharding_metadata) == ["item_key", "item_value"]
    assert parameters_of(DefaultResharder.should_reshard) == ["source_metadata", "target_metadata"]
    assert DefaultResharder().skip_resharding is False
    with pytest.raises(ValueError, match="FQN collision"):
        convert_nested_path_dict_to_fqn({("a.b",): 1, ("a", "b"): 2})


@relied_on_by("tc/resharder.py: _plain, one_of_each_plain", "tc/library.py: Metadata")
def test_what_two_ranks_describe_alike_or_not_is_grouped_by_its_mesh() -> None:
    def of(rank: int) -> dict[str, dict[NestedPath, ShardingMetadata]]:
        return {"model": {("w",): plain_tensor(rank)}}

    manager = DefaultMetadataManager(RankInfo(1, 2, 1, 2), None, False, False)
    assert manager._compact(of(1)) == of(1) and manager._compact(of(0)) == {}
    merged = manager._merge_object_metadata_from_ranks({rank: of(rank) for rank in (0, 1)})
    assert merged["model"][("w",)] == [
        GlobalObjectMetadata(sharding_metadata=plain_tensor(0), ranks=(0,)),
        GlobalObjectMetadata(sharding_metadata=plain_tensor(1), ranks=(1,)),
    ]
    assert plain_tensor(1).equivalent_ranks == (1,)
    manager.close()


@relied_on_by("tc/resharder.py: Resharder._execute_load_plans")
def test_a_load_goes_through_the_plans_and_takes_tensors_at_one_address_for_one(
    tmp_path: Path,
) -> None:
    assert parameters_of(DefaultResharder._execute_load_plans) == [
        *("source_path", "source_metadata", "item_key"),
        *("nested_path_to_load_plans", "target", "storage"),
    ]
    assert "_execute_load_plans" in attributes_used(DefaultResharder.load)
    table = torch.zeros(2, 2)
    tree = {"whole": table, "row": table[0], "n": 1}
    found = _collect_leaf_values("model", tree)
    assert list(found) == [("whole",), ("row",), ("n",)] and found[("row",)] is tree["row"]
    kept, _, dropped = dedupe_aliased_targets(dict(found), {})
    assert list(kept) == [("row",), ("n",)] and dropped == [(("whole",), ("row",))]


@relied_on_by("tc/resharder.py: Resharder._read_source_slices_with_offset_reads")
def test_files_are_read_through_these_two_methods_and_with_these_helpers(tmp_path: Path) -> None:
    offset = DefaultResharder._read_source_slices_with_offset_reads
    full = DefaultResharder._read_source_slices_with_full_file_read
    shared = ["item_key", "rank_plans", "storage"]
    assert parameters_of(offset) == [
        *("file_path", "layout_info", "source_rank", *shared, "safetensors_header"),
    ]
    assert parameters_of(full) == ["file_path", "layout_info", *shared]
    used = inspect.getsource(offset) + inspect.getsource(full)
    for helper in (
        *("_validate_offset_read_archive", "_flatten_state_dict", "_read_source_tensor_slice"),
        *("_slice_source_tensor", "_unwrap_dtensor", "load_torch_serialized_from_storage"),
    ):
        assert f"{helper}(" in used and hasattr(default_resharder, helper)
    # Left to itself it reads pickles that may call anything, in both of them.
    assert "weights_only=False" in used
    assert "_load" in inspect.getsource(default_resharder.load_torch_serialized_from_storage)
    torch.save({"a": {"b": torch.arange(6.0).view(2, 3)}}, tmp_path / "file")
    plan = LoadPlan((0,), (1, 2), 0, "a.b", (1, 1), (1, 2), ())
    with io.FileIO(tmp_path / "file") as stream:
        default_resharder._validate_offset_read_archive(stream)
        tree = torch.load(stream, map_location="meta", weights_only=True)
        source = default_resharder._flatten_state_dict("item", tree)["a.b"]
        found = default_resharder._read_source_tensor_slice(stream, source, plan)
    assert found.tolist() == [[4.0, 5.0]]


@relied_on_by("tc/library.py: WholeReader._load_full_file")
def test_what_is_not_read_in_slices_goes_through_one_method() -> None:
    assert parameters_of(CheckpointReader._load_full_file) == [
        *("file_path", "layout_info", "map_location"),
    ]
    assert "weights_only=False" in inspect.getsource(CheckpointReader._load_full_file)
    assert "_load_full_file" in attributes_used(CheckpointReader._read_without_resharding)
    given = CheckpointReader(RankInfo(0, 1, 0, 1), BUFFERED, storage=BUFFERED.create_storage())
    assert isinstance(given._storage, LocalFileSystemStorage)


@relied_on_by("tc/reading.py", "tc/resharder.py: Resharder.should_reshard")
def test_a_resharder_restores_tensors_and_leaves_everything_else(tmp_path: Path) -> None:
    saved = {"w": torch.tensor([1.0, 2.0]), "name": "saved"}
    torch.save(saved, tmp_path / "model_0.pt")
    resharder = DefaultResharder()
    described = resharder.extract_sharding_metadata("model", saved)
    metadata = DistributedItemMetadata(
        nested_path_to_metadata={
            path: [GlobalObjectMetadata(sharding_metadata=one, ranks=(0,))]
            for path, one in described.items()
        },
        rank_to_layout_info={0: None},
    )
    target = {"w": torch.zeros(2), "name": "target"}
    storage = LocalFileSystemStorage(BUFFERED)
    missing = resharder.load(tmp_path, "model", described, metadata, target, storage)
    assert (target["w"].tolist(), target["name"], missing) == ([1.0, 2.0], "target", [])
    assert described[("w",)].to_dict()["dtype"] == "torch.float32"


@relied_on_by("tc/events.py", "tc/background.py", "tc/writer_main.py")
def test_an_event_carries_its_durations_and_the_step_of_its_context() -> None:
    before = checkpoint_logging_context.export_context()
    checkpoint_logging_context.update(step=7)
    tell = EventLogger()
    extra = tell(EventType.LOG_METRIC, metric_name="a.latency_ms", end_to_end=True)
    assert set(extra) == {
        *("metric_name", "log_type_name", "log_type", "event_name", "step", "end_to_end"),
        *("total_time_ms", "last_interval_ms", "value", "context"),
    }
    assert (extra["step"], extra["event_name"]) == (7, "a.latency_ms")
    assert extra["value"] == extra["total_time_ms"]
    assert extra["context"] == [f"checkpointing_version:{library_version.__version__}"]
    start = tell(EventType.CHECKPOINT_THREAD_START, step=3)
    assert (start["step"], start["log_type_name"]) == (3, "checkpoint_thread_start")
    exported = checkpoint_logging_context.export_context()
    checkpoint_logging_context.import_context({**before, "job": "a"})
    assert exported["step"] == 7 and checkpoint_logging_context.get("job") == "a"
    checkpoint_logging_context.import_context(before)
    for kind in ("STAGING_START", "STAGING_END", "WRITE_START", "WRITE_END", "THREAD_END"):
        assert hasattr(EventType, f"CHECKPOINT_{kind}")
