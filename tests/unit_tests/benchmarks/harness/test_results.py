"""Raw samples survive the way to the disk and back, and tables look the same everywhere."""

import json
from pathlib import Path

import pytest
from benchmarks.harness import docs, results
from benchmarks.harness.errors import RefusedError
from benchmarks.harness.pairs import Estimate
from benchmarks.harness.results import Cell, Result, slowest
from benchmarks.harness.table import mebibytes, multiple, ratio, seconds, table, timed


def result(model: str = "50M", ranks: int = 2, case: str = "a", **rank: object) -> Result:
    cell = Cell(part="save", case=case, model=model, ranks=ranks)
    return Result(cell=cell, by_rank=[rank] * ranks, machine={"num_cores": 2})


def test_results_come_back_in_the_order_of_the_tables_and_a_new_one_replaces(
    tmp_path: Path,
) -> None:
    for one in (result("300M"), result("50M", 4), result("50M", 1), result("50M", 4, x=[1.5])):
        results.write(one, tmp_path)
    found = results.read_all(tmp_path, ["save", "load"])
    assert [(one.cell.model, one.cell.ranks) for one in found] == [
        ("50M", 1),
        ("50M", 4),
        ("300M", 2),
    ]
    assert found[1] == result("50M", 4, x=[1.5])
    assert len(list(tmp_path.iterdir())) == 3


def test_results_of_another_version_are_refused_by_name(tmp_path: Path) -> None:
    path = results.write(result(), tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 0}))
    with pytest.raises(RefusedError, match="save-50M-2-a.json is of another version"):
        results.read_all(tmp_path, ["save"])


def test_the_share_of_others_leaves_out_what_the_ranks_used() -> None:
    # Four seconds on two cores: 6 s of CPU were used, 2 x 2 of them by the ranks.
    one = result(cpu=[[4.0, 2.0, 6.0]])
    assert one.foreign_share(2) == pytest.approx(2 / 8)
    assert result().foreign_share(2) is None


def test_a_sample_is_that_of_the_slowest_rank() -> None:
    assert slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]


def test_numbers_are_told_in_units_that_can_be_read() -> None:
    assert [seconds(value) for value in (0.00123, 0.0994, 0.1, 12.5, -0.02, None)] == [
        "1.2 ms",
        "99 ms",
        "0.10 s",
        "12.50 s",
        "-20 ms",
        "-",
    ]
    assert [multiple(2.0, 1.0), multiple(20.0, 1.0), multiple(1.0, None)] == ["2.0x", "20x", "-"]
    assert timed(0.5, 0.25) == "0.50 s, 2.0x"
    assert mebibytes(-(2**19)) == "-0.5 MiB"
    assert ratio(Estimate(median=1.0, low=0.9, high=1.2, num=15)) == "1.000 [0.900, 1.200]"
    assert ratio(Estimate(median=1.0, low=None, high=None, num=2)) == "1.000"


def test_a_table_is_aligned_and_is_markdown() -> None:
    assert table(["a", "bbb"], [["long", "c"]]).splitlines() == [
        "| a    | bbb |",
        "| ---- | --- |",
        "| long | c   |",
    ]


def test_only_the_region_of_a_page_is_written_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- measured: x -->\nold\n<!-- end of measured: x -->\nafter\n")
    docs.replace_region(page, "x", "new\n")
    docs.replace_region(page, "x", "newer")
    expected = "before\n<!-- measured: x -->\n\nnewer\n\n<!-- end of measured: x -->\nafter\n"
    assert page.read_text() == expected
    with pytest.raises(RefusedError, match="should have one region 'y'"):
        docs.replace_region(page, "y", "new")
