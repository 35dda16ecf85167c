"""The limits of asynchronous saves through torch_checkpointing, on samples that were made up."""

import dataclasses
from typing import Any

import pytest
from benchmarks.harness.pairs import Verdict
from benchmarks.saving.aims import aims_of
from benchmarks.saving.findings import Loads, Saves
from benchmarks.saving.tables import document

from tests.unit_tests.benchmarks.saving.test_findings import cycles, loads, rank, saves

# In one copy, which takes 0.1 s, everything is just what it may be.
KEEPS = {"call": 0.005, "wait": 0.215, "done": 0.8, "debt": 0.0}
BESIDE = KEEPS | {"wait": 0.001}


def a_rank(**changes: Any) -> dict[str, Any]:
    found = rank()
    found["idle"]["manager"] = cycles(15, **(KEEPS | changes))
    found["busy"]["manager"] = cycles(15, **(BESIDE | changes))
    found["first"]["manager"] = cycles(6, **(KEEPS | {"wait": 0.325} | changes))
    memory = found["memory"]["manager"][0] | {"peak_own": 90, "peak_shared": 1010}
    found["memory"]["manager"] = [dict(memory) for _ in range(6)]
    return found


def verdicts(found: dict[str, Any]) -> list[bool]:
    found_of_each = [aim.verdict for aim in aims_of(Saves(saves(found, case="tc-async")))]
    assert set(found_of_each) <= {Verdict.MET, Verdict.MISSED}
    return [each is Verdict.MET for each in found_of_each]


def test_what_keeps_to_all_limits_meets_them() -> None:
    assert verdicts(a_rank()) == [True] * 6


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"call": 0.006, "wait": 0.0}, [0]),
        ({"wait": 0.002, "call": 0.0}, [1]),
        ({"wait": 0.22, "call": 0.001}, [1, 2]),
        ({"done": 1.16, "wait": 0.0}, [4]),
    ],
)
def test_each_limit_is_of_its_own_time(changes: dict[str, float], missed: list[int]) -> None:
    assert [number for number, is_met in enumerate(verdicts(a_rank(**changes))) if not is_met] == (
        missed
    )


def test_first_saves_and_their_memory_miss_a_limit_if_all_do() -> None:
    slow, large = a_rank(), a_rank()
    slow["first"]["manager"] = cycles(6, **(KEEPS | {"wait": 0.33}))
    for each in large["memory"]["manager"]:
        each["peak_shared"] = 1020
    assert verdicts(slow) == [True, True, True, False, True, True]
    assert verdicts(large) == [True, True, True, True, True, False]
    slow["first"]["manager"][0]["wait"] = 0.1
    large["memory"]["manager"][0]["peak_shared"] = 1000
    aims = [aims_of(Saves(saves(each, case="tc-async"))) for each in (slow, large)]
    assert aims[0][3].verdict is aims[1][5].verdict is Verdict.OPEN


def test_the_document_has_the_limits_and_what_was_missed() -> None:
    text = document([saves(a_rank(call=0.02), case="tc-async"), saves(rank())])
    assert "| save() itself, in copies: 0.05 |" in text and "0.200 [0.200, 0.200] missed" in text
    assert "- missed: 50M, 1 rank, save tc-async, save() itself, in copies, limit 0.05" in text


def test_a_load_is_compared_with_the_faster_way_of_the_library() -> None:
    result = loads(0.55)
    result = dataclasses.replace(result, cell=dataclasses.replace(result.cell, case="tc"))
    by_side = result.by_rank[0]["load"]["same"]
    assert Loads(result).comparisons("same")["manager"].verdict is Verdict.MET
    by_side["library, by pieces"] = [0.4] * 15
    assert Loads(result).comparisons("same")["manager"].verdict is Verdict.MISSED
    by_side["library, by pieces"] = [0.6] * 15
    assert Loads(result).comparisons("same")["manager"].verdict is Verdict.MET
