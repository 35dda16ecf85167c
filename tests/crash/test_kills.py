"""Real processes are killed at random moments of fifty saves, and no step that was acknowledged is lost.

The moments come from a seed, which a failure tells: ``KILLS_SEED=7`` repeats one, ``KILLS_SEED=100-149``
tries fifty others, and ``--crash-points all`` a few more than the one of each day.
"""

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.crash.killed_checks import check_ends, Survival
from tests.crash.killed_runs import NUM_SAVES, start
from tests.crash.killing import Kill
from tests.crash.moments import draw_moment, Moment
from tests.unit_tests.components.checkpointer.ways import ASYNC, DISABLED, over, PINNED, TC, Way

pytestmark = pytest.mark.ranks

ALL = ("rank 0", "rank 1")


class Planner:
    """Draws who is killed and when, for one start after the other."""

    def __init__(self, way: Way, seed: int) -> None:
        self._random = random.Random(f"{seed} {way}")
        self._way = way
        ones = [(self._random.choice(ALL),) for _ in range(1 if way.has_writer else 3)]
        self._victims = [*ones, *[ALL] * len(ones)]
        """Of each start; the one after them is the last."""
        self._random.shuffle(self._victims)
        # One by the clock: a counted moment is never between two operations.
        self._timed = self._random.randrange(len(self._victims))

    @property
    def num_starts(self) -> int:
        return len(self._victims) + 1

    def kills(self, number: int) -> list[Kill]:
        """What happens in start ``number``."""
        if number == self._timed:
            # Fifty saves that nobody waits for a process with are over within a second.
            limit = 2 if self._way.has_writer else 0.2
            return [Kill(self._victims[number], self._random.uniform(0, limit))]
        if number < len(self._victims):
            return [Kill(self._victims[number], self._moment())]
        if not self._way.has_writer:
            return []
        # Of that the run is to go on by itself.
        writer = self._random.choice(["writer 0", "writer 1"])
        return [Kill((writer,), self._moment(writer))]

    def _moment(self, who: str | None = None) -> Moment:
        # So few that all of them come within the fifty.
        num_saves = 0.8 * NUM_SAVES / self.num_starts
        has_writer = self._way.has_writer
        return draw_moment(self._random, has_writer=has_writer, num_saves=num_saves, who=who)


@over(DISABLED, ASYNC, PINNED, TC)
def test_kills_at_random_moments_cost_no_acknowledged_step(
    tmp_path: Path, way: Way, kills_seed: int, states: list[list[str]]
) -> None:
    planner, folder = Planner(way, kills_seed), tmp_path / "run"
    survival, story = Survival(folder, way, states), ""
    struck: Counter[tuple[str, ...]] = Counter()
    for number in range(planner.num_starts):
        kills = planner.kills(number)
        begun = start(folder, tmp_path / f"start-{number}", way, until=NUM_SAVES, kills=kills)
        story = f"KILLS_SEED={kills_seed}, {way}, start {number}: {begun}"
        print(story)
        struck.update(kills[place].victims for place in begun.struck)
        check_ends(begun, way, story)
        survival.after(begun, story)
        if all(end.how == "returned" for end in begun.ends):
            break  # what was planned for later has no place in fifty saves
    assert max(survival.acknowledged) >= NUM_SAVES
    survival.in_the_end(story)
    told = ", ".join(f"{' and '.join(who)}: {count}" for who, count in sorted(struck.items()))
    print(f"KILLS_SEED={kills_seed}, {way}, killed: {told}")
    # Else nothing that was found to be good has been through anything.
    assert struck[ALL] and any(struck[rank,] for rank in ALL), f"killed: {told or 'nobody'}"
