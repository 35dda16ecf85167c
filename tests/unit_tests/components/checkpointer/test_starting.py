"""A start goes back past what is damaged, and never to anything but an older checkpoint of the run."""

import queue
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed
from torchtitan.components.checkpointer import housekeeping, starting
from torchtitan.components.checkpointer.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointReadError,
)
from torchtitan.components.checkpointer.integrity import manifest
from torchtitan.components.checkpointer.integrity.digests import digest_of
from torchtitan.components.checkpointer.integrity.manifest import (
    head_of,
    Manifest,
    render,
    RunDescription,
)
from torchtitan.components.checkpointer.integrity.verification import Verification

from tests.unit_tests.components.checkpointer.fakes import BareManager, folder_of, MemoryStorage


class Choosing(BareManager):
    """Reads nothing of what it chooses, but knows what is wrong with it."""

    def __init__(self, storage: MemoryStorage, **settings: Any) -> None:
        self.wrong: dict[str, Exception] = {}
        self.tried: list[str] = []
        self.disk, self.states = storage, dict[str, object]()
        defaults = {"load_only": False, "initial_load_path": None, "initial_load_model_only": True}
        others = {"initial_load_in_hf": False, "initial_load_in_hf_quantized": False}
        super().__init__(
            **{
                "_storage": storage,
                "folder": "/run",
                "sd_adapter": None,
                "exclude_from_loading": [],
                "purge_queue": queue.Queue(),
                "purge_thread": None,
                "keep_latest_k": 2,
                **defaults,
                **others,
                **settings,
            }
        )

    def _load(self, step: int) -> bool:
        source = self._choose_start(step).source
        if source is None:
            return False
        self.tried.append(source.path.removeprefix("/run/"))
        self._verification(source)
        if error := self.wrong.get(source.path):
            raise error
        return True


def start(*damaged: int, steps: tuple[int, ...] = (10, 20, 30), **settings: Any) -> Choosing:
    """A start in a folder with checkpoints of ``steps``, of which some are ``damaged``."""
    manager = Choosing(folder_of(*(f"step-{step}" for step in steps)), **settings)
    for step in damaged:
        path = f"/run/step-{step}"
        manager.wrong[path] = CheckpointDamagedError(
            f"{path}/data is damaged:\nexpected a, found b."
        )
    return manager


def warnings_of(manager: Choosing, step: int = -1) -> list[str]:
    with patch.object(starting, "logger") as logger:
        assert manager.load(step)
    return [call.args[0] for call in logger.warning.call_args_list]


def make_ready(manager: Choosing, step: int) -> None:
    with patch.object(torch.distributed, "get_rank", return_value=0):
        manager._make_ready(f"/run/step-{step}", None, with_retention=True)


def moves_of(manager: Choosing, step: int) -> list[str]:
    with patch.object(housekeeping, "logger") as logger:
        make_ready(manager, step)
    return [call.args[0] for call in logger.warning.call_args_list]


def test_the_newest_that_passes_is_loaded_and_each_one_passed_over_is_one_line() -> None:
    manager = start(30, 20)
    said = warnings_of(manager)
    assert manager.tried == ["step-30", "step-20", "step-10"]
    for step, line in zip((30, 20), said, strict=False):
        assert line == (
            f"Passing over /run/step-{step}, which is not deleted: /run/step-{step}/data is damaged: "
            "expected a, found b."
        )
    assert manager._loaded_step == 10 and manager.newest_checkpoint() == "/run/step-10"


def test_what_is_passed_over_stays_until_the_first_save_and_is_then_put_aside_with_its_history() -> (
    None
):
    manager = start(30, steps=(5, 10, 20, 30))
    said = warnings_of(manager)
    assert said[-1] == (
        "This run goes on from step 20: its first save moves step-30 (damaged) of /run into superseded/, "
        "where nothing is loaded or deleted."
    )
    assert manager.disk.calls == []
    make_ready(manager, 25)
    assert sorted(manager.disk.listdir("/run")) == [
        "step-10",
        "step-20",
        "step-5",
        "superseded",
    ]
    assert manager.purge_queue.get_nowait() == "/run/step-5"
    # Its step counts again once this run has saved it.
    manager.disk.add("/run/step-30/done", b"1")
    assert manager.newest_checkpoint() == "/run/step-30"


def test_the_one_that_waits_for_a_save_which_turned_out_damaged_is_taken_before_older_ones() -> (
    None
):
    manager = start(30)
    described(manager.disk, 30, {})
    manager.disk.add("/run/replaced/step-30/done", b"1")
    assert manager.load()
    assert manager.tried == ["step-30", "replaced/step-30"] and manager._loaded_step == 30
    assert manager.newest_checkpoint() == "/run/replaced/step-30"
    make_ready(manager, 35)
    assert sorted(manager.disk.listdir("/run")) == ["step-10", "step-20", "step-30", "superseded"]
    assert manager.disk.listdir("/run/superseded") == ["step-30"]
    assert manager.disk.isfile("/run/superseded/step-30/manifest.json")
    assert manager.purge_queue.get_nowait() == "/run/step-10"


