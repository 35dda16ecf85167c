"""A run that stopped and was started again equals one that never stopped, bit for bit."""

from pathlib import Path

import pytest

from tests.ranks.pool import run_on_ranks
from tests.ranks.tiny_run import make_config, NUM_STEPS, run, Trace

# The corpus is 20 rows and a step takes 4, so step 5 ends the first epoch exactly.
STOPS = [2, 5, 11]


def straight_and_resumed(folder: str, async_mode: str, stops: list[int]) -> list[list[Trace]]:
    """Traces of [straight], then of [before the crash, after it] for each stop."""
    base = Path(folder)
    runs = [[run(make_config(base, f"straight-{async_mode}", async_mode=async_mode))]]
    for stop in stops:
        name = f"stop-{async_mode}-{stop}"
        options = {"async_mode": async_mode, "interval": stop}
        before = run(make_config(base, name, **options), crash_after=stop)
        runs.append([before, run(make_config(base, name, **options))])
    return runs


def part_of_a_run(folder: str, until: int | None) -> Trace:
    config = make_config(Path(folder), "thirds", async_mode="async", interval=4)
    return run(config, crash_after=until)


def straight(folder: str) -> Trace:
    return run(make_config(Path(folder), "straight"))


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_resuming_after_a_crash_gives_the_bits_of_the_uninterrupted_run(
    tmp_path: Path, world_size: int, async_mode: str
) -> None:
    per_rank = run_on_ranks(
        world_size, straight_and_resumed, str(tmp_path), async_mode, STOPS, init=False
    )
    for [[whole], *resumed] in per_rank:
        assert sorted(whole.losses) == list(range(1, NUM_STEPS + 1))
        assert whole.epochs[4] == 0 and whole.epochs[5] == 1, "step 5 must end the epoch exactly"
        for stop, (before, after) in zip(STOPS, resumed, strict=True):
            assert after.resumed_from == stop
            assert before.samples | after.samples == whole.samples
            assert before.losses | after.losses == whole.losses
            assert before.learning_rates | after.learning_rates == whole.learning_rates
            assert after.state == whole.state
    assert per_rank[0][0][0].losses == per_rank[-1][0][0].losses


@pytest.mark.ranks
def test_three_processes_in_a_row_equal_one(tmp_path: Path) -> None:
    whole = run_on_ranks(2, straight, str(tmp_path), init=False)
    thirds = [
        run_on_ranks(2, part_of_a_run, str(tmp_path), until, init=False) for until in (4, 8, None)
    ]
    for rank in range(2):
        parts = [third[rank] for third in thirds]
        assert [part.resumed_from for part in parts] == [0, 4, 8]
        joined = {step: loss for part in parts for step, loss in part.losses.items()}
        assert joined == whole[rank].losses
        assert parts[-1].state == whole[rank].state
