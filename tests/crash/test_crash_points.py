"""Wherever a crash falls, a start goes on from what was promised, saves again and leaves a clean folder.

Without more ado some points of each history are tried, evenly chosen; ``--crash-points all`` tries
all of them, and a number about so many.
"""

import ast
import gc
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch.distributed.checkpoint.utils
from torchtitan.components import checkpointer

from tests.crash import interleaving
from tests.crash.checking import Checker, PromiseBrokenError
from tests.crash.meetings import DIRECTIONS
from tests.crash.model import DiskModel
from tests.crash.operations import FROM_RANK_ZERO, Kind, MEET, TO_RANK_ZERO
from tests.crash.promises import ACKNOWLEDGED
from tests.crash.scenarios import Case, CASES, evenly, Histories

AT_LEAST = 1000
"""So many are tried without more ado."""

of_each_case = pytest.mark.parametrize("case", CASES, ids=str)
pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("one_rank")]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Where nothing has to reach a disk: what would be lost is computed."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(prefix="crash-", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def histories(place: Path, request: pytest.FixtureRequest) -> Histories:
    # Who has chosen a few tests does not want to wait for what the others need.
    chosen = (getattr(each, "callspec", None) for each in request.session.items)
    cases = (each.params.get("case") for each in chosen if each is not None)
    # Other tests of the same run have cases of their own.
    return Histories(place / "recorded", {case.way for case in cases if isinstance(case, Case)})


@pytest.fixture(scope="module")
def tried() -> dict[str, set[object]]:
    """The keys of the points of each case that were tried, without those of earlier cases."""
    return {}


@pytest.fixture(scope="module")
def known() -> set[object]:
    """The keys of all points of the cases so far, tried or not."""
    return set()


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


IN_SEVERAL_ORDERS = [case for case in CASES if case.num_ranks > 1 and not case.way.has_writer]


@pytest.mark.parametrize("case", IN_SEVERAL_ORDERS, ids=str)
def test_no_order_has_a_rank_call_a_save_complete_before_it_was_published(
    case: Case, histories: Histories
) -> None:
    (history,) = histories.of(case)
    recorded = interleaving.History(history.operations)
    published: dict[int, int] = {}
    acknowledged: Counter[int] = Counter()
    for number, each in enumerate(history.operations):
        if each.kind is Kind.RENAME and (step := _published(each.path)):
            published[step] = number
        elif each.kind is Kind.NOTE and each.path == ACKNOWLEDGED:
            acknowledged[each.rank] += 1
            assert recorded.needs(number, published[int(each.target)]), each
    assert acknowledged[0] == acknowledged[1] >= 4


def _published(path: str) -> int:
    """The step of what is renamed from ``path`` when it is complete; 0 if it is nothing like that."""
    found = re.fullmatch(r"checkpoint/(?:tmp_step-(\d+)|step-(\d+)/\.metadata\.tmp)", path)
    return int(found[1] or found[2]) if found else 0


def test_both_ranks_note_each_meeting_and_all_kinds_occur(histories: Histories) -> None:
    kinds: Counter[str] = Counter()
    for case in IN_SEVERAL_ORDERS:
        (history,) = histories.of(case)
        met = [each for each in history.operations if each.path == MEET]
        of_ranks = [
            Counter((each.target, each.content) for each in met if each.rank == rank)
            for rank in range(2)
        ]
        assert of_ranks[0] == of_ranks[1], case
        kinds.update(each.target for each in met)
    assert set(kinds) == {"", TO_RANK_ZERO, FROM_RANK_ZERO}


def test_all_by_which_ranks_wait_for_each_other_is_noted() -> None:
    (folder,) = map(Path, checkpointer.__path__)
    sources = [path.read_text() for path in folder.rglob("*.py")]
    sources.append(inspect.getsource(torch.distributed.checkpoint.utils))
    called = {
        node.func.attr
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "dist"
    }
    waiting = re.compile("barrier|broadcast|gather|reduce|scatter|send|recv|all_to_all")
    assert {name for name in called if waiting.search(name)} <= set(DIRECTIONS)


@of_each_case
def test_a_start_after_a_crash_goes_on_from_what_was_promised(
    case: Case,
    histories: Histories,
    place: Path,
    num_points: int | None,
    tried: dict[str, set[object]],
    known: set[object],
    record_property: Callable[[str, object], None],
) -> None:
    points = histories.points_of(case, all_orders=num_points is None)
    gc.freeze()  # each check looks for garbage, and thousands of trees are none
    share = len(points) if num_points is None else math.ceil(num_points / len(CASES))
    found = {each.key: each for each in points}
    fresh = [each for key, each in found.items() if not any(key in keys for keys in tried.values())]
    chosen = evenly(fresh, share)
    record_property("crash_points", [str(case), len(chosen), len(found.keys() - known)])
    known |= found.keys()
    checker = Checker.of(case.way, place / "checked")
    for each in chosen:
        try:
            checker.check(each.point.tree, each.promises)
        except PromiseBrokenError as error:
            pytest.fail(f"{case}, {each.point}:\n{error}", pytrace=False)
    tried[str(case)] = {each.key for each in chosen}


def test_a_thousand_points_were_tried(
    tried: dict[str, set[object]], num_points: int | None
) -> None:
    if len(tried) < len(CASES) or (num_points is not None and num_points < AT_LEAST):
        pytest.skip("this was asked for some cases or few points only")
    assert len(set().union(*tried.values())) >= AT_LEAST
