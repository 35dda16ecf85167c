"""A run that goes on with another number of ranks: the same state, the same order of samples."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.ranks.pool import run_on_ranks
from tests.ranks.tiny_run import make_config, NUM_STEPS, run, Trace

pytestmark = pytest.mark.ranks
STOP = 4


def begin(folder: str) -> list[Trace]:
    """A run without interruption, and one that ends after a checkpoint."""
    whole = run(make_config(Path(folder), "straight"))
    return [whole, run(make_config(Path(folder), "run", interval=STOP), crash_after=STOP)]


def go_on(folder: str) -> list[Trace]:
    """The second run, ended before its first step (so it holds what it loaded), then to its end."""
    ends: list[int | None] = [STOP, None]
    config = make_config(Path(folder), "run", interval=STOP)
    return [run(config, crash_after=end) for end in ends]


def samples(ranks: Sequence[Trace], steps: range) -> dict[int, set[str]]:
    """What the ranks took together in each step."""
    return {step: {row for rank in ranks for row in rank.samples[step]} for step in steps}


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_with_the_same_state_and_samples(
    tmp_path: Path, before: int, after: int
) -> None:
    begun = run_on_ranks(before, begin, str(tmp_path), init=False)
    continued = run_on_ranks(after, go_on, str(tmp_path), init=False)
    whole, first = zip(*begun, strict=True)
    loaded, rest = zip(*continued, strict=True)
    assert [rank.samples for rank in loaded] == [{}] * after
    assert loaded[0].state == first[0].state
    assert [rank.resumed_from for rank in rest] == [STOP] * after
    steps = range(STOP + 1, NUM_STEPS + 1)
    assert sorted(rest[0].losses) == list(steps)
    assert samples(rest, steps) == samples(whole, steps)
    # Sums in another order: no longer the same bits, still the same numbers.
    for step in steps:
        assert rest[0].losses[step] == pytest.approx(whole[0].losses[step], rel=1e-4)
        assert rest[0].learning_rates[step] == whole[0].learning_rates[step]
