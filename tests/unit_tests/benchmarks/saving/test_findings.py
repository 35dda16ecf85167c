"""From samples to what the tables say, on samples that were made up."""

import dataclasses
from typing import Any

import pytest
from benchmarks.harness.machine import Machine
from benchmarks.harness.page import Intervals
from benchmarks.harness.pairs import Verdict
from benchmarks.harness.results import Cell, Result
from benchmarks.saving.figures import figures
from benchmarks.saving.findings import Checks, Digests, Growths, Loads, METRICS, Saves
from benchmarks.saving.tables import document

MACHINE = Machine(
    cpu="Some CPU",
    num_cores=2,
    memory_gib=24.0,
    kernel="6.1",
    file_system="ext4",
    python="3.11",
    torch="2.13",
    torch_checkpointing="not installed",
).as_dict()
LIMITS = [{"copy": 0.1, "cached": 0.4, "direct": 0.5, "read": 0.05}]


def cycles(num: int, **values: float) -> list[dict[str, float]]:
    sample = {"call": 0.2, "wait": 0.1, "done": 0.8, "debt": 0.2, "lost": 0.4, "slow": 0.1}
    return [sample | values for _ in range(num)]


def rank(**manager: float) -> dict[str, Any]:
    memory = dict.fromkeys(("peak", "peak_own", "peak_shared", "peak_writer", "kept"), 500)
    return {
        "state_bytes": 1000,
        "limits": LIMITS,
        "quiet_step": [0.3] * 15,
        "cpu": [[1.0, 0.5, 1.2]],
        "first": {"library": cycles(6, call=3.0), "manager": cycles(6)},
        "memory": {"library": [memory] * 6, "manager": [memory] * 6},
        "idle": {"library": cycles(15), "manager": cycles(15, **manager)},
        "busy": {"library": cycles(15), "manager": cycles(15, **manager)},
        "written": {"library": [1500, 500], "manager": [1050, 1050]},
    }


def saves(*by_rank: dict[str, Any], case: str = "dcp-async") -> Result:
    cell = Cell(part="save", case=case, model="50M", ranks=len(by_rank))
    return Result(cell=cell, by_rank=list(by_rank), machine=MACHINE)


def loads(manager_seconds: float) -> Result:
    samples = {"library": [0.5] * 15, "manager": [manager_seconds] * 15}
    found: dict[str, Any] = {"state_bytes": 1000, "limits": LIMITS, "cpu": []}
    found["load"] = {"same": samples, "resharded": samples}
    cell = Cell(part="load", case="dcp", model="50M", ranks=1)
    return Result(cell=cell, by_rank=[found], machine=MACHINE)


def digests(case: str = "dcp-async", **with_digests: float) -> Result:
    found = rank()
    for key in ("idle", "busy"):
        found[key] = {"without": cycles(15), "with": cycles(15, **with_digests)}
    if case == "tc-sync":
        found["busy"] = {"without": [], "with": []}
    cell = Cell(part="digests", case=case, model="50M", ranks=1)
    return Result(cell=cell, by_rank=[found], machine=MACHINE)


def checks(size: float, full: float) -> Result:
    samples = {"off": [0.5] * 15, "size": [size] * 15, "full": [full] * 15}
    found: dict[str, Any] = {"state_bytes": 1000, "limits": LIMITS, "cpu": []}
    found["load"] = {"same": samples, "resharded": samples}
    cell = Cell(part="verify", case="tc", model="50M", ranks=1)
    return Result(cell=cell, by_rank=[found], machine=MACHINE)


def growths(per_save: float) -> Result:
    readings = [
        {"memory": 1e9 + number * per_save, "shared": 0.0, "descriptors": 20.0}
        for number in range(50)
    ]
    cell = Cell(part="growth", case="dcp-async", model="4M", ranks=1)
    by_rank = [{"readings": {"manager": readings}}]
    return Result(cell=cell, by_rank=by_rank, machine=MACHINE)


def test_the_slowest_rank_counts_and_what_is_not_synced_does() -> None:
    found = Saves(saves(rank(call=0.1), rank(call=0.4, debt=0.5)))
    assert found.median("manager", "blocked") == pytest.approx(0.5)
    assert found.median("manager", "durable") == pytest.approx(1.3)
    assert found.median("library", "blocked") == pytest.approx(0.3)
    assert found.first("library", METRICS["blocked"].of) == pytest.approx([3.1] * 6)


def test_the_limit_of_writing_is_the_faster_of_the_two_writes() -> None:
    found = Saves(saves(rank()))
    assert (found.limit("blocked"), found.limit("durable"), found.limit("slow")) == (0.1, 0.4, None)


def test_sizes_and_memory_are_told_over_the_state() -> None:
    found = Saves(saves(rank(), rank()))
    assert found.written_share("library") == found.written_share("manager") - 0.05 == 1.0
    assert (found.imbalance("library"), found.imbalance("manager")) == (1.5, 1.0)
    assert found.memory("manager", "peak") == [0.5] * 6
    assert found.memory("manager", "peak_own", "peak_shared") == [1.0] * 6


