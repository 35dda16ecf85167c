"""Two real ranks save and load together, on any number of ranks, and training never waits twice."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import dcp_index
from torchtitan.components.checkpointer.agreement import gather, rank_zero_decides
from torchtitan.components.checkpointer.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointReadError,
)
from torchtitan.components.checkpointer.tc import reading

from tests.ranks.pool import run_on_ranks
from tests.unit_tests.components.checkpointer.runs import build_run, message_of, names
from tests.unit_tests.components.checkpointer.ways import ASYNC, DISABLED, over, TC, TC_WAITING, Way

pytestmark = pytest.mark.ranks


def save_steps(folder: Path, way: Way, until: int, **settings: Any) -> dict[str, Any]:
    run = build_run(folder, **way.settings, **settings)
    run.train(until)
    run.manager.close()
    return run.snapshot()


def load_step(folder: Path, way: Way, step: int = -1) -> Any:
    run = build_run(folder, seed=77, load_only=True, **way.settings)
    assert run.manager.load(step)
    loaded = run.snapshot()
    run.manager.close()
    return loaded


def resume_and_go_on(folder: Path, way: Way, until: int) -> Any:
    run = build_run(folder, seed=77, load_only=True, **way.settings)
    assert run.manager.load()
    begun_at = run.step
    run.train(until)
    run.manager.close()
    return begun_at, run.snapshot()


def straight(folder: Path, until: int) -> Any:
    run = build_run(folder)
    run.train(until, save=False)
    run.manager.close()
    return run.snapshot()


def reduce_after_each_save(folder: Path) -> list[float]:
    run = build_run(folder, async_mode="async", keep_latest_k=2)
    sums = []
    for step in range(1, 9):
        run.train(step)
        value = torch.full((1000,), float(step + dist.get_rank()))
        dist.all_reduce(value)
        sums.append(float(value[0]))
    run.manager.close()
    return sums


def save_then_change(folder: Path, way: Way) -> bool:
    """Whether each of two saves holds what was there when it was called, on every rank."""
    run = build_run(folder, **way.settings)
    run.train(2, save=False)
    snapshots = []
    for step in (2, 3):
        snapshots.append(run.snapshot())
        run.manager.save(step)
        run.progress.values["step"] = 3
        run.manager.maybe_wait_for_staging()
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(-1.0)
            for optimizer in run.optimizers:
                for state in optimizer.state.values():
                    state["exp_avg_sq"].add_(5.0)
    run.manager.maybe_wait_for_saving()
    other = build_run(folder, load_only=True, seed=8, **way.settings)
    for step, snapshot in zip((2, 3), snapshots, strict=True):
        other.manager.load(step)
        assert other.snapshot() == snapshot
    run.manager.close()
    return snapshots[0] != snapshots[1]


def error_of_load(folder: Path, way: Way, step: int, width: int) -> tuple[str, str]:
    run = build_run(folder, width=width, **way.settings)
    try:
        run.manager.load(step)
    except CheckpointError as error:
        run.manager.close()
        return type(error).__name__, str(error)
    return "", "nothing was raised"


class OfRank1:
    """State that rank 1 cannot tell as long as it is broken."""

    is_broken = False

    def state_dict(self) -> dict[str, Any]:
        if self.is_broken and dist.get_rank() == 1:
            raise KeyError("row")
        return {"row": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def break_a_state_of_rank_1(folder: Path, way: Way) -> Any:
    run, state = build_run(folder, **way.settings), OfRank1()
    run.manager.states["reader"] = state
    run.train(1)
    state.is_broken = True
    message = message_of(run.train, 2)
    state.is_broken = False
    run.train(3)
    run.manager.close()
    return message


def see_different_disks(folder: Path, way: Way) -> Any:
    """Rank 1 sees an empty folder and cannot read an index, as on a slow network disk."""
    run = build_run(folder, keep_latest_k=2, **way.settings)
    if dist.get_rank() == 1:
        patch.object(run.manager._storage, "isdir", return_value=False).start()
        unreadable = CheckpointReadError("rank 1 sees no index")
        patch.object(dcp_index, "read_index", side_effect=unreadable).start()
        patch.object(reading, "look", side_effect=unreadable).start()
    assert run.manager.load()
    begun_at = run.step
    run.train(begun_at + 2)
    run.manager.close()
    return begun_at


def decide(what: str) -> Any:
    """Rank 0 decides; what the others would have decided is never asked."""

    class UnpicklableError(Exception):
        pass

    def on_rank_0() -> str:
        assert dist.get_rank() == 0
        if what == "error":
            raise CheckpointNotFoundError("not there")
        if what == "unpicklable":
            raise UnpicklableError("local class")
        return what

    try:
        return rank_zero_decides(on_rank_0), gather(dist.get_rank())
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    "before,after,way",
    [(2, 1, ASYNC), (1, 2, DISABLED), (2, 1, TC_WAITING), (1, 4, TC_WAITING)],
    ids=str,
)
def test_every_bit_comes_back_on_any_number_of_ranks(
    tmp_path: Path, before: int, after: int, way: Way
) -> None:
    saved = run_on_ranks(before, save_steps, tmp_path, way, 3)
    loaded = run_on_ranks(after, load_step, tmp_path, way)
    assert all(snapshot == saved[0] for snapshot in saved + loaded)
    files = {entry.name for entry in (tmp_path / "checkpoint/step-3").iterdir()}
    ranks, shared = range(before), ("train_state", "dataloader", "lr_scheduler")
    assert (
        files
        == {
            "dcp": {".metadata", "manifest.json", *(f"__{rank}_0.distcp" for rank in ranks)},
            "torch_checkpointing": {
                *("metadata.pkl", "manifest.json"),
                *(f"{part}_{rank}.pt" for part in ("model", "optimizer") for rank in ranks),
                *(f"{part}_0.pt" for part in shared),
            },
        }[way.format.backend]
    )


@over(ASYNC, TC_WAITING)
def test_a_resumed_run_equals_the_one_that_was_never_stopped(tmp_path: Path, way: Way) -> None:
    run_on_ranks(2, save_steps, tmp_path / "stopped", way, 5, interval=2)
    resumed = run_on_ranks(2, resume_and_go_on, tmp_path / "stopped", way, 7)
    assert [begun_at for begun_at, _ in resumed] == [4, 4]
    assert resumed[0][1] == run_on_ranks(2, straight, tmp_path / "straight", 7)[0]


def test_training_s_collectives_and_those_of_a_save_never_meet(tmp_path: Path) -> None:
    sums = run_on_ranks(2, reduce_after_each_save, tmp_path)
    assert sums == [[2.0 * step + 1 for step in range(1, 9)]] * 2
    assert names(tmp_path) == ["step-7", "step-8"]


@over(ASYNC, TC)
def test_what_changes_after_an_asynchronous_save_reaches_the_next_one_only(
    tmp_path: Path, way: Way
) -> None:
    assert run_on_ranks(2, save_then_change, tmp_path, way) == [True, True]


@over(ASYNC, TC)
def test_another_model_is_one_error_with_every_key_on_every_rank(tmp_path: Path, way: Way) -> None:
    waiting = DISABLED if way is ASYNC else TC_WAITING
    run_on_ranks(2, save_steps, tmp_path, waiting, 1)
    answers = run_on_ranks(2, error_of_load, tmp_path, way, -1, 5)
    assert answers[0] == answers[1]
    name, text = answers[0]
    assert name == CheckpointMismatchError.__name__
    assert "tok_embeddings.weight (here [11, 5], there [11, 7])" in text
    assert "optimizer.state.layers.0.bias.exp_avg_sq (here [5], there [7])" in text


@over(DISABLED, TC_WAITING)
def test_a_step_that_is_missing_names_the_flag_on_every_rank(tmp_path: Path, way: Way) -> None:
    run_on_ranks(2, save_steps, tmp_path, way, 2)
    answers = run_on_ranks(2, error_of_load, tmp_path, way, 9, 7)
    for name, text in answers:
        assert name == CheckpointNotFoundError.__name__
        assert "--checkpoint.load_step=9" in text and "[1, 2]" in text


@over(ASYNC, TC_WAITING)
def test_a_rank_that_sees_another_disk_follows_rank_0(tmp_path: Path, way: Way) -> None:
    run_on_ranks(2, save_steps, tmp_path, way, 2)
    assert run_on_ranks(2, see_different_disks, tmp_path, way, timeout_seconds=30) == [2, 2]
    assert names(tmp_path) == ["step-3", "step-4"]


def test_a_state_that_one_rank_cannot_tell_fails_the_save_on_all_and_the_next_one_works(
    tmp_path: Path,
) -> None:
    # Through DCP the others learn of it only when the run of that rank ends.
    for message in run_on_ranks(2, break_a_state_of_rank_1, tmp_path, TC_WAITING):
        assert f"step 2 to {tmp_path}/checkpoint/step-2 failed: rank 1: the state reader" in message
    assert names(tmp_path) == ["step-1", "step-3"]


def test_only_rank_0_decides_and_what_it_raises_everyone_raises() -> None:
    assert run_on_ranks(2, decide, "step 4") == [("step 4", [0, 1])] * 2
    assert run_on_ranks(2, decide, "error") == [("CheckpointNotFoundError", "not there")] * 2
    first, second = run_on_ranks(2, decide, "unpicklable")
    assert first == ("UnpicklableError", "local class")
    assert second == ("RuntimeError", "UnpicklableError on rank 0: local class")
