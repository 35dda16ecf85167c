"""Saves that a thread begins, on several ranks: none waits for another, and all of them count alike."""

from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.checkpointer import torch_checkpointing
from torchtitan.components.checkpointer.errors import CheckpointSaveError
from torchtitan.models.common.fused_qkv import FusedQKVLinear
from torchtitan.models.common.layers import Linear

from tests.ranks.pool import run_on_ranks
from tests.ranks.trouble import RankLog
from tests.unit_tests.components.checkpointer import runs
from tests.unit_tests.components.checkpointer.runs import build_run, names, Run, Tiny
from tests.unit_tests.components.checkpointer.ways import TC

pytestmark = pytest.mark.ranks
LIMIT_SECONDS = 60


class Projections(nn.Module):
    """Three in one matrix, of which each rank has a part and saves all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wqkv = Linear.Config(in_features=width, out_features=3 * width)
        config = FusedQKVLinear.Config(head_dim=width, n_heads=1, n_kv_heads=1, wqkv=wqkv)
        self.qkv = config.build()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.qkv(hidden)
        return (queries * keys + values).squeeze(1).clone()


class Fused(Tiny):
    """A model that ranks ask each other for parts of, for each save."""

    def __init__(self, width: int = 7) -> None:
        super().__init__(width)
        self.layers = nn.ModuleDict({str(i): Projections(width) for i in range(2)})


def run_in(folder: Path, kind: type[Tiny] = Tiny, **settings: Any) -> Run:
    limits = {"timeout_seconds": LIMIT_SECONDS, "keep_latest_k": 0, **settings}
    with patch.object(runs, "Tiny", kind):
        run = build_run(folder, **TC.settings, **limits)
    run.train(1)
    run.manager.maybe_wait_for_saving()
    return run


def save_while_another_rank_stays_away(folder: Path) -> list[str]:
    run = run_in(folder)
    store = dist.distributed_c10d._get_default_store()
    run.train(2, save=False)
    if dist.get_rank() == 1:
        store.get("rank 0 went on")
    assert run.manager.save(2)
    if dist.get_rank() == 0:
        store.set("rank 0 went on", "")
    run.train(4)
    run.manager.close()
    return names(folder)


def test_a_save_returns_though_another_rank_has_not_come_to_it(tmp_path: Path) -> None:
    wanted = [f"step-{step}" for step in (1, 2, 3, 4)]
    assert run_on_ranks(2, save_while_another_rank_stays_away, tmp_path) == [wanted, wanted]


def go_on_before_the_folder_is_ready(folder: Path) -> tuple[bool, bool]:
    run = run_in(folder, Fused)
    run.train(2, save=False)
    expected, went_on, make_ready = run.snapshot(), Event(), run.manager._make_ready

    def hold(*arguments: Any, **keywords: Any) -> None:
        assert went_on.wait(LIMIT_SECONDS)
        make_ready(*arguments, **keywords)

    with patch.object(run.manager, "_make_ready", hold):
        assert run.manager.save(2)
        run.model(torch.arange(10))
        is_begun = run.manager._beginning.is_over
        went_on.set()
        run.train(3, save=False)
    run.manager.close()
    with patch.object(runs, "Tiny", Fused):
        again = build_run(folder, seed=9, load_only=True, **TC.settings)
    assert again.manager.load(2)
    found = again.snapshot()
    again.manager.close()
    return is_begun, found == expected


def test_a_model_of_fused_and_sharded_projections_is_saved_as_it_was_while_training_goes_on(
    tmp_path: Path,
) -> None:
    found = run_on_ranks(2, go_on_before_the_folder_is_ready, tmp_path)
    assert found == [(False, True), (False, True)]


def begin_where_one_rank_cannot(folder: Path) -> list[bool]:
    """Whether a thread begins the saves from the second one on; rank 1 could not before step 4."""
    could, step = [], 1
    with patch.object(
        torch_checkpointing, "could_capture", lambda states: dist.get_rank() == 0 or step > 3
    ):
        run = run_in(folder)
        for step in range(2, 7):
            run.train(step)
            could.append(run.manager._beginning is not None)
    run.manager.close()
    return could


def test_no_rank_leaves_a_save_to_a_thread_before_all_have_said_that_they_could(
    tmp_path: Path,
) -> None:
    found = run_on_ranks(2, begin_where_one_rank_cannot, tmp_path)
    assert found == [[False, False, False, True, True]] * 2


def counts_in(lines: list[str]) -> list[str]:
    """How many saves had failed in a row, each time a rank has said so."""
    told = [line.partition("Failed in a row: ")[2] for line in lines]
    return [count.partition(";")[0] for count in told if count]


def fail_where_ranks_go_different_ways(
    folder: Path, kind: type[Tiny]
) -> tuple[list[str], str, int]:
    """Rank 0 makes each other save in the thread that trains, rank 1 each in another thread."""
    run = run_in(folder, kind, on_save_failure="warn", max_failed_saves=4)
    log, captured, told = RankLog(), run.manager._captured, ""

    def in_turns() -> Any:
        return captured() if dist.get_rank() == 1 or run.step % 2 else None

    def deny(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    with patch.object(run.manager, "_captured", in_turns):
        with patch.object(run.manager, "_clear_path", deny):
            run.train(4)
            run.manager.maybe_wait_for_staging()
        run.train(5)
        run.manager.maybe_wait_for_saving()
        with patch.object(run.manager, "_clear_path", deny):
            try:
                run.train(12)
            except CheckpointSaveError as error:
                told = str(error)
    run.manager.close()
    return counts_in(log.lines), told, run.step


@pytest.mark.parametrize("kind", [Tiny, Fused])
def test_ranks_that_save_in_different_ways_count_alike_and_end_with_the_same(
    tmp_path: Path, kind: type[Tiny]
) -> None:
    (counts, told, step), (others, same, next_step) = run_on_ranks(
        2, fail_where_ranks_go_different_ways, tmp_path, kind
    )
    assert counts == others == ["1", "2", "3", "1", "2", "3"]
    assert "4 saves in a row have failed" in told and told == same
    assert step == next_step == 10  # a thread has found it, which is told one step later
    assert names(tmp_path) == ["step-1", "step-5"]
