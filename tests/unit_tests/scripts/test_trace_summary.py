"""The summary of a run says where the time went, per rank, per start and in all."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import trace_summary

from tests.unit_tests.observability.written import Rank, two_starts
from tests.unit_tests.structure.sources import ROOT


def printed(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    trace_summary.main([str(folder), *options])
    return capsys.readouterr().out


def row(text: str, part: str) -> list[str]:
    """The cells of the only row of ``part``."""
    (line,) = re.findall(rf"^  {re.escape(part)}  +(.*)$", text, re.MULTILINE)
    return re.split(r"  +", line)


def test_each_start_and_all_together(tmp_path: Path, capsys) -> None:
    two_starts(tmp_path)
    text = printed(tmp_path, capsys)
    first, second, together = re.split(r"\n\n(?:start 2|all starts)", text)
    assert text.startswith(f"{tmp_path}: 2 starts, up to step 10\n")
    assert "2 ranks, steps 1 to 7, " in first
    assert "not closed; the last records are from step > checkpoint_save" in first
    assert row(first, "data") == ["1.40 s", "13.5%", "0.70 s", "2.10 s"]
    assert row(first, "forward and backward") == ["3.50 s", "33.7%", "3.50 s", "3.50 s"]
    assert row(first, "all") == ["10.40 s", "100.0%", "9.70 s", "11.10 s"]
    # Rank 1 begins 0.125 s later and loses 0.2 s more in each of 7 steps: 7 * 0.125 + 28 * 0.2.
    assert row(first, "(waiting for the last data)") == ["3.24 s", "31.1%", "6.47 s", "0.00 s"]
    assert "7 steps, 1.300 s each (median); slowest: step " in first
    assert "1 save: training waited 0.25 s, 2.00 s until they were durable, 48.0 MiB" in first
    assert "steps 5 to 10" in second and "closed in order" in second
    assert "1 save: " in second and "; 1 failed" in second
    assert row(second, "checkpoint load")[0] == "0.50 s"
    assert row(together, "data") == ["2.00 s", "10.8%"]
    assert "3 steps lost to restarts, which had taken 3.90 s" in together
    assert "between the starts: " in together
    assert "2 last lines cut off" in text and "damaged" not in text


def test_many_ranks_are_shown_by_the_least_and_the_most(tmp_path: Path, capsys) -> None:
    for rank in range(6):
        Rank(tmp_path, rank).train(range(1, 3), data=0.1 * (6 - rank))
    text = printed(tmp_path, capsys)
    assert row(text, "data")[2:] == ["0.20 s", "1.20 s", "0"]
    # Each rank has its batch 0.1 s before the rank to its left, and 0.2 s in the second step.
    waited = row(text, "(waiting for the last data)")
    assert waited == ["0.75 s", "27.8%", "0.00 s", "1.50 s", "5"]
    # The slowest rank makes the duration of a step.
    assert "2 steps, 1.600 s each (median); slowest: step 1 1.60 s; step 2 1.60 s" in text
    assert row(printed(tmp_path, capsys, "--all-ranks"), "data")[2:] == [
        f"{0.2 * (6 - rank):.2f} s" for rank in range(6)
    ]


def test_a_run_that_never_began_and_damaged_lines_are_told(tmp_path: Path, capsys) -> None:
    log = Rank(tmp_path)
    log.damage()
    log.now += 1
    log.end()
    text = printed(tmp_path, capsys, "--trace", str(tmp_path / "trace.json"))
    assert "torch_distributed_teardown" in (tmp_path / "trace.json").read_text()
    assert "1 start, no step was finished" in text and row(text, "start-up")[0] == "1.00 s"
    assert "2 damaged lines passed over" in text


def test_a_trace_that_cannot_be_written_is_refused(tmp_path: Path, capsys) -> None:
    Rank(tmp_path).train(range(1, 3))
    with pytest.raises(SystemExit) as stop:
        trace_summary.main([str(tmp_path), "--trace", str(tmp_path / "no" / "trace.json")])
    assert stop.value.code == 2
    assert re.search("cannot be written to .*trace.json: .*--trace", capsys.readouterr().err)


def test_it_runs_from_anywhere_with_nothing_but_python(tmp_path: Path) -> None:
    two_starts(tmp_path)
    # -I: no PYTHONPATH, no current folder; -S: no installed package.
    command = [sys.executable, "-I", "-S", str(ROOT / "scripts" / "trace_summary.py")]
    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "start 2 of 2" in done.stdout, done.stderr
    missing = subprocess.run([*command, str(tmp_path / "no")], capture_output=True, text=True)
    assert missing.returncode == 2 and "Name the --dump_folder" in missing.stderr
