"""The plots of ``benchmarks.checkpoint``. Pure."""

from collections.abc import Iterator, Sequence

from benchmarks.harness.page import Bars, Figure, Intervals
from benchmarks.harness.pairs import Estimate
from benchmarks.harness.results import Result
from benchmarks.harness.table import counted
from benchmarks.saving.findings import Checks, Comparison, Digests, Growths, Loads, METRICS, Saves

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
    digests = [Digests(result) for result in results if result.cell.part == "digests"]
    checks = [Checks(result) for result in results if result.cell.part == "verify"]
    found: list[Figure] = [
        *_ratios("Manager over library", [*_of_saves(saves), *_of_loads(loads)]),
        *_ratios("Saves with digests over without", _of_saves(digests)),
        *_ratios("Loads that check over loads that do not", _of_loads(checks)),
    ]
    found += [_multiples(saves, name, axis) for name, axis in _SHOWN.items() if saves]
    found += [_load_multiples(loads)] if loads else []
    found += [_readings(growths)] if growths else []
    return found


def _of_saves(saves: Sequence[Saves]) -> list[tuple[str, Comparison]]:
    """What was compared, each with its label."""
    return [
        (f"{_label(cell)}: {metric.title}", comparison)
        for cell in saves
        for name, metric in METRICS.items()
        if (comparison := cell.comparison(name)) is not None
    ]


def _of_loads(loads: Sequence[Loads]) -> list[tuple[str, Comparison]]:
    return [
        (f"{_label(cell)}: load, {side}, {layout} layout", comparison)
        for cell in loads
        for layout in cell.layouts
        for side, comparison in cell.comparisons(layout).items()
    ]


def _ratios(title: str, compared: Sequence[tuple[str, Comparison]]) -> Iterator[Intervals]:
    """A plot for each limit."""
    by_limit: dict[float, dict[str, Estimate]] = {}
    for label, comparison in compared:
        if comparison.ratio is not None:
            by_limit.setdefault(comparison.limit, {})[label] = comparison.ratio
    for limit, found in by_limit.items():
        yield Intervals(
            title=f"{title}, limit {limit:.2f}",
            axis="median ratio of the pairs and its 95 % interval; dashed: the limit",
            limit=limit,
            labels=list(found),
            values=list(found.values()),
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
