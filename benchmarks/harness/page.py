"""One HTML page with plots, that needs nothing beside it. Drawn by plotly, a development dependency."""

import html
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.pairs import Estimate

_STYLE = """
body { max-width: 1200px; margin: 24px auto; padding: 0 16px; color: #0f172a; background: #fff;
  font: 15px/1.5 system-ui, sans-serif; }
pre { overflow-x: auto; font-size: 13px; line-height: 1.35; }
h2 { font-size: 18px; margin: 32px 0 0; }
p { margin: 4px 0; color: #475569; }
"""
# On by default: a button that uploads the plot to the makers of plotly.
_CONFIG = {"displaylogo": False, "showSendToCloud": False, "plotlyServerURL": ""}
_MARGIN = {"t": 40}
_COLORS = ("#64748b", "#2563eb", "#d97706", "#059669")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Groups of bars: how much each of several things is, in several cases."""

    title: str
    axis: str
    labels: list[str]
    """One per group."""

    values: dict[str, list[float | None]]
    """By the name of the bar, one value per group."""

    spread: dict[str, list[list[float]]] = field(default_factory=dict)
    """By the name of the bar, the samples behind each value, shown as dots."""

    line: float | None = None
    """Where a line is drawn across."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Intervals:
    """Ratios with their intervals, beside the limit that they are held to."""

    title: str
    axis: str
    limit: float
    labels: list[str]
    values: list[Estimate]


Figure = Bars | Intervals


def is_available() -> bool:
    """Whether plots can be drawn here."""
    return importlib.util.find_spec("plotly") is not None


def write(path: Path, title: str, text: str, figures: Sequence[Figure]) -> None:
    """A page with ``figures``, and below them ``text`` as it is."""
    io: Any = importlib.import_module("plotly.io")
    parts = []
    for number, figure in enumerate(figures):
        drawn = _bars(figure) if isinstance(figure, Bars) else _intervals(figure)
        # The library itself once, in front of the first plot.
        plot = io.to_html(drawn, full_html=False, include_plotlyjs=number == 0, config=_CONFIG)
        parts.append(f"<h2>{html.escape(figure.title)}</h2>\n{plot}")
    content = "\n".join(parts)
    path.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}'
        f"</title><style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>\n{content}\n"
        f"<h2>Tables</h2><pre>{html.escape(text)}</pre></body></html>\n",
        encoding="utf-8",
    )


def _bars(figure: Bars) -> dict[str, Any]:
    colors = dict(zip(figure.values, _COLORS * len(figure.values), strict=False))
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": name,
            "x": figure.labels,
            "y": values,
            "marker": {"color": colors[name], "opacity": 0.5},
            "offsetgroup": name,
        }
        for name, values in figure.values.items()
    ]
    for name, samples in figure.spread.items():
        points = [
            (label, value)
            for label, group in zip(figure.labels, samples, strict=True)
            for value in group
        ]
        traces.append(
            {
                "type": "box",
                "name": f"{name}, every sample",
                "x": [label for label, _ in points],
                "y": [value for _, value in points],
                "boxpoints": "all",
                "pointpos": 0,
                "jitter": 0.6,
                "line": {"width": 0},
                "fillcolor": "rgba(0,0,0,0)",
                "marker": {
                    "color": colors[name],
                    "size": 4,
                    "line": {"width": 0.5, "color": "#fff"},
                },
                "offsetgroup": name,
                "showlegend": False,
            }
        )
    layout: dict[str, Any] = {
        "barmode": "group",
        "boxmode": "group",
        "template": "plotly_white",
        "yaxis": {"title": {"text": figure.axis}, "rangemode": "tozero"},
        "height": 380,
        "margin": _MARGIN,
    }
    if figure.line is not None:
        layout["shapes"] = [_line(y0=figure.line, y1=figure.line, x0=0, x1=1, xref="paper")]
    return {"data": traces, "layout": layout}


def _intervals(figure: Intervals) -> dict[str, Any]:
    def width(value: Estimate, end: float | None) -> float:
        return 0.0 if end is None else abs(end - value.median)

    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [value.median for value in figure.values],
        "y": figure.labels,
        "marker": {"color": _COLORS[1], "size": 9},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [width(value, value.high) for value in figure.values],
            "arrayminus": [width(value, value.low) for value in figure.values],
        },
    }
    layout = {
        "template": "plotly_white",
        "xaxis": {"title": {"text": figure.axis}},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "height": 140 + 26 * len(figure.labels),
        "margin": _MARGIN,
        "shapes": [_line(x0=figure.limit, x1=figure.limit, y0=0, y1=1, yref="paper")],
    }
    return {"data": [trace], "layout": layout}


def _line(**place: Any) -> dict[str, Any]:
    return {"type": "line", "line": {"color": "#dc2626", "dash": "dash", "width": 1}, **place}
