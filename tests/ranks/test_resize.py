"""A run goes on with another number of ranks: the same state, and the same samples in their order."""

from pathlib import Path

import pytest

from tests.ranks.layouts import FSDP_2, FSDP_4, Layout, ONE, samples_in_order
from tests.ranks.pool import run_on_ranks
from tests.ranks.tiny_run import make_config, NUM_STEPS, run, Trace
from tests.unit_tests.components.checkpointer.ways import ASYNC, over, TC_WAITING, Way

# (layout, last step of this start). The corpus is 20 rows and a step takes 4, so an epoch ends in
# each of the last two starts.
STARTS = [(FSDP_2, 4), (ONE, 8), (FSDP_4, NUM_STEPS)]
ROWS_PER_STEP = 4


def train(folder: str, name: str, way: Way, layout: Layout, last_step: int) -> Trace:
    config = make_config(Path(folder), name, interval=4, **way.settings)
    layout.divide(config, rows_per_step=ROWS_PER_STEP)
    return run(config, crash_after=None if last_step == NUM_STEPS else last_step)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The same on one rank, without an interruption."""
    folder = str(tmp_path_factory.mktemp("whole"))
    [trace] = run_on_ranks(1, train, folder, "whole", ASYNC, ONE, NUM_STEPS, init=False)
    return trace


@pytest.mark.ranks
@over(ASYNC, TC_WAITING)
def test_two_ranks_then_one_then_four_continue_one_run(
    tmp_path: Path, way: Way, whole: Trace
) -> None:
    folder = str(tmp_path)
    parts = [
        run_on_ranks(layout.num_ranks, train, folder, "resized", way, layout, last_step, init=False)
        for layout, last_step in STARTS
    ]
    assert [part[0].resumed_from for part in parts] == [0, 4, 8]
    for before, after in zip(parts, parts[1:], strict=False):
        assert all(rank.loaded == before[0].state for rank in after)
    for (layout, last_step), part in zip(STARTS, parts, strict=True):
        assert list(part[0].losses) == list(range(last_step - 3, last_step + 1))
        for step, loss in part[0].losses.items():
            assert samples_in_order(part, step, layout) == samples_in_order([whole], step, ONE)
            # Other sums in another order: near, not equal.
            assert loss == pytest.approx(whole.losses[step], rel=1e-4)
            assert part[0].learning_rates[step] == whole.learning_rates[step]
            assert part[0].epochs[step] == whole.epochs[step]
    for name in ("step", "ntokens_seen", "last_epoch", "epoch", "next_row"):
        assert parts[-1][0].state[name] == whole.state[name]
