"""The figures of a report: curves over steps, parts of the time, the timeline of the saves.

Each function takes plain values and returns a plotly figure, or None where there is nothing to draw.

    report.py (what a run left) -> figures -> report.py (one page)
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from torchtitan.observability.run_log import Run, Save, Start

Curve = Mapping[int, float]

BLUE, ORANGE, GREEN, PURPLE, GREY, RED = (
    "#2563eb",
    "#ea580c",
    "#059669",
    "#7c3aed",
    "#64748b",
    "#dc2626",
)
# A part keeps its colour from start to start and from report to report.
_PART_COLORS = {
    "forward and backward": BLUE,
    "update": "#93c5fd",
    "data": GREEN,
    "checkpoint save": ORANGE,
    "checkpoint wait": "#fdba74",
    "checkpoint load": "#fed7aa",
    "validation": PURPLE,
    "start-up": "#cbd5e1",
    "rest of the step": "#94a3b8",
    "outside of the steps": "#e2e8f0",
}
_OTHER_COLORS = ("#0891b2", "#ca8a04", "#be185d", "#4d7c0f", "#475569")
# More points than a screen has columns several times over; a browser draws no more in comfort.
_MAX_POINTS = 20_000
# More names than this beside each other cover one another.
_MAX_START_NAMES = 10
# A part below this share of the time would be a name in the legend and nothing to see.
_LEAST_SHARE = 0.0005


def curves(
    title: str,
    unit: str,
    named: Mapping[str, Curve],
    *,
    resumed: Mapping[int, int] | None = None,
    from_zero: bool = False,
    height: int = 300,
) -> go.Figure | None:
    """Curves over the steps; ``resumed`` has the number of each start, by the step it went on after."""
    drawn = {name: curve for name, curve in named.items() if curve}
    if not drawn:
        return None
    figure = go.Figure()
    for (name, curve), color in zip(
        drawn.items(), (BLUE, ORANGE, GREEN, PURPLE, *_OTHER_COLORS), strict=False
    ):
        steps = list(curve)[:: 1 + len(curve) // _MAX_POINTS]
        figure.add_scatter(
            x=steps,
            y=[curve[step] for step in steps],
            name=name,
            # A line through few points hides how few they are.
            mode="lines+markers" if len(steps) <= 60 else "lines",
            line={"color": color, "width": 2},
            marker={"size": 5},
            hovertemplate="step %{x}<br>%{y:.5g}<extra>" + name + "</extra>",
        )
    style = {"color": GREY, "width": 1, "dash": "dot"}
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": style}
    names = {number: step for step, number in (resumed or {}).items()}
    figure.update_layout(
        shapes=[{**line, "x0": step, "x1": step} for step in names.values()],
        annotations=_start_names(names, yref="paper", yanchor="bottom"),
    )
    figure.update_xaxes(title="step")
    figure.update_yaxes(title=unit, rangemode="tozero" if from_zero else "normal")
    return _styled(figure, title, height=height)


def time_use(starts: Sequence[Start]) -> go.Figure | None:
    """One bar a start, cut into what its time went to."""
    seconds = {
        part: [start.mean_seconds(part) for start in starts]
        for part in dict.fromkeys(part for start in starts for part in start.parts())
    }
    whole = sum(sum(each) for each in seconds.values())
    order = sorted(seconds, key=lambda part: -sum(seconds[part]))
    order = [part for part in order if sum(seconds[part]) > _LEAST_SHARE * whole]
    if not order:
        return None
    labels = [f"start {number}" for number in range(1, len(starts) + 1)]
    others = iter(_OTHER_COLORS * len(order))
    figure = go.Figure()
    for part in order:
        figure.add_bar(
            x=seconds[part],
            y=labels,
            name=part,
            orientation="h",
            marker={"color": _PART_COLORS.get(part) or next(others)},
            hovertemplate="%{y}: %{x:.2f} s<extra>" + part + "</extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="seconds, mean over the ranks")
    # The legend lists the parts beside the bars, however few these are.
    bar_height = max(min(44, 700 // len(labels)), 16)
    height = max(130 + bar_height * len(labels), 150 + 21 * len(order))
    figure = _styled(figure, "Where the time went", height=height)
    return figure.update_layout(
        legend={"orientation": "v", "x": 1.01, "xanchor": "left", "y": 1, "yanchor": "top"},
        legend_traceorder="normal",
    )


def saves_timeline(run: Run) -> go.Figure | None:
    """For each save: how long training waited, how long until it was durable, how large it is."""
    saves = run.saves()
    if not saves:
        return None
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, row_heights=[0.64, 0.36], vertical_spacing=0.08
    )
    done = [save for save in saves if not save.failed]
    _add_stems(figure, done, "durable_seconds", "until durable", "#93c5fd", 7, row=1)
    _add_stems(figure, done, "blocked_seconds", "training waited", ORANGE, 4, row=1)
    _add_stems(figure, done, "size_mebibytes", "size", GREY, 4, row=2)
    failed = [save for save in saves if save.failed]
    if failed:
        figure.add_scatter(
            x=[_clock(save.reported_at) for save in failed],
            y=[0] * len(failed),
            name="failed",
            mode="markers",
            marker={"color": RED, "size": 12, "symbol": "x"},
            text=[f"step {save.step}" for save in failed],
            hovertemplate="%{text}<extra>failed</extra>",
            row=1,
            col=1,
        )
    _shade(figure, run.starts)
    figure.update_yaxes(title="seconds", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="MiB", rangemode="tozero", row=2, col=1)
    return _styled(figure, "Checkpoints", height=440)


def _shade(figure: go.Figure, starts: Sequence[Start]) -> None:
    """A grey band in both rows of ``figure`` for the time of each start."""
    band = {"type": "rect", "y0": 0, "y1": 1, "fillcolor": GREY, "opacity": 0.07, "line_width": 0}
    figure.update_layout(
        # All at once: plotly takes seconds to add some dozens one after the other.
        shapes=[
            {**band, "x0": _clock(s.begin), "x1": _clock(s.end), "xref": f"x{row}", "yref": yref}
            for s in starts
            for row, yref in (("", "y domain"), ("2", "y2 domain"))
        ],
        annotations=_start_names(
            {number: _clock(start.begin) for number, start in enumerate(starts, start=1)},
            yref="y domain",
            yanchor="top",
        ),
    )


def _start_names(places: Mapping[int, Any], **keywords: str) -> list[dict[str, Any]]:
    """The name of each start at its place on the x axis, as far as they have room."""
    if len(places) > _MAX_START_NAMES:
        return []
    style = {"y": 1.0, "showarrow": False, "xanchor": "left", "font": {"size": 11, "color": GREY}}
    return [
        {"x": x, "text": f"start {number}", **style, **keywords} for number, x in places.items()
    ]


def _add_stems(
    figure: go.Figure,
    saves: Sequence[Save],
    attribute: str,
    name: str,
    color: str,
    width: int,
    *,
    row: int,
) -> None:
    """A line from 0 to the value of each save, with a dot on top; visible at any scale of time."""
    values = [(save, getattr(save, attribute)) for save in saves]
    values = [(save, value) for save, value in values if value is not None]
    xs, ys = [], []
    for save, value in values:
        xs += [_clock(save.reported_at), _clock(save.reported_at), None]
        ys += [0, value, None]
    common: dict[str, Any] = {"legendgroup": name, "row": row, "col": 1}
    figure.add_scatter(
        x=xs,
        y=ys,
        mode="lines",
        line={"color": color, "width": width},
        showlegend=False,
        hoverinfo="skip",
        name=name,
        **common,
    )
    unit = "MiB" if attribute == "size_mebibytes" else "s"
    figure.add_scatter(
        x=[_clock(save.reported_at) for save, _ in values],
        y=[value for _, value in values],
        mode="markers",
        marker={"color": color, "size": width + 5},
        name=name,
        text=[f"step {save.step}" for save, _ in values],
        hovertemplate="%{text}: %{y:.2f} " + unit + "<extra>" + name + "</extra>",
        **common,
    )


def _clock(seconds: float) -> str:
    """Local time, as a date axis takes it."""
    return datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="milliseconds")


def _styled(figure: go.Figure, title: str, *, height: int) -> go.Figure:
    figure.update_layout(
        template="plotly_white",
        title={"text": title, "font": {"size": 16, "color": "#0f172a"}, "x": 0.0, "xref": "paper"},
        height=height,
        margin={"l": 76, "r": 24, "t": 64, "b": 48},
        font={"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13},
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
        hovermode="closest",
    )
    figure.update_xaxes(gridcolor="#eef2f7", zeroline=False, linecolor="#cbd5e1", showline=True)
    figure.update_yaxes(gridcolor="#eef2f7", zeroline=False)
    return figure
