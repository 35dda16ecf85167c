"""The metrics of several ranks: one folder for all, one record, one rank that speaks."""

import json
from datetime import datetime
from pathlib import Path

import pytest
import torch.distributed as dist
from torchtitan.components.metrics import continuation
from torchtitan.distributed.utils import init_fake_mode

from tests.ranks.pool import run_on_ranks
from tests.unit_tests.components.metrics.doubles import begin, dims, log_steps, read_scalars

pytestmark = pytest.mark.ranks

LOSS = "loss_metrics/global_avg_loss"


def _log_on_every_rank(folder: str) -> None:
    rank = dist.get_rank()

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, rank)  # a minute has just passed for the second rank

    continuation.datetime = Clock
    settings = {"enable_tensorboard": True, "save_for_all_ranks": True}
    for start, end in ((0, 5), (3, 6)):
        built = begin(Path(folder), start, rank_dims=dims(world_size=2), **settings)
        log_steps(built, range(start + 1, end + 1), offset=rank)
        built.close()


def _play_both_ranks(folder: str) -> None:
    settings = {"enable_tensorboard": True, "save_for_all_ranks": True}
    for rank in (0, 1):
        init_fake_mode(2, rank=rank)
        begin(Path(folder), rank_dims=dims(world_size=2), **settings).close()
        dist.destroy_process_group()


def test_a_process_that_plays_a_rank_leaves_the_record_of_the_run(tmp_path: Path) -> None:
    record = tmp_path / "metrics_run.json"
    record.write_text('{"tensorboard": "of the run"}')
    run_on_ranks(1, _play_both_ranks, str(tmp_path), init=False)
    assert record.read_text() == '{"tensorboard": "of the run"}'


def test_all_ranks_go_on_in_one_folder(tmp_path: Path) -> None:
    run_on_ranks(2, _log_on_every_rank, str(tmp_path))
    record = json.loads((tmp_path / "metrics_run.json").read_text())
    assert record["tensorboard"] == "20260102-0300"
    for rank in (0, 1):
        found = read_scalars(tmp_path / "tb" / "20260102-0300" / f"rank_{rank}")
        assert found[LOSS] == [(step, step + rank) for step in range(1, 7)]
    assert [path.name for path in (tmp_path / "tb").iterdir()] == ["20260102-0300"]