def test_when_both_of_a_step_are_damaged_the_error_tells_what_is_wrong_with_each() -> None:
    manager = start(30, steps=(30,))
    described(manager.disk, 30, {})
    other = "/run/replaced/step-30"
    manager.disk.add(f"{other}/done", b"1")
    manager.wrong[other] = CheckpointDamagedError(f"{other}/data is damaged too.")
    with pytest.raises(
        CheckpointReadError, match=f"step-30: /run/step-30/data .* found b; {other}/data is damaged"
    ):
        manager.load()


def test_a_retention_that_comes_first_neither_counts_nor_deletes_what_was_passed_over() -> None:
    manager = start(20, 30)
    assert manager.load()
    with patch.object(torch.distributed, "get_rank", return_value=0):
        manager._purge_stale_checkpoints(is_save_in_flight=False)
    assert manager.purge_queue.empty()


@pytest.mark.parametrize("also", [(), (0,)])
def test_when_all_are_damaged_the_error_lists_them_and_nothing_else_is_begun(
    also: tuple[int, ...],
) -> None:
    manager = start(10, 20, 30, steps=(10, 20, 30, *also), initial_load_path="/given/step-3")
    manager.disk.add("/given/step-3/done", b"1")
    with pytest.raises(CheckpointReadError) as caught:
        manager.load()
    assert not isinstance(caught.value, CheckpointDamagedError)
    assert manager.tried == ["step-30", "step-20", "step-10"]
    text = str(caught.value)
    assert text.startswith(
        "/run holds no full checkpoint that is not damaged. step-30: /run/step-30/"
    )
    assert all(
        f"/run/step-{step}/data is damaged: expected a, found b" in text for step in (10, 20)
    )


def test_a_damaged_seed_is_no_reason_to_begin_from_something_else() -> None:
    manager = start(0, steps=(0,), initial_load_path="/given/step-3")
    with pytest.raises(CheckpointReadError, match="step-0: /run/step-0/data is damaged"):
        manager.load()
    assert manager.tried == ["step-0"]


def test_a_step_that_was_asked_for_is_that_one_or_an_error_with_the_newest_other_one() -> None:
    manager = start(20)
    with pytest.raises(CheckpointDamagedError) as caught:
        manager.load(20)
    assert manager.tried == ["step-20"]
    assert str(caught.value).endswith(
        "expected a, found b. The newest other full one is step-30: --checkpoint.load_step 30"
    )


def test_without_fallback_a_damaged_one_stops_the_run() -> None:
    manager = start(30, on_damaged="fail")
    with pytest.raises(CheckpointDamagedError, match="is step-20: --checkpoint.load_step 20"):
        manager.load()
    assert manager.tried == ["step-30"]


