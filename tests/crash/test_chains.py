"""After any number of crashes, one in what the other has left, a start goes on from what was promised.

Drawn from a seed, which a failure tells: ``KILLS_SEED=7`` repeats one, ``KILLS_SEED=100-149`` tries fifty.
"""

import random
from pathlib import Path

import pytest

from tests.crash.chains import Chain
from tests.unit_tests.components.checkpointer.ways import ASYNC, DISABLED, over, TC_WAITING, Way

pytestmark = pytest.mark.usefixtures("one_rank")

_NUM_CHAINS = 4
"""For each seed and way, of about twenty states."""


@over(DISABLED, ASYNC, TC_WAITING)
def test_crashes_in_what_crashes_have_left_cost_nothing_that_was_acknowledged(
    way: Way, kills_seed: int, tmp_path: Path
) -> None:
    count = 0
    for number in range(_NUM_CHAINS):
        place = tmp_path / str(number)
        place.mkdir()
        chain = Chain(way, place, random.Random(f"{kills_seed} {way} {number}"))
        try:
            count += chain.grow()
        except AssertionError as error:
            pytest.fail(f"KILLS_SEED={kills_seed}, {way}, chain {number}: {error}")
    print(f"KILLS_SEED={kills_seed}, {way}: {count} states")
    assert count >= _NUM_CHAINS * 2 * 8
