"""Write one HTML page about a run, which any browser shows without a network.

    python scripts/report.py outputs        # writes outputs/report.html

The page has the curves of loss, learning rate and throughput, where the time went, and the saves. All of
it comes from the structured logs that every run writes. Without these, the curves are those of
TensorBoard. Needs the package plotly.

    structured logs, else TensorBoard -> Material -> report_figures -> page
"""

import argparse
import html
import importlib.util
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# So that it runs from a clone in which nothing is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan.observability.run_log import read_run, Run, Save  # noqa: E402 (as above)

from scripts.wording import counted  # noqa: E402 (the path comes first)

_LOSS, _VALIDATION = "loss_metrics/global_avg_loss", "validation_metrics/loss"
_TPS, _MFU = "throughput(tps)", "mfu(%)"
_MEMORY = {"of the device": "memory/max_reserved(GiB)", "in RAM": "memory/resident(GiB)"}
_NO_PLOTLY = (
    "the report needs the package plotly, which is not installed for {python}. Install it with "
    "`{python} -m pip install plotly`, or use the Python that runs the tests: "
    ".venv/bin/python after ./run_tests.sh."
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Material:
    """What a run left behind."""

    run: Run
    """Without starts if there are no structured logs."""

    curves: dict[str, dict[int, float]]
    """Values by name and step."""

    source: str


def collect(folder: Path) -> Material:
    """What there is in ``folder``.

    Raises ``FileNotFoundError`` if that is nothing.
    """
    try:
        run = read_run(folder)
    except FileNotFoundError as error:
        run, missing = Run(folder=folder, starts=[]), error
    else:
        missing = None
    curves = {name: run.curve(name) for name in run.names()}
    if _LOSS in curves:
        return Material(run=run, curves=curves, source="the structured logs")
    curves = {**_tensorboard_curves(folder), **curves}
    if not curves and missing is not None:
        raise missing
    return Material(run=run, curves=curves, source="TensorBoard's files")


def _tensorboard_curves(folder: Path) -> dict[str, dict[int, float]]:
    files = sorted(folder.rglob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)
    if not files or importlib.util.find_spec("tensorboard") is None:
        return {}
    # Late: only runs without structured logs need it.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(files[-1].parent), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.scalars.Keys()
    }


def page(material: Material) -> str:
    """The whole HTML page."""
    # Late: the command line has to say first what is missing.
    from plotly.offline import get_plotlyjs

    parts = [f'<div class="figure {width}">{each}</div>' for width, each in _figures(material)]
    cards = "".join(
        f'<div class="card"><div class="label">{label}</div><div class="value">{value}</div>'
        f'<div class="note">{note}</div></div>'
        for label, value, note in _cards(material)
    )
    name = html.escape(str(material.run.folder.resolve()))
    written = time.strftime("%Y-%m-%d %H:%M")
    body = (
        f"<header><h1>Training run</h1><p><code>{name}</code>, from {material.source}, written "
        f'{written}</p></header><section class="cards">{cards}</section>'
        f'<section class="figures">{"".join(parts)}{_saves_table(material.run.saves())}</section>'
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # An icon of its own, or the browser asks for one.
        '<link rel="icon" href="data:,">'
        f"<title>{name}</title><style>{_STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body><main>{body}</main></body></html>\n"
    )


def _figures(material: Material) -> Iterator[tuple[str, str]]:
    """How wide each figure is, and its HTML."""
    # Late, as above.
    from scripts import report_figures

    curves, starts = material.curves, material.run.starts
    # Of starts that went on after the same step, the last one is the one whose curve is drawn.
    numbers = {start.resumed_after: number for number, start in enumerate(starts, start=1)}
    marks: dict[str, Any] = {"resumed": {s: n for s, n in numbers.items() if s and n > 1}}
    rates = {name[3:]: curve for name, curve in curves.items() if name.startswith("lr/")}
    losses = {"training": curves.get(_LOSS, {}), "validation": curves.get(_VALIDATION, {})}
    memory = {label: curves.get(name, {}) for label, name in _MEMORY.items()}
    draw, from_zero = report_figures.curves, marks | {"from_zero": True}
    figures: list[tuple[str, Any]] = [
        ("whole", draw("Loss", "cross entropy", losses, **marks, height=360)),
        ("half", draw("Learning rate", "", rates, **marks)),
        ("half", draw("Throughput", "tokens/s of a rank", {"": curves.get(_TPS, {})}, **from_zero)),
        ("half", draw("Gradient norm", "", {"": curves.get("grad_norm", {})}, **marks)),
        ("half", draw("Memory", "GiB of a rank", memory, **from_zero)),
        ("whole", report_figures.time_use(starts)),
        ("whole", report_figures.saves_timeline(material.run)),
    ]
    options = {
        "displaylogo": False,
        "responsive": True,
        # On by default: a button that uploads the chart to the makers of plotly.
        "showSendToCloud": False,
        "plotlyServerURL": "",
        "modeBarButtonsToRemove": ["lasso2d", "select2d", "autoScale2d"],
    }
    for width, figure in figures:
        if figure is not None:
            yield width, figure.to_html(full_html=False, include_plotlyjs=False, config=options)


