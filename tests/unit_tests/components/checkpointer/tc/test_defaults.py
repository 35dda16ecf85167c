"""What torch_checkpointing is asked for: by default, by a run, and by a run that only waits or only loads."""

import warnings
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch_checkpointing.barriers import TCPStoreBarrierConfig
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec
from torchtitan.components.checkpointer.tc import defaults
from torchtitan.components.checkpointer.tc.commit import CommitBarrierConfig
from torchtitan.components.checkpointer.tc.events import init_subprocess_logging
from torchtitan.components.checkpointer.tc.library import BackendConfig, on_this_rank
from torchtitan.components.checkpointer.tc.storage import DurableStorageConfig


def for_a_run(config: CheckpointManager.Config | None = None, **choices: Any) -> Any:
    choices = {
        "states": {},
        "storage_config": DurableStorageConfig(),
        "limit_seconds": 600,
        "load_only": False,
        **choices,
    }
    return defaults.for_this_run(config or defaults.default_backend_config(), **choices)


def barrier_of(config: Any) -> TCPStoreBarrierConfig:
    barrier = config.save.writer_config.barrier_config
    assert isinstance(barrier, TCPStoreBarrierConfig)
    return barrier


def test_by_default_a_save_is_asynchronous_and_waits_at_a_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "first.example")
    config = defaults.default_backend_config()
    assert type(config) is CheckpointManager.Config
    save = config.save
    assert isinstance(save, AsyncCheckpointSaverConfig)
    assert save.wait_timeout_secs == 600
    assert save.writer_config.checkpoint_write_barrier_timeout_sec == 600
    assert save.staging_config.use_pinned_memory is True
    assert barrier_of(config) == TCPStoreBarrierConfig(
        master_address="first.example",
        tcpstore_port=43001,
        timeout_barrier_init_sec=60,
        use_checkpoint_barrier_tcpstore_libuv=True,
    )
    assert config.default == ItemSpec(requires_copy=False)


def test_the_address_is_that_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = []
    for value in ("a", "b", "", None):
        if value is None:
            monkeypatch.delenv("MASTER_ADDR")
        else:
            monkeypatch.setenv("MASTER_ADDR", value)
        addresses.append(barrier_of(defaults.default_backend_config()).master_address)
    assert addresses == ["a", "b", "localhost", "localhost"]


def test_model_and_optimizer_share_a_resharder_and_may_be_missing() -> None:
    for items in (defaults.item_specs(), defaults.default_backend_config().items):
        assert set(items) == {"model", "optimizer"}
        assert items["model"] == items["optimizer"]
        spec = items["model"]
        assert (spec.requires_copy, spec.required, spec.layout) == (True, False, None)
        assert isinstance(spec.resharder, DefaultResharder)
        assert items["optimizer"].resharder is spec.resharder
    assert defaults.item_specs()["model"].resharder is not defaults.item_specs()["model"].resharder


@dataclass(kw_only=True, slots=True)
class OwnConfig(CheckpointManager.Config):
    extra: int = 3


def own_config() -> OwnConfig:
    barrier = CommitBarrierConfig()
    given = defaults.default_backend_config()
    writer = replace(given.save.writer_config, barrier_config=barrier, temp_dir_prefix="part_")
    return OwnConfig(
        items=given.items,
        default=given.default,
        save=replace(given.save, writer_config=writer, wait_timeout_secs=5),
        pre_finalize_callback=print,
        finalize_callback=print,
    )


