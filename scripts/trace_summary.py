"""Print where the time of a run went, from the structured logs in its folder.

    python scripts/trace_summary.py outputs

Each start is counted by itself and all of them together. The parts of a rank's time add up to all of it;
what a step does outside of the named parts is "rest of the step", the sum of valid tokens over the
ranks among it. Needs nothing but Python.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

# So that it runs from a clone in which nothing is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan.observability.run_log import (  # noqa: E402 (as above)
    BrokenLines,
    RankLog,
    read_run,
    Run,
    Save,
    Start,
)
from torchtitan.observability.structured_logger.gantt_generator import (  # noqa: E402 (as above)
    generate_gantt_trace,
)

from scripts.wording import counted  # noqa: E402 (the path comes first)

# More columns than this do not fit beside each other; the least and the largest stand for them.
_MAX_RANK_COLUMNS = 4
_NUM_SLOWEST = 3
# Below this a row would show 0.00 s.
_LEAST_SECONDS = 0.005
_PART_WIDTH = 30
# Of all that one rank can wait for in another, this is the data alone: ready_at ends there.
_WAIT = "waiting for the last data"


def summary(run: Run, *, all_ranks: bool = False) -> Iterator[str]:
    """The lines to print."""
    yield f"{run.folder}: {counted(len(run.starts), 'start')}, {_steps(run)}"
    for number, start in enumerate(run.starts, start=1):
        yield ""
        yield f"start {number} of {len(run.starts)}: {_headline(start)}"
        yield from _table(start, all_ranks)
        yield from _about_steps(start)
        yield from _about_saves([save for log in start.ranks.values() for save in log.saves])
    if len(run.starts) > 1:
        yield ""
        yield "all starts together, means over the ranks"
        yield from _together(run)
        yield from _about_saves(run.saves())
    yield from _about_broken_lines(run.broken())


def _steps(run: Run) -> str:
    last = max((s.last_step for s in run.starts if s.last_step is not None), default=None)
    return "no step was finished" if last is None else f"up to step {last}"


def _headline(start: Start) -> str:
    begin = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.begin))
    words = [begin, counted(len(start.ranks), "rank")]
    if start.last_step is None or start.resumed_after is None:
        words.append("no step was finished")
    else:
        words.append(f"steps {start.resumed_after + 1} to {start.last_step}")
    words.append(f"{start.end - start.begin:.1f} s")
    if start.closed_in_order:
        return ", ".join([*words, "closed in order"])
    errors = sorted({log.error for log in start.ranks.values() if log.error is not None})
    if errors:
        return ", ".join([*words, f"ended by {'; '.join(errors)}"])
    places = sorted({" > ".join(log.open_spans) or "no span" for log in start.ranks.values()})
    return ", ".join([*words, f"not closed; the last records are from {' and '.join(places)}"])


def _table(start: Start, all_ranks: bool) -> Iterator[str]:
    ranks = list(start.ranks.values())
    shows_ranks = len(ranks) > 1 and (all_ranks or len(ranks) <= _MAX_RANK_COLUMNS)
    columns = ["mean", "share"]
    if shows_ranks:
        columns += [f"rank {log.rank}" for log in ranks]
    elif len(ranks) > 1:
        columns += ["least", "most", "rank"]
    yield _row("", columns)
    total = sum(log.seconds for log in ranks)
    for part in start.parts():
        if start.mean_seconds(part) < _LEAST_SECONDS:
            continue
        seconds = [log.seconds_by_part.get(part, 0.0) for log in ranks]
        yield _row(part, _cells(seconds, total, ranks, shows_ranks))
    yield _row("all", _cells([log.seconds for log in ranks], total, ranks, shows_ranks))
    if len(ranks) > 1:
        waited = start.waits()
        seconds = [waited[log.rank] for log in ranks]
        yield _row(f"({_WAIT})", _cells(seconds, total, ranks, shows_ranks))


def _cells(
    seconds: list[float], total: float, ranks: list[RankLog], shows_ranks: bool
) -> list[str]:
    cells = [f"{sum(seconds) / len(seconds):.2f} s", f"{100 * sum(seconds) / (total or 1):.1f}%"]
    if shows_ranks:
        return cells + [f"{each:.2f} s" for each in seconds]
    if len(seconds) > 1:
        most = max(range(len(seconds)), key=lambda index: seconds[index])
        cells += [f"{min(seconds):.2f} s", f"{seconds[most]:.2f} s", str(ranks[most].rank)]
    return cells


def _row(part: str, cells: Sequence[str]) -> str:
    return f"  {part:<{_PART_WIDTH}}" + "".join(f"{cell:>12}" for cell in cells)


def _about_steps(start: Start) -> Iterator[str]:
    # The slowest rank makes the duration of a step.
    slowest: dict[int, float] = {}
    for log in start.ranks.values():
        for step, seconds in log.step_seconds.items():
            slowest[step] = max(seconds, slowest.get(step, 0.0))
    if not slowest:
        return
    tags = {step: log.step_tags[step] for log in start.ranks.values() for step in log.step_tags}
    order = sorted(slowest, key=lambda step: -slowest[step])[:_NUM_SLOWEST]
    longest = [
        f"step {step} {slowest[step]:.2f} s"
        + (f" ({', '.join(tags[step])})" if step in tags else "")
        for step in order
    ]
    yield (
        f"  {counted(len(slowest), 'step')}, {statistics.median(slowest.values()):.3f} s each "
        f"(median); slowest: {'; '.join(longest)}"
    )


def _about_saves(saves: list[Save]) -> Iterator[str]:
    if not saves:
        return
    done = [save for save in saves if not save.failed]
    blocked = sum(save.blocked_seconds or 0.0 for save in done)
    durable = sum(save.durable_seconds or 0.0 for save in done)
    size = sum(save.size_mebibytes or 0.0 for save in done)
    failed = f"; {len(saves) - len(done)} failed" if len(saves) > len(done) else ""
    yield (
        f"  {counted(len(done), 'save')}: training waited {blocked:.2f} s, {durable:.2f} s until they were "
        f"durable, {size:.1f} MiB{failed}"
    )


def _together(run: Run) -> Iterator[str]:
    parts = {part for start in run.starts for part in start.parts()}
    totals = {part: sum(s.mean_seconds(part) for s in run.starts) for part in parts}
    whole = sum(totals.values()) or 1.0
    yield _row("", ["seconds", "share"])
    for part in sorted(totals, key=lambda name: -totals[name]):
        if totals[part] < _LEAST_SECONDS:
            continue
        yield _row(part, [f"{totals[part]:.2f} s", f"{100 * totals[part] / whole:.1f}%"])
    yield _row("all", [f"{sum(totals.values()):.2f} s", "100.0%"])
    num_lost, seconds = run.lost_steps()
    yield f"  {counted(num_lost, 'step')} lost to restarts, which had taken {seconds:.2f} s"
    pairs = zip(run.starts, run.starts[1:], strict=False)
    gaps = sum(max(after.begin - before.end, 0.0) for before, after in pairs)
    yield f"  between the starts: {gaps:.1f} s"


def _about_broken_lines(broken: list[BrokenLines]) -> Iterator[str]:
    cut_off, damaged = sum(b.cut_off for b in broken), sum(b.damaged for b in broken)
    if cut_off:
        yield f"\n{counted(cut_off, 'last line')} cut off, as a kill leaves them"
    if damaged:
        yield f"\n{counted(damaged, 'damaged line')} passed over; the times around them may be wrong"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run_folder", type=Path, help="the --dump_folder of the run")
    parser.add_argument(
        "--all-ranks", action="store_true", help="a column for each rank, however many there are"
    )
    parser.add_argument(
        "--trace", type=Path, help="also write all spans to this file, for ui.perfetto.dev"
    )
    options = parser.parse_args(arguments)
    try:
        run = read_run(options.run_folder)
    except FileNotFoundError as error:
        parser.error(str(error))
    if options.trace is not None:
        try:
            generate_gantt_trace(options.run_folder, options.trace)
        except OSError as error:
            parser.error(
                f"the trace cannot be written to {options.trace}: {error}. Name another file with --trace."
            )
    print("\n".join(summary(run, all_ranks=options.all_ranks)))


if __name__ == "__main__":
    main()
