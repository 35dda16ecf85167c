"""The manager on torch_checkpointing before it saves: its config, its names, what it refuses, what it builds."""

import gc
import inspect
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import nn
from torch_checkpointing.barriers import TCPStoreBarrierConfig
from torch_checkpointing.checkpoint_manager import CheckpointManager as LibraryManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
from torchtitan.components.checkpointer import (
    BaseCheckpointManager,
    CheckpointManager,
    ModelWrapper,
    torch_checkpointing,
)
from torchtitan.components.checkpointer.pinned import means
from torchtitan.components.checkpointer.storage import CheckpointStorage
from torchtitan.components.checkpointer.tc import index
from torchtitan.components.checkpointer.tc.commit import CommitBarrierConfig
from torchtitan.components.checkpointer.tc.library import Backend, BackendConfig
from torchtitan.components.checkpointer.tc.storage import DurableStorageConfig
from torchtitan.components.checkpointer.torch_checkpointing import TorchCheckpointingManager

from tests.unit_tests.components.checkpointer.runs import build_run
from tests.unit_tests.components.checkpointer.tc.stand_ins import KeptHere, Watched

NAMES = {
    "DEFAULT_TORCH_CHECKPOINTING_BARRIER_TCPSTORE_PORT",
    "TorchCheckpointingManager",
    "_BACKEND_LOGGER_NAME",
    "_BackendCheckpointStorage",
    "_default_backend_config",
    "_init_subprocess_logging",
    "_item_specs",
    "_restore_state_dict",
    "_step_dir_pattern",
    "_with_sync_save",
}


def build(base_folder: Path | str, **settings: Any) -> TorchCheckpointingManager:
    """A manager of a model alone, without a process group."""
    parts = {"sd_adapter", "states", "storage_config"} & settings.keys()
    keywords = {name: settings.pop(name) for name in parts}
    settings = {"enable": True, "interval": 1, **settings}
    config = TorchCheckpointingManager.Config(**settings)
    return config.build(
        **{
            "dataloader": None,
            "model_parts": [nn.Linear(2, 2)],
            "optimizers": object(),
            "lr_schedulers": object(),
            "states": {},
            "sd_adapter": None,
            "base_folder": str(base_folder),
            **keywords,
        }
    )


def test_its_config_is_that_of_every_manager() -> None:
    config = TorchCheckpointingManager.Config()
    assert [each.name for each in fields(config)] == [
        each.name for each in fields(BaseCheckpointManager.Config)
    ]
    as_dict = config.to_dict()
    assert "checkpoint_manager" not in as_dict and json.loads(json.dumps(as_dict)) == as_dict
    assert not issubclass(TorchCheckpointingManager, CheckpointManager)
    assert not issubclass(TorchCheckpointingManager.Config, CheckpointManager.Config)


def test_the_module_has_the_names_that_others_use() -> None:
    assert NAMES <= set(torch_checkpointing.__all__)
    assert all(hasattr(torch_checkpointing, name) for name in NAMES)
    assert torch_checkpointing.DEFAULT_TORCH_CHECKPOINTING_BARRIER_TCPSTORE_PORT == 43001
    assert torch_checkpointing._BACKEND_LOGGER_NAME == "torch_checkpointing"
    match = torch_checkpointing._step_dir_pattern("tmp_").fullmatch("tmp_step-7")
    assert match is not None and match.groupdict() == {"tmp": "tmp_", "step": "7"}


def test_it_takes_the_keywords_of_the_other_manager_and_a_storage() -> None:
    ours = inspect.signature(TorchCheckpointingManager).parameters
    theirs = inspect.signature(CheckpointManager).parameters
    assert list(ours) == [*theirs, "storage_config"]
    assert ours["storage_config"].default is None
    assert {name: each.kind for name, each in theirs.items()} == {
        name: ours[name].kind for name in theirs
    }


def test_a_manager_has_its_parts_under_their_names(tmp_path: Path) -> None:
    states: dict[str, Any] = {"train_state": object()}
    manager = build(tmp_path, states=states, keep_latest_k=2)
    assert manager.states is states
    assert set(states) == {"train_state", "model", "optimizer", "dataloader", "lr_scheduler"}
    assert isinstance(states["model"], ModelWrapper)
    assert isinstance(manager._manager, Backend) and isinstance(manager._manager, LibraryManager)
    assert isinstance(manager._manager_config, BackendConfig)
    assert isinstance(manager._manager_config, LibraryManager.Config)
    assert isinstance(manager._storage, CheckpointStorage)
    assert manager._step_dir_pattern.fullmatch("tmp_step-3")
    assert manager._prewarmed is False and manager.save_future is None
    assert manager.purge_thread is not None and manager.purge_thread.is_alive()
    assert manager.purge_queue.empty()
    manager.close()
    assert not manager.purge_thread.is_alive()


def test_the_store_of_the_default_config_is_replaced_by_one_of_the_run(tmp_path: Path) -> None:
    manager = build(tmp_path, timeout_seconds=7)
    config = manager._manager_config
    assert isinstance(config.save, AsyncCheckpointSaverConfig)
    writer = config.save.writer_config
    assert isinstance(writer.barrier_config, CommitBarrierConfig)
    assert (writer.temp_dir_prefix, writer.write_to_temp_dir) == (index.TEMP_DIR_PREFIX, True)
    assert (config.save.wait_timeout_secs, writer.checkpoint_write_barrier_timeout_sec) == (7, 7)
    assert config.default is not None
    assert config.default.resharder is config.items["model"].resharder
    assert isinstance(config.storage_config, DurableStorageConfig)
    manager.close()


