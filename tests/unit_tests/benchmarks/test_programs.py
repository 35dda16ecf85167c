"""The programs run from beginning to end on a tiny model, and leave results and nothing else."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import checkpoint, train_step
from benchmarks.checkpoint import CheckpointOptions
from benchmarks.harness.errors import RefusedError
from benchmarks.harness.program import DOCS
from benchmarks.harness.ranks import ROOT
from benchmarks.train_step import StepOptions

from tests.ranks.processes import await_end

pytestmark = [pytest.mark.slow, pytest.mark.ranks]


def test_every_part_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = CheckpointOptions(
        model=("tiny",),
        ranks=(2,),
        parts=checkpoint.PARTS,
        cases=("dcp-async",),
        pairs=2,
        growth_model="tiny",
        growth_saves=5,
        warm_up_seconds=0.0,
        first_saves=2,
        output=tmp_path / "out",
    )
    assert checkpoint.work(options) == 0
    cell = "tiny-2-dcp-async.json"
    names = {f"save-{cell}", f"growth-{cell}", f"digests-{cell}", "tables.md", "page.html"}
    names |= {"load-tiny-2-dcp.json", "verify-tiny-2-dcp.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for rank in json.loads((tmp_path / "out" / f"save-{cell}").read_text())["by_rank"]:
        for kind in ("idle", "busy", "first", "memory"):
            assert {side: len(done) for side, done in rank[kind].items()} == {
                "library": 2,
                "manager": 2,
            }
    page = (tmp_path / "out/page.html").read_text()
    assert "Plotly.newPlot" in page and "<script src=" not in page
    told = capsys.readouterr()
    assert "14 comparisons with a limit: 14 too few pairs." in told.out
    assert "[5/5] tiny, 2 ranks, growth dcp-async: done" in told.err
    # A report measures nothing.
    assert checkpoint.work(CheckpointOptions(output=tmp_path / "out", report=True)) == 0
    assert capsys.readouterr().out == told.out


def test_steps_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = StepOptions(model=("tiny",), ranks=(1,), pairs=2, steps=2, output=tmp_path / "out")
    assert train_step.work(options) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "step-tiny-1-trainer.json",
        "tables.md",
        "page.html",
    }
    assert "| tiny, 1 rank | 64               | 2 pairs |" in capsys.readouterr().out


def test_what_does_not_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    options = CheckpointOptions(ranks=(10_000,), output=tmp_path / "out")
    with pytest.raises(RefusedError, match="Measuring 50M, 10000 ranks, save .* needs .* GiB"):
        checkpoint.work(options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_signal_ends_all_that_was_started(tmp_path: Path, number: int, code: int) -> None:
    mark = ("TEST_OF_SIGNALS", f"{tmp_path.name}-{number}")
    program = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.checkpoint", "--model", "tiny", "--ranks", "1"]
        + ["--cases", "dcp-pinned", "--pairs", "10000", "--output", str(tmp_path)]
        + ["--first-saves", "1"],
        cwd=ROOT,
        env=os.environ | dict([mark]),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stderr is not None
    for line in program.stderr:
        if "first saves: manager" in line:
            break
    started = sorted(marked_with("=".join(mark)) - {program.pid})
    assert len(started) >= 2  # the rank, and the process that the library writes in
    program.send_signal(number)
    rest = program.communicate(timeout=60)[1]
    assert program.returncode == code
    await_end(started)
    while late := marked_with("=".join(mark)):  # begun since, and about to notice
        await_end(sorted(late))
    if number == signal.SIGINT:
        assert "Stopped; what was measured to its end is kept." in rest
        assert "Traceback" not in rest
        assert not list(tmp_path.iterdir())


def marked_with(variable: str) -> set[int]:
    """The processes that have ``variable`` in their environment."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize("region", [checkpoint.REGION, train_step.REGION])
def test_the_page_of_the_docs_has_a_region_for_the_tables(region: str) -> None:
    assert f"<!-- measured: {region} -->\n" in DOCS.read_text()
