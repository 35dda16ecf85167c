import threading
from unittest.mock import MagicMock, patch

import pytest
from torchtitan.components.checkpointer import base, BaseCheckpointManager, CheckpointManager
from torchtitan.components.checkpointer.errors import CheckpointSaveError

from tests.unit_tests.components.checkpointer.fakes import (
    BareManager,
    folder_of,
    MemoryStorage,
    without_parts,
)


class Built(BareManager):
    """Goes through the real constructor."""

    def __init__(self, storage: MemoryStorage, **settings: int) -> None:
        self.hook_calls = []
        config = BaseCheckpointManager.Config(
            enable=True, **settings  # pyrefly: ignore[bad-argument-type]  (ints only)
        )
        BaseCheckpointManager.__init__(
            self, config, storage=storage, base_folder="/", sd_adapter=None
        )

    def _close(self) -> None:
        self._stop_purging()


def test_a_disabled_manager_is_nothing_but_its_switch_and_still_answers() -> None:
    manager = without_parts(CheckpointManager.Config())
    assert vars(manager) == {"enable": False}
    assert manager.load() is False and manager.save(5, last_step=True) is False
    assert manager.maybe_wait_for_staging() is None and manager.maybe_wait_for_saving() is None
    assert manager.newest_checkpoint() is None and not manager.has_saved("/run/step-5")
    manager.close()


def test_spans_are_opened_around_the_hooks_and_only_when_enabled() -> None:
    manager = BareManager()
    with patch.object(base.sl, "log_trace_span") as span:
        manager.save(3)
        manager.load(7)
        assert [call.args for call in span.call_args_list] == [
            ("checkpoint_save",),
            ("checkpoint_load",),
        ]
        manager.enable = False
        manager.save(4)
        manager.load()
        assert span.call_count == 2


def test_hooks_get_their_arguments_by_position() -> None:
    manager = BareManager()
    assert manager.save(3, last_step=True) and manager.load(7)
    assert manager.hook_calls == [("save", (3, True), {}), ("load", (7,), {})]


def test_waiting_for_a_save_asks_the_hook_only_when_one_is_in_flight() -> None:
    manager = BareManager()
    manager.maybe_wait_for_saving()
    assert manager.hook_calls == []
    manager.save_future = MagicMock()
    manager.maybe_wait_for_saving()
    manager.maybe_wait_for_staging()
    assert manager.hook_calls == [("saving",), ("staging",)]


class Slow(BareManager):
    """Each hook takes its own time; a save waits for the one before it."""

    def __init__(self, clock: MagicMock) -> None:
        super().__init__(save_future=MagicMock())
        self.clock = clock

    def _maybe_wait_for_staging(self) -> None:
        self.clock.monotonic.return_value += 2.0

    def _wait_for_saving(self) -> None:
        self.clock.monotonic.return_value += 10.0

    def _save(self, curr_step: int, last_step: bool) -> bool:
        self.maybe_wait_for_saving()
        self.clock.monotonic.return_value += 100.0
        if last_step:
            raise CheckpointSaveError("disk full")
        return True


def test_whatever_keeps_the_training_thread_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = MagicMock()
    clock.monotonic.return_value = 1000.0
    monkeypatch.setattr(base, "time", clock)
    manager = Slow(clock)
    assert manager.blocked_seconds == 0.0
    manager.maybe_wait_for_staging()
    assert manager.blocked_seconds == 2.0
    manager.save(1)
    assert manager.blocked_seconds == 112.0
    with pytest.raises(CheckpointSaveError):
        manager.save(2, last_step=True)
    clock.monotonic.return_value += 5000.0  # training
    manager.maybe_wait_for_saving()
    assert manager.blocked_seconds == 232.0


def test_the_hooks_must_be_supplied() -> None:
    hooks = {"_load", "_save", "_maybe_wait_for_staging", "_wait_for_saving", "_close"}
    assert hooks <= BaseCheckpointManager.__abstractmethods__
    assert not {"load", "save", "close", "_should_purge"} & set(vars(CheckpointManager))


