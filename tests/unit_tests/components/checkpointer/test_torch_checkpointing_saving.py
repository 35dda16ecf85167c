"""A save through torch_checkpointing: what is handed over, when, and what is in the files then."""

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.logging_utils import checkpoint_logging_context
from torchtitan.components.checkpointer.pinned import means
from torchtitan.components.checkpointer.rank_state import RankState
from torchtitan.components.checkpointer.tc.library import Backend
from torchtitan.components.checkpointer.torch_checkpointing import TorchCheckpointingManager

from tests.unit_tests.components.checkpointer.runs import build_run, names, Run
from tests.unit_tests.components.checkpointer.tc.stand_ins import Writers

pytestmark = pytest.mark.usefixtures("one_rank")
KEYS = {"model", "optimizer", "lr_scheduler", "dataloader", "train_state"}


def run_in(folder: Path, **settings: Any) -> Run:
    return build_run(folder, manager=TorchCheckpointingManager, **settings)


def waiting_run(folder: Path, **settings: Any) -> Run:
    """One whose training waits for each save."""
    with patch.object(means, "no_shared_memory", return_value="the test says so"):
        return run_in(folder, **settings)


class Handed:
    """What the back ends of a manager are handed, in order, by method."""

    def __init__(self) -> None:
        self.saved: list[tuple[Backend, str, dict[str, Any]]] = []
        self.steps: list[Any] = []
        """Those that the library's events bear, by save."""
        self.prewarmed: list[dict[str, Any]] = []

    def save(self, backend: Backend, checkpoint_id: str, payload: dict[str, Any]) -> Any:
        self.saved.append((backend, checkpoint_id, payload))
        self.steps.append(checkpoint_logging_context.get("step"))
        return _save(backend, checkpoint_id, payload)

    def prewarm(self, backend: Backend, payload: dict[str, Any]) -> None:
        self.prewarmed.append(payload)
        _prewarm(backend, payload)


_save, _prewarm = Backend.save, Backend.prewarm_staging


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Handed:
    seen = Handed()
    monkeypatch.setattr(Backend, "save", lambda *given: seen.save(*given))
    monkeypatch.setattr(Backend, "prewarm_staging", lambda *given: seen.prewarm(*given))
    return seen


def files(folder: Path, step: int) -> list[str]:
    return sorted(os.listdir(folder / f"checkpoint/step-{step}"))


def saved(folder: Path, step: int, item: str) -> Any:
    path = folder / f"checkpoint/step-{step}/{item}_0.pt"
    return torch.load(path, weights_only=False)


def test_one_payload_of_all_states_goes_to_the_backend_and_a_future_comes_back(
    tmp_path: Path, writers: Writers, handed: Handed
) -> None:
    run = run_in(tmp_path)
    run.train(2)
    run.manager.maybe_wait_for_staging()
    first, second = handed.saved
    assert second[1] == f"{tmp_path}/checkpoint/step-2"
    payload = second[2]
    assert set(payload) == KEYS and handed.steps == [1, 2]
    live = run.manager.states["model"].state_dict()
    assert payload["model"].keys() == live.keys()
    # But the buffer, which the next forward pass changes.
    assert {name for name in live if payload["model"][name] is not live[name]} == {"seen"}
    assert payload["train_state"] == {"inner": {"step": 2}}
    assert run.manager.save_future is second[0]._write_future
    run.manager.maybe_wait_for_saving()
    assert run.manager.save_future is None
    assert names(tmp_path) == ["step-1", "step-2"]
    assert files(tmp_path, 2) == sorted(
        ["manifest.json", "metadata.pkl", *(f"{key}_0.pt" for key in KEYS)]
    )
    run.manager.close()


def test_a_step_without_a_save_prepares_for_saves_exactly_once(
    tmp_path: Path, writers: Writers, handed: Handed
) -> None:
    run = run_in(tmp_path, interval=3)
    assert not run.manager._prewarmed and not writers.started
    run.train(1)
    assert run.manager._prewarmed and len(writers.started) == 1
    run.train(7)
    (prewarmed,) = handed.prewarmed
    assert prewarmed.keys() == handed.saved[0][2].keys() == KEYS
    assert [path.rpartition("/")[2] for _, path, _ in handed.saved] == ["step-3", "step-6"]
    assert len(writers.started) == 1
    run.manager.close()
    assert names(tmp_path) == ["step-3", "step-6"]


