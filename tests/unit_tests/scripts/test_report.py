"""The report is one page that draws what a run did, in a real browser, without a network."""

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest
from scripts import report
from torch.utils.tensorboard import SummaryWriter

from tests.unit_tests.observability.written import Rank, two_starts
from tests.unit_tests.scripts.browser import needs_browser, show

TITLES = ["Loss", "Learning rate", "Throughput", "Where the time went", "Checkpoints"]


def write(folder: Path, *options: str) -> str:
    report.main([str(folder), *options])
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    two_starts(folder)
    write(folder)
    return folder


def without_scripts(text: str) -> str:
    return re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


@needs_browser
def test_a_browser_draws_every_figure_and_finds_no_fault(run_folder: Path) -> None:
    shown = show(run_folder / "report.html")
    assert not shown.console
    body = shown.dom[shown.dom.rindex("<body") :]
    assert re.findall(r'class="gtitle"[^>]*>([^<]+)<', body) == TITLES
    # Ten steps each of loss, learning rate and throughput; three values of two saves, one failure.
    assert len(re.findall(r'<path class="point"[^>]* d="M[^"]+"', body)) == 3 * 10 + 3 * 2 + 1
    # Their lines, and a stem for each value of the saves.
    assert len(re.findall(r'<path class="js-line"[^>]* d="M[^"]+"', body)) == 3 + 3 * 2
    bars = re.findall(r'<g class="point"><path d="M[^"]+"', body)
    assert len(bars) >= 2 * 5
    for text in ("start 2", "until durable", "training waited", "failed", "forward and backward"):
        assert f">{text}<" in body
    # plotly offers to upload the charts, unless it is told not to.
    assert "Share" not in "".join(re.findall(r'data-title="[^"]*"', body))


@needs_browser
def test_the_browser_would_have_told_of_a_fault(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<script>undefined_name()</script>")
    (line,) = show(page).console
    assert "undefined_name is not defined" in line


def test_the_page_needs_no_other_file(run_folder: Path) -> None:
    text = (run_folder / "report.html").read_text()
    assert "http" not in without_scripts(text)
    assert not re.search(r"<script[^>]+src=", text)
    assert len(text) < 8e6


def test_the_cards_and_the_table_say_what_happened(run_folder: Path) -> None:
    text = re.sub(r"<[^>]+>", "|", without_scripts((run_folder / "report.html").read_text()))
    cells = [cell for cell in text.split("|") if cell.strip()]
    for expected in (
        ["Training loss", "10.5000", "at step 10"],
        ["Throughput", "100", "tokens/s of a rank, median"],
        ["At work", "19 s", "2 starts, 2 ranks"],
        ["Lost to restarts", "3 steps", "4 s of work"],
        ["Checkpoints", "2", "training waited 1.75 s in all"],
        ["durable", "0.25 s", "2.00 s", "48.00 MiB"],
    ):
        place = cells.index(expected[0])
        assert cells[place : place + len(expected)] == expected
    assert cells.count("failed") == 1


def test_the_later_start_is_the_one_that_is_drawn(run_folder: Path) -> None:
    text = (run_folder / "report.html").read_text()
    values = [n + 0.5 * (n > 4) for n in range(1, 11)]
    assert re.search(r'"y":\[' + ",".join(f"{v:.1f}" for v in values) + r"\]", text)


def test_without_structured_logs_the_curves_come_from_tensorboard(tmp_path: Path) -> None:
    # The folder written to last is that of the newest curves, whatever its name.
    for age_seconds, name, loss in ((100, "b", 1.5), (0, "a", 7.25), (50, "c", 3.5)):
        writer = SummaryWriter(str(tmp_path / "tb" / name))
        for step in (1, 2):
            writer.add_scalar("loss_metrics/global_avg_loss", loss, step)
        writer.close()
        (file,) = (tmp_path / "tb" / name).iterdir()
        os.utime(file, (1.7e9 - age_seconds,) * 2)
    text = write(tmp_path)
    assert "TensorBoard&#x27;s files" in text or "TensorBoard's files" in text
    assert "7.25" in text and "Checkpoints" not in without_scripts(text)
    material = report.collect(tmp_path)
    assert material.curves == {"loss_metrics/global_avg_loss": {1: 7.25, 2: 7.25}}


def test_a_run_that_logged_nothing_yet_has_a_page(tmp_path: Path) -> None:
    log = Rank(tmp_path)
    log.now += 1
    log.end()
    assert "Where the time went" in write(tmp_path)


def test_a_start_keeps_its_number_where_others_have_no_line(tmp_path: Path) -> None:
    Rank(tmp_path, at=1000).train(range(1, 5))
    Rank(tmp_path, at=1100)  # failed before its first step
    Rank(tmp_path, at=1200).train(range(4, 9))
    Rank(tmp_path, at=1300).train(range(4, 9))  # from the same checkpoint once more
    starts = report.collect(tmp_path).run.starts
    assert [start.resumed_after for start in starts] == [0, None, 3, 3]
    assert set(re.findall(r'"text":"(start \d+)"', write(tmp_path))) == {"start 4"}


def test_names_of_more_starts_than_have_room_are_left_out(tmp_path: Path) -> None:
    for number in range(12):
        log = Rank(tmp_path, at=1000 + 100 * number)
        log.train(range(10 * number + 1, 10 * number + 3))
        log.save(10 * number + 2, durable=1.0)
    assert '"text":"start' not in write(tmp_path)


def test_the_name_of_the_folder_is_no_markup(tmp_path: Path) -> None:
    folder = tmp_path / "<b>run"
    two_starts(folder)
    output = tmp_path / "page.html"
    report.main([str(folder), "--output", str(output)])
    assert "<b>run" not in output.read_text() and "&lt;b&gt;run" in output.read_text()


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        report.main(list(arguments))
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert "Name the --dump_folder of a run" in refusal(capsys, str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path, capsys: Any) -> None:
    two_starts(tmp_path)
    text = refusal(capsys, str(tmp_path), "--output", str(tmp_path / "no" / "page.html"))
    assert "cannot be written" in text and "--output" in text


def test_a_missing_plotly_is_named(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "plotly" else found(name)
    )
    assert "pip install plotly" in refusal(capsys, str(tmp_path))
