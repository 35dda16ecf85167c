"""The tables of ``benchmarks.checkpoint``, from the results of any number of cells. Pure."""

import statistics
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.harness.machine import Machine
from benchmarks.harness.pairs import Verdict
from benchmarks.harness.results import Result
from benchmarks.harness.table import (
    counted,
    mebibytes,
    NOTHING,
    percent,
    ratio,
    seconds,
    table,
    timed,
)
from benchmarks.saving.aims import aims_of, aims_table, CASE as WITH_AIMS
from benchmarks.saving.cases import MANAGER, OFF
from benchmarks.saving.findings import (
    Checks,
    Comparison,
    DIGEST_LIMIT,
    Digests,
    Growths,
    LIBRARY_LIMITS,
    LIMIT,
    Limits,
    Loads,
    METRICS,
    Saves,
)

_COSTS = ("call", "blocked", "overlapped", "lost", "durable", "durable_beside")


def document(results: Sequence[Result]) -> str:
    """All tables with what has to be known to read them, as Markdown; those of each machine by themselves."""
    by_machine: dict[str, list[Result]] = {}
    for result in results:
        by_machine.setdefault(Machine(**result.machine).in_words, []).append(result)
    return "\n\n".join(_of_machine(words, group) for words, group in by_machine.items())


def _of_machine(machine: str, results: Sequence[Result]) -> str:
    saves = [Saves(result) for result in results if result.cell.part == "save"]
    loads = [Loads(result) for result in results if result.cell.part == "load"]
    growths = [Growths(result) for result in results if result.cell.part == "growth"]
    digests = [Digests(result) for result in results if result.cell.part == "digests"]
    checks = [Checks(result) for result in results if result.cell.part == "verify"]
    sections = [
        (f"Measured on: {machine}", None),
        (
            "Limits of the machine, medians",
            limits_table([*saves, *loads, *digests, *checks]),
        ),
        ("Saves: time, and times the limit of the machine", cost_table(saves)),
        (f"Saves: manager over library, limit {LIMIT}", comparison_table(saves)),
        ("Asynchronous saves through torch_checkpointing, and their limits", aims_table(saves)),
        ("Saves: size and memory, over the state", size_table(saves)),
        ("Loads: time, and times a plain read", load_table(loads)),
        (
            f"Loads: manager over library, limit {LIMIT}, of tc over its faster way "
            f"{LIBRARY_LIMITS['tc']:.2f}",
            load_comparison_table(loads),
        ),
        (
            f"Saves: with digests over without; durable: limit {DIGEST_LIMIT:.2f}, blocked: no change",
            comparison_table(digests),
        ),
        ("Loads: checked over unchecked", check_table(checks)),
        ("Change over many saves, of the rank that changed most", growth_table(growths)),
        (_summary([*saves, *digests], [*loads, *checks], growths), None),
    ]
    return "\n\n".join(
        text if body is None else f"**{text}**\n\n{body}" for text, body in sections if body != ""
    )


def limits_table(cells: Sequence[Saves | Loads]) -> str:
    rows = []
    for label, group in _by_layout(cells).items():
        limits = [cell.limits for cell in group]
        state_bytes = sum(rank["state_bytes"] for rank in group[0].result.by_rank)
        cells_of_row = [_speed(limits, name, state_bytes) for name in _LIMIT_TITLES]
        foreign = [cell.result.foreign_share(_num_cores(cell.result)) for cell in group]
        steps = [step for cell in group if isinstance(cell, Saves) for step in cell.quiet_steps()]
        step = seconds(statistics.median(steps)) if steps else NOTHING
        busy = max((share for share in foreign if share is not None), default=None)
        rows.append([label, f"{state_bytes / 1e9:.2f} GB", *cells_of_row, step, percent(busy)])
    head = ["state", "size", *_LIMIT_TITLES.values(), "step without a save", "CPU of others"]
    return table(head, rows) if rows else ""


_LIMIT_TITLES = {
    "copy": "copy, warm",
    "cached": "write, cached + fsync",
    "direct": "write, O_DIRECT + fsync",
    "read": "read",
}


def _speed(limits: Sequence[Limits], name: str, state_bytes: int) -> str:
    samples = [value for each in limits for value in each.samples.get(name, ())]
    if not samples:
        return NOTHING
    median = statistics.median(samples)
    return f"{seconds(median)}, {state_bytes / median / 1e9:.1f} GB/s"


def cost_table(saves: Sequence[Saves]) -> str:
    rows = []
    for cell in saves:
        for side in cell.sides:
            cells_of_row = []
            for name in _COSTS:
                value = cell.median(side, name)
                limit = cell.limit(name)
                cells_of_row.append(NOTHING if value is None else timed(value, limit))
            first = [
                statistics.median(cell.first(side, METRICS[name].of))
                for name in ("blocked", "durable")
            ]
            cells_of_row += [
                percent(cell.median(side, "slow")),
                timed(first[0], cell.limit("blocked")),
                timed(first[1], cell.limit("durable")),
            ]
            rows.append([*_place(cell), side, *cells_of_row])
    head = ["state", "case", "side", *(METRICS[name].title for name in _COSTS)]
    head += ["steps slower while writing", "first saves: blocked", "first saves: durable"]
    return table(head, rows) if rows else ""


def comparison_table(saves: Sequence[Saves]) -> str:
    names = [name for name, metric in METRICS.items() if metric.is_compared]
    rows = []
    for cell in saves:
        if cell.OVER in cell.sides:
            pairs = counted(len(cell.samples(cell.OVER, "blocked")), "pair")
            compared = [_compared(cell.comparison(name)) for name in names]
            rows.append([*_place(cell), pairs, *compared])
    head = ["state", "case", "pairs", *(METRICS[name].title for name in names)]
    return table(head, rows) if rows else ""