@pytest.mark.parametrize(
    ("call", "expected"), [(0.2, Verdict.MET), (0.21, Verdict.MET), (0.22, Verdict.MISSED)]
)
def test_a_manager_is_held_to_five_percent(call: float, expected: Verdict) -> None:
    comparison = Saves(saves(rank(call=call))).comparison("blocked")
    assert comparison is not None and comparison.verdict is expected
    assert comparison.difference.median == pytest.approx(call - 0.2)


def test_a_case_without_a_manager_or_without_a_background_is_compared_with_nothing() -> None:
    alone = rank()
    for key in ("idle", "busy", "first", "memory", "written"):
        del alone[key]["manager"]
    alone["busy"]["library"] = []
    found = Saves(saves(alone, case="tc-sync"))
    assert found.comparison("blocked") is None and found.median("library", "overlapped") is None
    assert "tc-sync" in document([saves(alone, case="tc-sync")])


def test_what_different_machines_have_measured_is_in_tables_of_their_own() -> None:
    other = dataclasses.replace(loads(0.6), machine=MACHINE | {"cpu": "Other CPU"})
    alone, text = document([saves(rank()), loads(0.5)]), document(
        [saves(rank()), other, loads(0.5)]
    )
    assert text.startswith(alone) and text[len(alone) :].startswith("\n\nMeasured on: Other CPU")
    assert document([other]) == text[len(alone) + 2 :]


def test_the_document_says_which_limits_were_missed_and_what_grows() -> None:
    results = [saves(rank(call=0.3)), loads(0.6), growths(1e6)]
    text = document(results)
    assert "- missed: 50M, 1 rank, save dcp-async, blocked, nothing to overlap" in text
    assert "- missed: 50M, 1 rank, load dcp, manager, resharded layout" in text
    assert "- grows: 4M, 1 rank, growth dcp-async, manager" in text
    assert "Some CPU, 2 cores" in text
    assert "- missed" not in document([saves(rank()), loads(0.5), growths(0.0)])


@pytest.mark.parametrize(
    ("done", "expected"), [(0.9, Verdict.MET), (0.91, Verdict.MISSED)], ids=["10 %", "11 %"]
)
def test_digests_may_cost_ten_percent_until_the_save_is_durable(
    done: float, expected: Verdict
) -> None:
    found = Digests(digests(done=done))
    for name in ("durable", "durable_beside"):
        comparison = found.comparison(name)
        assert comparison is not None and comparison.verdict is expected


def test_digests_may_not_be_seen_in_what_training_waits_for() -> None:
    for call, expected in ((0.2, Verdict.MET), (0.201, Verdict.MISSED)):
        comparison = Digests(digests(call=call)).comparison("overlapped")
        assert comparison is not None and comparison.verdict is expected
    noisy = digests()
    noisy.by_rank[0]["busy"]["with"] = cycles(7, call=0.1) + cycles(8, call=0.3)
    comparison = Digests(noisy).comparison("overlapped")
    assert comparison is not None and comparison.verdict is Verdict.UNCHANGED
    assert Digests(digests(case="tc-sync", call=9.0)).comparison("blocked") is None


def test_a_load_that_checks_is_held_to_the_limit_of_what_it_checks() -> None:
    met = Checks(checks(size=0.51, full=0.625)).comparisons("same")
    missed = Checks(checks(size=0.52, full=0.63)).comparisons("resharded")
    assert [one.verdict for one in met.values()] == [Verdict.MET, Verdict.MET]
    assert [one.verdict for one in missed.values()] == [Verdict.MISSED, Verdict.MISSED]
    text = document([checks(size=0.52, full=0.5), digests(done=2.0)])
    assert "- missed: 50M, 1 rank, verify tc, size, same layout" in text
    assert "- missed: 50M, 1 rank, digests dcp-async, durable, nothing beside it" in text
    assert "8 comparisons with a limit: 4 met, 4 missed." in text
    assert "verify full, limit 1.25" in text and "| as many ranks | 0.50 s" in text


def test_every_comparison_is_drawn_with_its_interval() -> None:
    results = [saves(rank()), loads(0.5), growths(0.0), digests(), checks(0.5, 0.6)]
    drawn = figures(results)
    assert {
        figure.title: (figure.limit, len(figure.values))
        for figure in drawn
        if isinstance(figure, Intervals)
    } == {
        "Manager over library, limit 1.05": (1.05, 4 + 2),
        "Saves with digests over without, limit 1.00": (1.0, 2),
        "Saves with digests over without, limit 1.10": (1.1, 2),
        "Loads that check over loads that do not, limit 1.25": (1.25, 2),
        "Loads that check over loads that do not, limit 1.02": (1.02, 2),
    }
    assert drawn[-1].title == "Change of memory over many saves"


def test_loads_and_growth_are_told_by_layout_and_by_kind() -> None:
    assert Loads(loads(0.6)).median("manager", "resharded") == 0.6
    found = Growths(growths(1e6))
    assert found.growth("manager", "memory").grows
    assert not found.growth("manager", "descriptors").grows
