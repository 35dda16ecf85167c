"""Wherever a crash falls, a start goes on from what was promised, saves again and leaves a clean folder.

Without more ado some points of each history are tried, evenly chosen; ``--crash-points all`` tries
all of them, and a number about so many.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.crash.checking import Checker, PromiseBrokenError
from tests.crash.model import DiskModel
from tests.crash.scenarios import Case, CASES, evenly, Histories

AT_LEAST = 1000
"""So many are tried without more ado."""

of_each_case = pytest.mark.parametrize("case", CASES, ids=str)
# With all points; without, a case takes a few seconds.
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(4 * 3600), pytest.mark.usefixtures("one_rank")]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Where nothing has to reach a disk: what would be lost is computed."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(prefix="crash-", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def histories(place: Path) -> Histories:
    return Histories(place / "recorded")


@pytest.fixture(scope="module")
def tried() -> dict[str, int]:
    """How many points of each case were tried."""
    return {}


@pytest.fixture
def num_points(request: pytest.FixtureRequest) -> int | None:
    """How many points of all cases together are to be tried; None for all."""
    wanted = request.config.getoption("--crash-points")
    return None if wanted == "all" else wanted


@of_each_case
def test_nothing_happens_past_the_disk_that_is_recorded(case: Case, histories: Histories) -> None:
    for history in histories.of(case):
        model = DiskModel(history.earlier.start)
        for operation in history.operations:
            model.apply(operation)
        assert model.tree().digest == history.end.digest, f"{model.tree()}\n\n{history.end}"


@of_each_case
def test_a_start_after_a_crash_goes_on_from_what_was_promised(
    case: Case,
    histories: Histories,
    place: Path,
    num_points: int | None,
    tried: dict[str, int],
    record_property: Callable[[str, object], None],
) -> None:
    points = histories.points_of(case, all_orders=num_points is None)
    share = len(points) if num_points is None else math.ceil(num_points / len(CASES))
    chosen = evenly(points, share)
    record_property("crash_points", [str(case), len(chosen), len(points)])
    checker = Checker.of(case.way, place / "checked")
    for each in chosen:
        try:
            checker.check(each.point.tree, each.promises)
        except PromiseBrokenError as error:
            pytest.fail(f"{case}, {each.point}:\n{error}", pytrace=False)
    tried[str(case)] = len(chosen)


def test_a_thousand_points_were_tried(tried: dict[str, int], num_points: int | None) -> None:
    if len(tried) < len(CASES) or (num_points is not None and num_points < AT_LEAST):
        pytest.skip("this was asked for some cases or few points only")
    assert sum(tried.values()) >= AT_LEAST
