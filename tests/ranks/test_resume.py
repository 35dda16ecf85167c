"""A run that stopped and was started again equals one that never stopped, bit for bit."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.pool import run_on_ranks
from tests.ranks.tiny_run import make_config, NUM_STEPS, run, Trace
from tests.unit_tests.components.checkpointer.ways import ASYNC, DISABLED, TC, TC_WAITING, Way

# The corpus is 20 rows and a step takes 4, so step 5 ends the first epoch exactly.
STOPS = [2, 5, 11]


def straight_and_resumed(folder: str, way: Way, stops: list[int]) -> list[list[Trace]]:
    """Traces of [straight], then of [before the crash, after it] for each stop."""
    base = Path(folder)
    runs = [[run(make_config(base, "straight", **way.settings))]]
    for stop in stops:
        name = f"stop-{stop}"
        options: dict[str, Any] = {**way.settings, "interval": stop}
        before = run(make_config(base, name, **options), crash_after=stop)
        runs.append([before, run(make_config(base, name, **options))])
    return runs


def part_of_a_run(folder: str, way: Way, until: int | None) -> Trace:
    config = make_config(Path(folder), "parts", interval=4, **way.settings)
    return run(config, crash_after=until)


def straight(folder: str) -> Trace:
    return run(make_config(Path(folder), "straight", load_only=True))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "world_size,way",
    # Of the other manager test_exactness.py has more.
    [(1, DISABLED), (2, DISABLED), (1, ASYNC), (2, ASYNC), (1, TC_WAITING)],
    ids=str,
)
def test_resuming_after_a_crash_gives_the_bits_of_the_uninterrupted_run(
    tmp_path: Path, world_size: int, way: Way
) -> None:
    per_rank = run_on_ranks(world_size, straight_and_resumed, str(tmp_path), way, STOPS, init=False)
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    """The uninterrupted run on two ranks."""
    return run_on_ranks(2, straight, str(tmp_path_factory.mktemp("whole")), init=False)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "starts",
    [[(ASYNC, 4), (ASYNC, 8), (ASYNC, None)], [(TC, 4), (TC_WAITING, None)]],
    ids=["dcp", "tc"],
)
def test_processes_in_a_row_equal_one(
    tmp_path: Path, starts: list[tuple[Way, int | None]], whole: list[Trace]
) -> None:
    by_start = [
        run_on_ranks(2, part_of_a_run, str(tmp_path), way, until, init=False)
        for way, until in starts
    ]
    for straight_run, *parts in zip(whole, *by_start, strict=True):
        assert [part.resumed_from for part in parts] == [0, 4, 8][: len(starts)]
        joined = {step: loss for part in parts for step, loss in part.losses.items()}
        assert joined == straight_run.losses
        assert parts[-1].state == straight_run.state