def test_a_run_is_prepared_beside_the_save_of_its_first_step(
    tmp_path: Path, writers: Writers, handed: Handed
) -> None:
    run = run_in(tmp_path, interval=3, enable_first_step_checkpoint=True)
    writers.hold()
    run.train(2)
    assert writers.reached.wait(60)
    first = run.manager.save_future
    assert len(handed.prewarmed) == 1 and first is not None and not first.done()
    expected = run.snapshot()
    writers.let_go()
    run.train(3)
    run.manager.close()
    assert names(tmp_path) == ["step-1", "step-3"] and len(writers.started) == 1
    again = run_in(tmp_path, seed=5, load_only=True)
    assert again.manager.load(1) and again.step == 1
    again.train(2)
    assert again.snapshot() == expected
    again.manager.close()


def test_saves_that_training_waits_for_are_not_prepared(tmp_path: Path, handed: Handed) -> None:
    run = waiting_run(tmp_path, interval=3)
    run.train(3)
    assert handed.prewarmed == [] and run.manager.save_future is None
    assert names(tmp_path) == ["step-3"]
    run.manager.close()


def test_saves_are_due_as_for_every_manager(tmp_path: Path, handed: Handed) -> None:
    run = waiting_run(tmp_path, interval=3, enable_first_step_checkpoint=True)
    run.train(5, last_step=5)
    assert names(tmp_path) == ["step-1", "step-3", "step-5"]
    assert len(handed.saved) == 3
    run.manager.close()


def test_the_last_save_goes_through_a_fresh_synchronous_backend(
    tmp_path: Path, writers: Writers, handed: Handed
) -> None:
    run = run_in(tmp_path, last_save_model_only=False)
    run.train(1)
    before = run.manager._manager
    future = run.manager.save_future
    run.train(2, last_step=2)
    assert future is not None and future.done() and run.manager.save_future is None
    (_, _, _), (last, path, payload) = handed.saved
    assert last is run.manager._manager is not before
    assert before._closed and not writers.started[0].is_usable
    config = run.manager._manager_config
    assert isinstance(config.save, SyncCheckpointSaverConfig)
    assert config.save.writer_config.barrier_config is not None
    assert config.pre_finalize_callback is None
    assert path == f"{tmp_path}/checkpoint/step-2" and set(payload) == KEYS
    # It is there when save returns.
    assert names(tmp_path) == ["step-1", "step-2"]
    again = run_in(tmp_path, seed=5)
    assert again.manager.load() and again.snapshot() == run.snapshot()
    for each in (run, again):
        each.manager.close()


def test_a_last_save_of_the_model_holds_nothing_else_in_the_chosen_dtype(
    tmp_path: Path, writers: Writers, handed: Handed
) -> None:
    run = run_in(tmp_path, interval=100, export_dtype="bfloat16")
    run.model.half_already = torch.nn.Buffer(torch.ones(2, dtype=torch.bfloat16))
    run.train(1, last_step=1)
    assert files(tmp_path, 1) == ["manifest.json", "metadata.pkl", "model_0.pt"]
    live = run.manager.states["model"].state_dict()
    (payload,) = (payload["model"] for _, _, payload in handed.saved)
    assert payload["seen"] is live["seen"] and payload["half_already"] is live["half_already"]
    floating = {name: each.dtype for name, each in payload.items() if each.is_floating_point()}
    assert set(floating.values()) == {torch.bfloat16} and "scale" in floating
    assert live["scale"].dtype == torch.float32
    assert saved(tmp_path, 1, "model")["seen"].dtype == torch.int64
    run.manager.close()


def test_the_dtype_of_an_export_is_that_of_the_last_save_alone(
    tmp_path: Path, writers: Writers
) -> None:
    run = run_in(tmp_path, export_dtype="float16", last_save_model_only=False)
    run.train(2, last_step=2)
    assert {saved(tmp_path, step, "model")["scale"].dtype for step in (1, 2)} == {torch.float32}
    run.manager.close()


def rank_state() -> RankState:
    return RankState(rank=0, world_size=1, layout="alone", device=torch.device("cpu"))


def change_everything(run: Run) -> None:
    """As the next step would, and more."""
    run.dataloader.values["row"] = -1
    run.dataloader.values["list"].append("later")
    run.dataloader.values["nested"]["deep"] = "later"
    run.progress.values["step"] = -1
    run.lr_schedulers.step()
    for _ in range(3):
        random.random()
        torch.rand(())
    run.model.seen += 100
    run.manager.states["plain"]["tensor"].fill_(-1)