@pytest.mark.parametrize("path", ["s3://bucket/run", "memory://run"])
def test_remote_paths_are_refused_by_the_name_of_the_setting(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match="checkpoint.folder.*not yet supported"):
        build(tmp_path, folder=path)
    with pytest.raises(ValueError, match="checkpoint.initial_load_path.*not yet supported"):
        build(tmp_path, initial_load_path=path)
    build(tmp_path, folder=path, enable=False).close()


def test_an_export_to_hugging_face_needs_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="last_save_in_hf"):
        build(tmp_path, last_save_in_hf=True)
    build(tmp_path, last_save_in_hf=True, sd_adapter=object()).close()


def test_a_state_whose_key_makes_no_file_name_is_refused_and_nothing_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match=r"named '\.\./x', 'a\.b', .*Rename them"):
        build(tmp_path, states={"a.b": 1, "../x": 2, "fine": 3}, keep_latest_k=2)
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before
    assert "abandoned" not in caplog.text


def test_a_disabled_manager_builds_nothing_and_does_nothing() -> None:
    with patch.object(BackendConfig, "build", side_effect=AssertionError("built")):
        manager = build("/nowhere/at/all", enable=False)
        assert manager.load() is False and manager.save(1, last_step=True) is False
        manager.maybe_wait_for_staging()
        manager.maybe_wait_for_saving()
        manager.close()
    assert not hasattr(manager, "_manager")


def test_a_run_that_only_loads_never_makes_a_barrier_nor_a_stager(tmp_path: Path) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a barrier was made")

    with (
        patch.object(CommitBarrierConfig, "create_barrier", refuse),
        patch.object(TCPStoreBarrierConfig, "create_barrier", refuse),
    ):
        manager = build(tmp_path, load_only=True)
        config = manager._manager_config
        assert isinstance(config.save, SyncCheckpointSaverConfig)
        assert config.save.writer_config.barrier_config is None
        assert manager._stager is None
        assert manager.save(1, last_step=True) is False and not manager._prewarmed
        manager.close()


def test_storage_that_is_given_is_used_for_questions_saves_and_loads(
    tmp_path: Path, one_rank: None
) -> None:
    watched = Watched()
    with patch.object(means, "no_shared_memory", return_value="the test says so"):
        run = build_run(
            tmp_path, manager=TorchCheckpointingManager, keywords={"storage_config": watched}
        )
    assert run.manager._manager_config.storage_config is watched
    run.train(1)
    run.manager.close()
    asked = {name for name, _ in watched.calls}
    # Discovery and retention ask, the save writes; the size is for the line about it.
    assert {"isdir", "mkdir", "stream_write", "write", "rename", "getsize"} <= asked
    watched.calls.clear()
    loading = build_run(
        tmp_path,
        manager=TorchCheckpointingManager,
        load_only=True,
        seed=3,
        keywords={"storage_config": watched},
    )
    assert loading.manager.load()
    read = {path.name for name, path in watched.calls if name.startswith(("stream_read", "read"))}
    assert read >= {"metadata.pkl", "model_0.pt", "optimizer_0.pt", "train_state_0.pt"}
    assert loading.snapshot() == run.snapshot()
    loading.manager.close()


def test_how_saves_are_made_is_said_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def said(**settings: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            build(tmp_path, **settings).close()
        return [each.getMessage() for each in caplog.records if "Saves" in each.getMessage()]

    (line,) = said()
    assert line.endswith("a process writes them, without direct I/O, through torch_checkpointing.")
    assert "shared memory" in line
    with patch.object(means, "no_shared_memory", return_value="there is none"):
        (line,) = said()
    assert line.startswith("Saves make training wait, because there is none, ")
    (line,) = said(storage_config=LocalFileSystemStorageConfig(use_direct_io=True))
    assert line.endswith("a process writes them, with direct I/O, through torch_checkpointing.")
    assert said(load_only=True) == []


def test_a_storage_that_no_other_process_can_have_makes_training_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        build(tmp_path, storage_config=KeptHere()).close()
    (line,) = [one.getMessage() for one in caplog.records if "Saves" in one.getMessage()]
    assert "make training wait, because the storage KeptHere cannot be handed to a process" in line


@pytest.fixture
def library_storage(tmp_path: Path) -> Iterator[LocalFileSystemStorageConfig]:
    yield LocalFileSystemStorageConfig(use_direct_io=False)


def test_a_storage_of_the_library_itself_will_do(
    tmp_path: Path, library_storage: LocalFileSystemStorageConfig
) -> None:
    manager = build(tmp_path, storage_config=library_storage)
    assert manager._manager_config.storage_config is library_storage
    manager.close()


def test_several_ranks_without_a_barrier_are_refused(tmp_path: Path) -> None:
    config = torch_checkpointing._with_sync_save(
        torch_checkpointing._default_backend_config(), use_barrier=False
    )
    with (
        patch.object(torch_checkpointing, "_default_backend_config", lambda: config),
        patch.object(torch_checkpointing, "own_group", lambda seconds: None),
        patch.object(dist, "is_initialized", lambda: True),
        patch.object(dist, "get_world_size", lambda group=None: 2),
        patch.object(dist, "get_rank", lambda group=None: 0),
    ):
        with pytest.raises(ValueError, match="without a barrier for 2 ranks"):
            build(tmp_path)
        build(tmp_path, load_only=True).close()
    with patch.object(torch_checkpointing, "_default_backend_config", lambda: config):
        build(tmp_path).close()
