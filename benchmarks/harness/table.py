"""Tables that are read in a terminal and in a Markdown page alike, and how numbers look in them. Pure."""

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.pairs import Estimate

NOTHING = "-"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| "
        + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
        + " |"
        for line in (lines[0], rule, *lines[1:])
    )


def seconds(value: float | None) -> str:
    """A duration in the unit in which it can be read."""
    if value is None:
        return NOTHING
    return f"{1000 * value:.2g} ms" if abs(value) < 0.0995 else f"{value:.2f} s"


def multiple(value: float, limit: float | None) -> str:
    """How many times a limit; a dash where there is none."""
    if limit is None or limit <= 0:
        return NOTHING
    times = value / limit
    return f"{times:.1f}x" if abs(times) < 9.95 else f"{times:.0f}x"


def timed(value: float, limit: float | None) -> str:
    """A duration, and how many times the limit it is."""
    return f"{seconds(value)}, {multiple(value, limit)}"


def ratio(value: Estimate | None) -> str:
    """A ratio with its interval."""
    if value is None:
        return NOTHING
    if value.low is None or value.high is None:
        return f"{value.median:.3f}"
    return f"{value.median:.3f} [{value.low:.3f}, {value.high:.3f}]"


def percent(value: float | None) -> str:
    """A share."""
    return NOTHING if value is None else f"{100 * value:.0f} %"


def mebibytes(value: float) -> str:
    """A signed change of memory."""
    return f"{value / 2**20:+.1f} MiB"


def counted(number: Any, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
