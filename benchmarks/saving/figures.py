"""The plots of ``benchmarks.checkpoint``. Pure."""

from collections.abc import Iterator, Sequence

from benchmarks.harness.page import Bars, Figure, Intervals
from benchmarks.harness.pairs import Estimate
from benchmarks.harness.results import Result
from benchmarks.harness.table import counted
from benchmarks.saving.findings import Comparison, Growths, LIMIT, Loads, METRICS, Saves

_SIDES = ("library", "manager")
_SHOWN = {
    "blocked": "times a warm copy",
    "overlapped": "times a warm copy",
    "durable": "times the fastest plain write",
    "durable_beside": "times the fastest plain write",
}


def figures(results: Sequence[Result]) -> list[Figure]:
    """What there is to draw of ``results``."""
    saves = [Saves(result) for result in results if result.cell.part == "save"]
    loads = [Loads(result) for result in results if result.cell.part == "load"]
    growths = [Growths(result) for result in results if result.cell.part == "growth"]
    found: list[Figure] = [*_ratios(saves, loads)]
    found += [_multiples(saves, name, axis) for name, axis in _SHOWN.items() if saves]
    found += [_load_multiples(loads)] if loads else []
    found += [_readings(growths)] if growths else []
    return found


def _ratios(saves: Sequence[Saves], loads: Sequence[Loads]) -> Iterator[Intervals]:
    labels: list[str] = []
    values: list[Estimate] = []

    def add(label: str, found: Comparison | None) -> None:
        if found is not None and found.ratio is not None:
            labels.append(label)
            values.append(found.ratio)

    for cell in saves:
        for name, metric in METRICS.items():
            comparison = cell.comparison(name) if metric.is_compared else None
            add(f"{_label(cell)}: {metric.title}", comparison)
    for load in loads:
        for layout in load.layouts:
            comparison = load.comparison(layout)
            add(f"{_label(load)}: load, {layout} layout", comparison)
    if labels:
        yield Intervals(
            title="Manager over library",
            axis="median ratio of the pairs and its 95 % interval; dashed: the limit",
            limit=LIMIT,
            labels=labels,
            values=values,
        )


def _multiples(saves: Sequence[Saves], name: str, axis: str) -> Bars:
    cells = [cell for cell in saves if cell.samples("library", name) and cell.limit(name)]
    values: dict[str, list[float | None]] = {side: [] for side in _SIDES}
    spread: dict[str, list[list[float]]] = {side: [] for side in _SIDES}
    for cell in cells:
        limit = cell.limit(name) or 1.0
        for side in _SIDES:
            median = cell.median(side, name) if side in cell.sides else None
            values[side].append(None if median is None else median / limit)
            samples = cell.samples(side, name) if side in cell.sides else []
            spread[side].append([sample / limit for sample in samples])
    return Bars(
        title=f"Saves: {METRICS[name].title}",
        axis=axis,
        labels=[_label(cell) for cell in cells],
        values=values,
        spread=spread,
        line=1.0,
    )


def _load_multiples(loads: Sequence[Loads]) -> Bars:
    values: dict[str, list[float | None]] = {side: [] for side in _SIDES}
    spread: dict[str, list[list[float]]] = {side: [] for side in _SIDES}
    labels = []
    for cell in loads:
        limit = cell.limits.median("read") or 1.0
        for layout in cell.layouts:
            labels.append(f"{_label(cell)}, {layout} layout")
            for side in _SIDES:
                values[side].append(cell.median(side, layout) / limit)
                spread[side].append([sample / limit for sample in cell.samples(side, layout)])
    return Bars(
        title="Loads",
        axis="times a plain read",
        labels=labels,
        values=values,
        spread=spread,
        line=1.0,
    )


def _readings(growths: Sequence[Growths]) -> Bars:
    values: dict[str, list[float | None]] = {side: [] for side in _SIDES}
    for cell in growths:
        for side in _SIDES:
            change = cell.growth(side, "memory").change / 2**20 if side in cell.sides else None
            values[side].append(change)
    return Bars(
        title="Change of memory over many saves",
        axis="MiB",
        labels=[_label(cell) for cell in growths],
        values=values,
    )


def _label(cell: Saves | Loads | Growths) -> str:
    what = cell.result.cell
    return f"{what.case}, {what.model}, {counted(what.ranks, 'rank')}"