def test_only_what_is_loaded_is_said_to_be_loaded_unverified(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = start(30, on_damaged="fail")
    described(manager.disk, 30, {})
    with pytest.raises(CheckpointDamagedError, match="is step-20: --checkpoint.load_step 20"):
        manager.load()
    assert "unverified" not in caplog.text
    assert manager.load(20)
    assert "/run/step-20 has no manifest.json" in caplog.text and "unverified" in caplog.text


def test_the_digests_of_all_files_travel_beside_training_and_are_kept_no_longer_than_the_load() -> (
    None
):
    manager = start()
    described(manager.disk, 30, {})
    manager.pg, used = object(), list[Any]()  # pyrefly: ignore[bad-assignment]  (only passed on)

    def decides(decide: Any, group: Any = None) -> Any:
        found = decide()
        if isinstance(found, Verification):
            used.append((found.path, group))
        return found

    with patch.object(starting, "rank_zero_decides", decides):
        assert manager.load()
    assert used == [("/run/step-30", manager.pg)]
    assert manager._verifying is None and manager._source is None


def test_the_advice_names_no_checkpoint_of_which_a_listing_shows_that_it_is_damaged() -> None:
    manager = start(30, on_damaged="fail")
    storage = manager.disk
    head = head_of(20, "full", "dcp", 1, None)
    record = Manifest(head, {"data": digest_of(b"1234")})
    storage.add("/run/step-20/manifest.json", render(record))
    storage.add("/run/step-20/data", b"12")
    with pytest.raises(CheckpointDamagedError, match="is step-10: --checkpoint.load_step 10"):
        manager.load()
    only = start(30, steps=(30,), on_damaged="fail")
    with pytest.raises(CheckpointDamagedError, match="no other full checkpoint in /run"):
        only.load()


def test_a_damaged_initial_checkpoint_is_an_error_that_names_its_neighbour() -> None:
    storage = folder_of()
    for step in (3, 4, 5):
        storage.add(f"/given/step-{step}/done", b"1")
    manager = Choosing(storage, initial_load_path="/given/step-5")
    manager.wrong["/given/step-5"] = CheckpointDamagedError("/given/step-5 is damaged.")
    with pytest.raises(CheckpointDamagedError, match="initial_load_path /given/step-4$"):
        manager.load()


@pytest.mark.parametrize(
    "error",
    [
        CheckpointReadError("the disk does not answer"),
        CheckpointMismatchError("another model"),
        OSError(5, "Input/output error"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_damage_is_passed_over_by_nobody(error: Exception) -> None:
    manager = start()
    manager.wrong["/run/step-30"] = error
    with pytest.raises(type(error)) as caught:
        manager.load()
    assert caught.value is error and manager.tried == ["step-30"]


def test_another_load_looks_at_everything_anew() -> None:
    manager = start(30)
    assert manager.load() and manager._loaded_step == 20
    manager.wrong.clear()
    assert manager.load() and manager._loaded_step == 30


def test_a_checkpoint_of_another_back_end_is_no_older_one_to_go_back_to() -> None:
    manager = start(30, steps=(10, 30))
    storage = manager.disk
    for name in ("metadata.pkl", "model_0.pt", "optimizer_0.pt"):
        storage.add(f"/run/step-20/{name}", b"1")
    manager.states = {"model": object(), "optimizer": object()}
    with pytest.raises(
        CheckpointMismatchError, match="/run/step-20 is a full .* --checkpoint.load_step 10 to"
    ):
        manager.load()


def test_what_was_moved_is_offered_for_use_again_unless_it_is_damaged() -> None:
    manager = start(30)
    warnings_of(manager)
    assert moves_of(manager, 25) == [
        "Moved the damaged checkpoint step-30 to /run/superseded/step-30. Nothing loads or deletes it there."
    ]
    back = start()
    warnings_of(back, 20)
    (said,) = moves_of(back, 25)
    assert said.endswith(
        "/run/superseded/step-30. Nothing deletes it there; move it back to use it again."
    )
    # Its name is free for what was saved before it.
    replacing = start(30)
    described(replacing.disk, 30, {})
    replacing.disk.add("/run/replaced/step-30/done", b"1")
    assert replacing.load()
    (said,) = moves_of(replacing, 35)
    assert said.startswith("Moved the damaged checkpoint step-30 to /run/superseded/step-30.")


def test_what_is_left_behind_is_said_before_it_is_moved_unless_nothing_is_saved() -> None:
    manager = start()
    (said,) = warnings_of(manager, 10)
    assert said == (
        "This run goes on from step 10 and leaves a history behind: its first save moves step-20, "
        "step-30 of /run into superseded/, where nothing is loaded or deleted."
    )
    copying = start()
    copying.disk.renames = False  # pyrefly: ignore[missing-attribute]  (as a storage may have it)
    (said,) = warnings_of(copying, 10)
    assert said == (
        "This run goes on from step 10 and leaves a history behind: its first save writes "
        "superseded.json, which lists step-20, step-30 of /run: what it lists stays in place, is "
        "passed over from then on, and is not deleted."
    )
    assert warnings_of(start(load_only=True), 10) == []
    assert warnings_of(start(), 30) == warnings_of(start()) == []


def described(storage: MemoryStorage, step: int, config: dict[str, Any]) -> None:
    head = head_of(step, "full", "dcp", 1, RunDescription(config, {}))
    storage.add(f"/run/step-{step}/manifest.json", render(Manifest(head, {})))


@pytest.mark.parametrize("verify", ["full", "size", "off"])
def test_settings_that_differ_from_the_saved_ones_are_one_block_in_the_log(verify: str) -> None:
    manager = start(verify=verify)
    storage = manager.disk
    described(storage, 30, {"training": {"steps": 40}, "debug": {"seed": 1}})
    manager.describe_run(RunDescription({"training": {"steps": 50}, "debug": {"seed": 1}}, {}))
    with patch.object(starting, "logger") as logger:
        assert manager.load()
    assert [call.args[0] for call in logger.info.call_args_list] == [
        "Settings that differ from those of /run/step-30 (then -> now):\n"
        "    training.steps: 40 -> 50"
    ]
    manager.describe_run(RunDescription({"training": {"steps": 40}, "debug": {"seed": 2}}, {}))
    (said,) = warnings_of(manager)
    assert "debug.seed: 1 -> 2  (the random number generators in the checkpoint go on)" in said


def test_weights_alone_are_no_run_to_compare_settings_with() -> None:
    manager = start(steps=(0,))
    described(manager.disk, 0, {"training": {"steps": 40}})
    manager.describe_run(RunDescription({"training": {"steps": 50}}, {}))
    with patch.object(starting, "logger") as logger:
        assert manager.load()
    assert logger.mock_calls == []


def test_a_manifest_of_another_step_is_damage_and_one_of_a_newer_version_is_not() -> None:
    manager = start()
    storage = manager.disk
    described(storage, 30, {})
    storage.move("/run/step-30", "/run/step-40")
    assert manager.load() and manager.tried == ["step-40", "step-20"]
    newer = manifest.SCHEMA + 1
    with patch.object(manifest, "SCHEMA", newer):
        described(storage, 20, {})
    with pytest.raises(CheckpointMismatchError, match=f"step-20/manifest.json has schema {newer}"):
        manager.load()


def test_nothing_to_load_stays_nothing() -> None:
    assert start(steps=()).load() is False
    with pytest.raises(CheckpointNotFoundError):
        start(steps=()).load(7)