@pytest.mark.parametrize("cls", [CheckpointManager, BareManager])
def test_an_object_that_was_never_built_closes_and_dies_in_silence(
    cls: type[BaseCheckpointManager],
) -> None:
    with patch.object(base, "logger") as logger:
        cls.__new__(cls).close()
        cls.__new__(cls).__del__()
    logger.warning.assert_not_called()


def test_a_manager_that_was_refused_half_way_dies_in_silence() -> None:
    config = CheckpointManager.Config(enable=True, last_save_in_hf=True)
    with patch.object(base, "logger") as logger:
        with pytest.raises(ValueError, match="last_save_in_hf"):
            without_parts(config)
    assert [c.args for c in logger.warning.call_args_list if "abandoned" in c.args[0]] == []


def test_an_error_while_an_object_dies_is_a_warning() -> None:
    manager = BareManager()
    manager.close = MagicMock(side_effect=CheckpointSaveError("step 3 is lost"))
    with patch.object(base, "logger") as logger:
        manager.__del__()
    manager.close = MagicMock()  # it dies once more when this test is over
    assert "step 3 is lost" in logger.warning.call_args.args[0]


def test_closing_deletes_what_is_queued_ends_the_thread_and_can_be_repeated() -> None:
    storage = folder_of(*(f"step-{n}" for n in range(20)))
    manager = Built(storage, keep_latest_k=2)
    thread = manager.purge_thread
    assert thread is not None and thread.daemon and thread.is_alive()
    for step in range(20):
        manager.purge_queue.put(f"/run/step-{step}")
    manager.close()
    assert not thread.is_alive() and storage.listdir("/run") == []
    manager.close()


@pytest.mark.parametrize("settings", [{"keep_latest_k": 0}, {"load_only": True}])
def test_without_deletions_there_is_no_thread(settings: dict[str, int]) -> None:
    before = threading.active_count()
    manager = Built(MemoryStorage(), **settings)
    assert manager.purge_thread is None and threading.active_count() == before
    manager.close()


def test_an_absolute_folder_wins_over_the_base_folder() -> None:
    storage = MemoryStorage()
    config = BaseCheckpointManager.Config(enable=True, folder="/data/run", keep_latest_k=0)
    manager = BareManager.__new__(BareManager)
    BaseCheckpointManager.__init__(
        manager, config, storage=storage, base_folder="/dump", sd_adapter=None
    )
    assert manager.folder == "/data/run"
    assert manager._create_checkpoint_id(3) == "/data/run/step-3"
    assert manager._create_checkpoint_id(3, "s3://b/x/") == "s3://b/x/step-3"
    manager.enable = False


def test_attributes_are_read_when_they_are_used() -> None:
    manager = Built(MemoryStorage(), interval=10, keep_latest_k=0)
    assert not manager._should_save(5)
    manager.interval = 5
    assert manager._should_save(5)
    manager.load_only = True
    assert not manager._should_save(5) and not manager._should_save(5, last_step=True)


def test_what_a_restart_goes_on_from_is_of_this_back_end_and_weights_may_be_of_any() -> None:
    storage = folder_of("step-10")
    states = {"model": object(), "optimizer": object()}
    manager = BareManager(_storage=storage, folder="/run", states=states, timeout_seconds=1)
    for name in ("metadata.pkl", "model_0.pt"):
        storage.add(f"/run/step-20/{name}", b"1")
    assert manager.newest_checkpoint() == "/run/step-10"
    assert manager.exported_checkpoint() == "/run/step-20"
    assert manager.is_finished(20) and not manager.is_finished(21)
    storage.add("/run/step-20/optimizer_0.pt", b"1")
    assert manager.newest_checkpoint() is None and manager.exported_checkpoint() is None
    assert not manager.is_finished(20)