def test_everything_in_a_save_is_the_state_at_the_call(tmp_path: Path, writers: Writers) -> None:
    run = run_in(tmp_path)
    run.manager.states["plain"] = {"tensor": torch.arange(4.0)}
    run.manager.states["rank_state"] = rank_state()
    run.dataloader.values |= {"list": ["now"], "nested": {"deep": "now"}}
    run.train(1, save=False)
    random.seed(5)
    torch.manual_seed(5)
    expected = run.snapshot()
    writers.hold()
    run.manager.save(1)
    change_everything(run)
    run.manager.maybe_wait_for_staging()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(-1)
    assert writers.reached.wait(60)
    change_everything(run)
    writers.let_go()
    drawn = (random.Random(5).random(), torch.rand((), generator=torch.manual_seed(5)))
    run.manager.close()

    again = run_in(tmp_path, seed=9, load_only=True)
    again.manager.states["plain"] = {"tensor": torch.zeros(4)}
    again.manager.states["rank_state"] = rank_state()
    assert again.manager.load()
    assert (random.random(), torch.rand(())) == drawn
    assert again.snapshot() == expected | {
        "data.list": ["now"],
        "data.nested": {"deep": "now"},
    }
    assert again.manager.states["plain"]["tensor"].tolist() == [0.0, 1.0, 2.0, 3.0]
    again.manager.close()


def test_every_save_tells_of_its_own_state_and_not_of_the_first_one(
    tmp_path: Path, writers: Writers
) -> None:
    run = run_in(tmp_path)
    for step in (1, 2, 3):
        # A state that appears, and grows.
        run.manager.states["plain"] = {"tensor": torch.full((step,), float(step))}
        run.train(step)
        if step == 2:
            run.manager.states["late"] = {"tensor": torch.ones(1)}
    run.manager.close()
    for step in (1, 2, 3):
        again = run_in(tmp_path, seed=step, load_only=True)
        again.manager.states["plain"] = {"tensor": torch.zeros(step)}
        if step == 3:
            again.manager.states["late"] = {"tensor": torch.zeros(1)}
        assert again.manager.load(step)
        assert again.manager.states["plain"]["tensor"].tolist() == [float(step)] * step
        again.manager.close()


@pytest.mark.parametrize("keep_latest_k", [0, 2])
def test_what_an_earlier_save_left_under_the_name_is_no_part_of_this_one(
    tmp_path: Path, writers: Writers, caplog: pytest.LogCaptureFixture, keep_latest_k: int
) -> None:
    folder = tmp_path / "checkpoint"
    for name in ("tmp_step-1", "step-1"):
        (folder / name).mkdir(parents=True)
        (folder / name / "optimizer_7.pt").touch()
    run = run_in(tmp_path, keep_latest_k=keep_latest_k)
    with caplog.at_level(logging.INFO):
        run.train(1)
    run.manager.close()
    assert names(tmp_path) == ["step-1"]
    assert "optimizer_7.pt" not in files(tmp_path, 1)
    assert f"Deleted {folder}/tmp_step-1, left behind by a save that did not" in caplog.text


def test_retention_comes_before_the_save_while_nothing_is_in_flight(
    tmp_path: Path, writers: Writers, handed: Handed
) -> None:
    run = run_in(tmp_path, keep_latest_k=2)
    folder = tmp_path / "checkpoint"
    for name in ("tmp_step-9", "step-3.partial", "step-4-notes", "notes-step-5"):
        (folder / name).mkdir(parents=True)
    seen: list[int] = []
    purge: Callable[..., None] = run.manager._purge_stale_checkpoints

    def noted(*, is_save_in_flight: bool) -> None:
        seen.append(len(handed.saved))
        assert not is_save_in_flight and all(backend._write_future is None for backend in backends)
        purge(is_save_in_flight=is_save_in_flight)

    backends = [run.manager._manager]
    with patch.object(run.manager, "_purge_stale_checkpoints", noted):
        run.train(4)
        run.manager.close()
    assert seen == [0, 1, 2, 3]
    assert names(tmp_path) == ["notes-step-5", "step-3", "step-3.partial", "step-4", "step-4-notes"]


def test_each_save_is_one_line_on_the_console(
    tmp_path: Path, writers: Writers, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_in(tmp_path, last_save_model_only=False)
    with caplog.at_level(logging.INFO, logger="root"):
        run.train(2)
        run.manager.close()
    said = [each.getMessage() for each in caplog.records if each.name == "root"]
    lines = [line for line in said if "aved" in line]
    assert [line.partition(":")[0] for line in lines] == [
        f"Saved checkpoint of step {step}" for step in (1, 2)
    ]
    assert all(
        line.endswith(f"({tmp_path}/checkpoint/step-{n})") for n, line in enumerate(lines, 1)
    )