def _cards(material: Material) -> Iterator[tuple[str, str, str]]:
    curves, starts = material.curves, material.run.starts
    for label, name in (("Training loss", _LOSS), ("Validation loss", _VALIDATION)):
        if curve := curves.get(name):
            step = max(curve)
            yield label, f"{curve[step]:.4f}", f"at step {step:,}"
    if curve := curves.get(_TPS):
        note = "tokens/s of a rank, median"
        if peak_share := curves.get(_MFU):
            note += f"; MFU {statistics.median(peak_share.values()):.1f}%"
        yield "Throughput", f"{statistics.median(curve.values()):,.0f}", note
    if starts:
        seconds = sum(start.end - start.begin for start in starts)
        ranks = len(starts[-1].ranks)
        yield "At work", _duration(
            seconds
        ), f"{counted(len(starts), 'start')}, {counted(ranks, 'rank')}"
        num_lost, lost_seconds = material.run.lost_steps()
        if num_lost:
            yield "Lost to restarts", counted(
                num_lost, "step"
            ), f"{_duration(lost_seconds)} of work"
    done = [save for save in material.run.saves() if not save.failed]
    if done:
        waited = sum(save.blocked_seconds or 0.0 for save in done)
        yield "Checkpoints", str(len(done)), f"training waited {waited:.2f} s in all"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _saves_table(saves: Sequence[Save]) -> str:
    if not saves:
        return ""

    def cell(value: float | None, unit: str) -> str:
        return f"<td>{'' if value is None else f'{value:.2f} {unit}'}</td>"

    rows = "".join(
        f"<tr{' class=failed' if save.failed else ''}><td>{save.step:,}</td>"
        f"<td>{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(save.reported_at))}</td>"
        f"<td>{'failed' if save.failed else 'durable'}</td>{cell(save.blocked_seconds, 's')}"
        f"{cell(save.durable_seconds, 's')}{cell(save.size_mebibytes, 'MiB')}</tr>"
        for save in saves
    )
    return (
        f'<details class="figure whole"><summary>All {len(saves)} saves</summary><table><thead><tr>'
        "<th>step</th><th>time</th><th></th><th>training waited</th><th>until durable</th>"
        f"<th>size</th></tr></thead><tbody>{rows}</tbody></table></details>"
    )


_STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f1f5f9; color: #0f172a;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0; letter-spacing: -0.01em; }
header p { margin: 4px 0 20px; color: #64748b; }
code { color: #334155; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 14px; }
.card, .figure { background: #fff; border: 1px solid #e2e8f0; border-radius: 10px; }
.card { padding: 14px 16px; }
.label { color: #64748b; font-size: 13px; }
.value { font-size: 24px; font-weight: 600; letter-spacing: -0.02em; }
.note { color: #64748b; font-size: 12px; }
.figures { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; margin-top: 16px; }
.figure { padding: 10px 14px; min-width: 0; grid-column: span 2; }
@media (min-width: 900px) { .half { grid-column: span 1; } }
summary { cursor: pointer; font-weight: 600; padding: 4px 2px; }
table { border-collapse: collapse; width: 100%; margin: 8px 0; font-size: 14px; }
th { text-align: right; font-weight: 500; color: #64748b; border-bottom: 1px solid #e2e8f0; }
td { text-align: right; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; }
th:first-child, td:first-child { text-align: left; }
tr.failed { color: #dc2626; }
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run_folder", type=Path, help="the --dump_folder of the run")
    parser.add_argument(
        "--output", type=Path, help="the page to write (default: report.html in the run folder)"
    )
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("plotly") is None:
        parser.error(_NO_PLOTLY.format(python=sys.executable))
    try:
        material = collect(options.run_folder)
    except FileNotFoundError as error:
        parser.error(str(error))
    output = options.output or options.run_folder / "report.html"
    try:
        output.write_text(page(material), encoding="utf-8")
    except OSError as error:
        parser.error(
            f"the page cannot be written to {output}: {error}. Name another place with --output."
        )
    print(f"Wrote {output} ({output.stat().st_size / 2**20:.1f} MiB)")


if __name__ == "__main__":
    main()