@pytest.mark.parametrize("use_barrier", [True, False])
def test_a_synchronous_config_is_the_same_but_for_the_way_to_save(use_barrier: bool) -> None:
    given = own_config()
    with (
        patch.object(CommitBarrierConfig, "create_barrier", side_effect=AssertionError),
        patch.object(OwnConfig, "build", side_effect=AssertionError),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        found = defaults.with_sync_save(given, use_barrier=use_barrier)
    assert type(found) is OwnConfig and found.extra == 3
    assert isinstance(found.save, SyncCheckpointSaverConfig)
    assert found.save.wait_timeout_secs == 5
    writer, before = found.save.writer_config, given.save.writer_config
    assert writer.temp_dir_prefix == "part_"
    assert writer.barrier_config is (before.barrier_config if use_barrier else None)
    assert writer.write_to_temp_dir is use_barrier
    assert found.pre_finalize_callback is None and found.finalize_callback is print
    assert found.items is given.items and found.default is given.default
    # What was given is as it was.
    assert isinstance(given.save, AsyncCheckpointSaverConfig)
    assert before.barrier_config is not None and given.pre_finalize_callback is print


def test_a_synchronous_config_keeps_its_barrier_unless_it_is_told() -> None:
    found = defaults.with_sync_save(defaults.default_backend_config())
    assert barrier_of(found).tcpstore_port == 43001
    again = defaults.with_sync_save(found)
    assert again.save == found.save


def test_the_config_of_a_rank_is_what_was_asked_for_and_its_parts() -> None:
    given = defaults.default_backend_config()
    found = on_this_rank(given, group=None, stager=None)
    assert isinstance(found, BackendConfig) and found.save is given.save
    group: Any = "a group"
    assert defaults.with_sync_save(replace(found, group=group)).group is group


def test_a_run_has_its_own_commit_limit_and_storage() -> None:
    storage = DurableStorageConfig()
    found = for_a_run(limit_seconds=2.5, storage_config=storage)
    assert isinstance(found.save.writer_config.barrier_config, CommitBarrierConfig)
    assert found.save.writer_config.checkpoint_write_barrier_timeout_sec == 3
    assert found.save.wait_timeout_secs == 3
    assert found.storage_config is storage
    # Any state may hold tensors that are sharded.
    assert found.default.resharder is found.items["model"].resharder
    assert found.default.requires_copy is False


def test_a_schema_that_is_strict_or_has_its_own_resharder_stays_so() -> None:
    given = defaults.default_backend_config()
    assert for_a_run(replace(given, default=None)).default is None
    own = ItemSpec(resharder=DefaultResharder())
    assert for_a_run(replace(given, default=own)).default is own


def test_the_writer_process_prepares_itself_and_then_as_it_was_told() -> None:
    given = replace(
        defaults.default_backend_config(), subprocess_init_fn=print, subprocess_init_args=(1, 2)
    )
    found = for_a_run(given)
    assert found.subprocess_init_fn is init_subprocess_logging
    assert found.subprocess_init_args == (None, print, (1, 2))


def test_a_run_that_only_loads_waits_for_nobody() -> None:
    found = for_a_run(load_only=True)
    assert isinstance(found.save, SyncCheckpointSaverConfig)
    assert found.save.writer_config.barrier_config is None


def test_several_ranks_without_a_barrier_are_refused_unless_they_only_load() -> None:
    given = defaults.with_sync_save(defaults.default_backend_config(), use_barrier=False)
    assert for_a_run(given).save.writer_config.barrier_config is None
    with (
        patch.object(dist, "is_initialized", lambda: True),
        patch.object(dist, "get_world_size", lambda: 4),
    ):
        for_a_run(given, load_only=True)
        with pytest.raises(ValueError, match="without a barrier for 4 ranks.*barrier_config"):
            for_a_run(given)
        for_a_run()


def test_keys_that_would_leave_the_directory_are_refused_all_at_once() -> None:
    states = dict.fromkeys(["train_state", "rank-state_2", "a/b", "..", "", "x.y", "\u00e4"])
    with pytest.raises(ValueError) as caught:
        for_a_run(states=states)
    assert str(caught.value).startswith(
        "states to save are named '', '..', 'a/b', 'x.y', '\u00e4', and torch_checkpointing "
    )


@pytest.mark.parametrize("initial", [None, "", "/local/step-1"])
def test_local_paths_are_taken(initial: str | None) -> None:
    defaults.require_local("checkpoint", initial)