def size_table(saves: Sequence[Saves]) -> str:
    rows = []
    for cell in saves:
        for side in cell.sides:
            memory = [
                f"{statistics.median(cell.memory(side, name)):.2f}"
                for name in ("peak", "peak_own", "peak_shared", "peak_writer", "kept")
            ]
            written = [f"{cell.written_share(side):.4f}", f"{cell.imbalance(side):.3f}"]
            rows.append([*_place(cell), side, *written, *memory])
    head = ["state", "case", "side", "bytes written", "fullest rank over mean"]
    head += ["memory, peak", "of the trainer", "shared", "of the writer process", "memory kept"]
    return table(head, rows) if rows else ""


def load_table(loads: Sequence[Loads]) -> str:
    rows = []
    for cell in loads:
        limit = cell.limits.median("read")
        for side in cell.sides:
            times = [timed(cell.median(side, layout), limit) for layout in cell.layouts]
            rows.append([*_place(cell), side, *times])
    head = ["state", "format", "side", "saved by as many ranks", "saved by other ranks"]
    return table(head, rows) if rows else ""


def load_comparison_table(loads: Sequence[Loads]) -> str:
    rows = []
    for cell in loads:
        pairs = counted(len(cell.samples(MANAGER, cell.layouts[0])), "pair")
        compared = [
            _compared(comparison)
            for layout in cell.layouts
            for comparison in cell.comparisons(layout).values()
        ]
        rows.append([*_place(cell), pairs, *compared])
    head = ["state", "format", "pairs", "saved by as many ranks", "saved by other ranks"]
    return table(head, rows) if rows else ""


def check_table(checks: Sequence[Checks]) -> str:
    rows = []
    for cell in checks:
        pairs = counted(len(cell.samples(OFF, cell.layouts[0])), "pair")
        for layout in cell.layouts:
            by_mode = cell.comparisons(layout)
            compared = [_compared(by_mode.get(mode)) for mode in cell.LIMITS]
            unchecked = seconds(cell.median(OFF, layout))
            rows.append([*_place(cell), pairs, _LAYOUTS[layout], unchecked, *compared])
    limits = [f"verify {mode}, limit {limit:.2f}" for mode, limit in Checks.LIMITS.items()]
    head = ["state", "format", "pairs", "saved by", "verify off", *limits]
    return table(head, rows) if rows else ""


_LAYOUTS = {"same": "as many ranks", "resharded": "other ranks"}


def growth_table(growths: Sequence[Growths]) -> str:
    rows = []
    for cell in growths:
        for side in cell.sides:
            found = {name: cell.growth(side, name) for name in cell.TOLERANCES}
            grown = [name for name, each in found.items() if each.grows]
            rows.append(
                [
                    *_place(cell),
                    side,
                    str(cell.num_saves(side)),
                    mebibytes(found["memory"].change),
                    mebibytes(found["shared"].change),
                    f"{found['descriptors'].change:+.0f}",
                    f"grows: {', '.join(grown)}" if grown else "no growth",
                ]
            )
    head = ["state", "case", "side", "saves", "memory", "of it shared", "descriptors", ""]
    return table(head, rows) if rows else ""


def _compared(comparison: Comparison | None) -> str:
    if comparison is None:
        return NOTHING
    difference = seconds(comparison.difference.median)
    sign = "" if difference.startswith("-") else "+"
    return f"{ratio(comparison.ratio)} {comparison.verdict.value} ({sign}{difference})"


def _summary(saves: Sequence[Saves], loads: Sequence[Loads], growths: Sequence[Growths]) -> str:
    """Which limits were missed, in one paragraph."""
    verdicts = list(_verdicts(saves, loads))
    missed = [what for what, found in verdicts if found is Verdict.MISSED]
    grown = [
        f"{cell.result.cell}, {side}"
        for cell in growths
        for side in cell.sides
        if any(cell.growth(side, name).grows for name in cell.TOLERANCES)
    ]
    counts = {kind: sum(found is kind for _, found in verdicts) for kind in Verdict}
    told = ", ".join(f"{number} {kind.value}" for kind, number in counts.items() if number)
    lines = [f"{counted(len(verdicts), 'comparison')} with a limit: {told}."]
    lines += [f"- missed: {what}" for what in missed]
    lines += [f"- grows: {what}" for what in grown]
    return "\n".join(lines)


def _verdicts(saves: Iterable[Saves], loads: Iterable[Loads]) -> Iterator[tuple[str, Verdict]]:
    for cell in saves:
        for name, metric in METRICS.items():
            found = cell.comparison(name)
            if found is not None:
                yield f"{cell.result.cell}, {metric.title}", found.verdict
        if cell.result.cell.case == WITH_AIMS and MANAGER in cell.sides:
            for aim in aims_of(cell):
                yield f"{cell.result.cell}, {aim.title}, limit {aim.limit:g}", aim.verdict
    for load in loads:
        for layout in load.layouts:
            for side, found in load.comparisons(layout).items():
                yield f"{load.result.cell}, {side}, {layout} layout", found.verdict


def _by_layout(cells: Sequence[Saves | Loads]) -> dict[str, list[Saves | Loads]]:
    groups: dict[str, list[Saves | Loads]] = {}
    for cell in cells:
        groups.setdefault(_place(cell)[0], []).append(cell)
    return groups


def _place(cell: Saves | Loads | Growths) -> tuple[str, str]:
    what = cell.result.cell
    return f"{what.model}, {counted(what.ranks, 'rank')}", what.case


def _num_cores(result: Result) -> int:
    return int(result.machine["num_cores"])
