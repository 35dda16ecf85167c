"""A run goes on with another number of ranks: the same state, and the same samples in their order."""

from pathlib import Path

import pytest

from tests.ranks.pool import run_on_ranks
from tests.ranks.tiny_run import make_config, NUM_STEPS, run, Trace

STOP = 5


def train(folder: str, crash_after: int | None) -> Trace:
    config = make_config(Path(folder), "run", async_mode="async", interval=STOP)
    return run(config, crash_after=crash_after)


def samples_in_order(ranks: list[Trace], step: int) -> list[str]:
    """Digests of the microbatches of a step, in the order of the rows they hold."""
    per_rank = [rank.samples[step] for rank in ranks]
    return [digest for microbatches in zip(*per_rank, strict=True) for digest in microbatches]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    folder = str(tmp_path_factory.mktemp("whole"))
    return run_on_ranks(1, train, folder, None, init=False)


@pytest.mark.ranks
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_state_and_sample_order_survive_a_change_of_ranks(
    tmp_path: Path, whole: list[Trace], before: int, after: int
) -> None:
    saved = run_on_ranks(before, train, str(tmp_path), STOP, init=False)
    # Crashing at once shows the state as it was loaded.
    loaded = run_on_ranks(after, train, str(tmp_path), STOP, init=False)
    assert {rank.resumed_from for rank in loaded} == {0}, "no step may have run"
    assert loaded[0].state == saved[0].state
    rest = run_on_ranks(after, train, str(tmp_path), None, init=False)
    assert {rank.resumed_from for rank in rest} == {STOP}
    for step in range(1, NUM_STEPS + 1):
        ranks = saved if step <= STOP else rest
        assert samples_in_order(ranks, step) == samples_in_order(whole, step)
    assert rest[0].state["ntokens_seen"] == whole[0].state["ntokens_seen"]
