"""What the programs share: their settings, how they go through a matrix, and how they end.

    Options -> check room -> [ Cell: work folder -> ranks -> Result -> JSON ]* -> report

A cell that fails does not keep the others from being measured; the exit code tells. Ctrl-C, SIGTERM and an
error end the ranks and remove what they wrote; the cells that were done stay.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import docs, machine, page, results
from benchmarks.harness.errors import RefusedError
from benchmarks.harness.models import SIZES
from benchmarks.harness.page import Figure
from benchmarks.harness.ranks import RanksFailedError, ROOT
from benchmarks.harness.results import Cell, Result

DOCS = ROOT / "docs/performance.md"
# Starting processes and saving for the first time, on a loaded machine, beside the pairs themselves.
_GRACE_SECONDS = 600.0
Tell = Callable[[str], None]


@dataclass(kw_only=True, slots=True)
class Options:
    """What every measurement can be told."""

    ranks: tuple[int, ...] = (1, 2, 4)
    """Numbers of processes, one measurement after the other."""

    pairs: int = 15
    """Pairs of every comparison; fewer than 6 give no interval."""

    time_limit: float | None = None
    """Minutes after which no further pair begins; what is left is shared evenly by the cases to come.
    None measures all pairs."""

    work_folder: Path | None = None
    """Folder on the disk that is to be measured; by default below the output. All is removed again."""

    report: bool = False
    """Measure nothing: make tables and page of the raw samples that are in the output folder."""

    write_docs: bool = False
    """Put the tables into docs/performance.md as well."""

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1:
            raise ValueError(f"--ranks {self.ranks}: give numbers of processes, each at least 1.")
        if self.pairs < 1:
            raise ValueError(f"--pairs {self.pairs}: at least 1 is needed.")
        if self.time_limit is not None and self.time_limit <= 0:
            raise ValueError(f"--time-limit {self.time_limit}: give minutes, more than 0.")


def require_known(flag: str, asked: Sequence[str], known: Sequence[str]) -> None:
    """Check the words behind a flag.

    Raises:
        ValueError: names all that are unknown, or that there are none.
    """
    unknown = sorted(set(asked) - set(known))
    if unknown or not asked:
        raise ValueError(
            f"{flag} {' '.join(unknown) or 'names nothing'}: choose from {', '.join(known)}."
        )


def require_models(asked: Sequence[str]) -> None:
    """Check the names of models; raises as ``require_known``."""
    require_known("--model", asked, list(SIZES))


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What a cell needs on this machine."""

    memory_bytes: int
    disk_bytes: int


class Matrix:
    """Measures cells one after the other and keeps what they return."""

    def __init__(self, options: Options, output: Path) -> None:
        self._options, self._output = options, output
        self._parent = options.work_folder or output / "work"
        self._started_at = time.monotonic()
        self.failures: list[str] = []

    def require_room(self, cells: Sequence[Cell], room_of: Callable[[Cell], Room]) -> None:
        """Refuse before anything starts; raises ``RefusedError``."""
        for cell in cells:
            room = room_of(cell)
            machine.require_enough(
                f"Measuring {cell}",
                memory_bytes=room.memory_bytes,
                disk_bytes=room.disk_bytes,
                folder=self._parent,
            )

    def carry_out(
        self,
        cells: Sequence[Cell],
        measure: Callable[[Cell, Path, float, Tell], list[Any]],
        settings: dict[str, Any],
    ) -> None:
        """Measure ``cells``: each gets a folder of its own, and the seconds its pairs may take."""
        described = machine.describe(self._parent).as_dict()
        for number, cell in enumerate(cells):
            seconds = self._budget_seconds(len(cells) - number)
            if seconds <= 0:
                self.failures.append(f"{cell}: left out, the time was up")
                continue
            progress = Progress(f"[{number + 1}/{len(cells)}] {cell}")
            try:
                with machine.work_folder(self._parent) as folder:
                    by_rank = measure(cell, folder, seconds, progress.tell)
            except RanksFailedError as error:
                progress.end("failed")
                self.failures.append(f"{cell}: {error}")
                continue
            result = Result(cell=cell, by_rank=by_rank, machine=described, settings=settings)
            results.write(result, self._output)
            progress.end("done")

    def end(self) -> int:
        """Say what failed; the exit code."""
        for failure in self.failures:
            print(f"\n{failure}", file=sys.stderr)
        return 1 if self.failures else 0

    def _budget_seconds(self, num_left: int) -> float:
        if self._options.time_limit is None:
            return float("inf")
        left = 60 * self._options.time_limit - (time.monotonic() - self._started_at)
        return left / num_left


def publish(
    options: Options,
    output: Path,
    title: str,
    text: str,
    figures: Sequence[Figure],
    *,
    region: str,
) -> None:
    """Tables on stdout, tables and plots into the output folder, and into ``region`` of the docs."""
    print(text)
    (output / "tables.md").write_text(text + "\n")
    if page.is_available():
        page.write(output / "page.html", title, text, figures)
        print(f"\nPlots: {output / 'page.html'}", file=sys.stderr)
    else:
        print("\nNo plots: the development dependency plotly is not installed.", file=sys.stderr)
    if options.write_docs:
        docs.replace_region(DOCS, region, text)
        print(f"Tables: {DOCS}", file=sys.stderr)


def timeout_of(budget_seconds: float) -> float:
    """How long the ranks of a cell may take in all before they count as hung."""
    return min(budget_seconds, 3600.0) + _GRACE_SECONDS


class Progress:
    """One line per cell on a terminal, and few lines elsewhere."""

    def __init__(self, name: str) -> None:
        self._name, self._started_at = name, time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self.tell("starting")

    def tell(self, text: str) -> None:
        """What is going on now."""
        if self._is_terminal:
            self._show(f"\r\033[K{self._name}: {text}", end="")
        elif not text.startswith("pair"):
            self._show(f"{self._name}: {text}")

    def end(self, how: str) -> None:
        """The last word."""
        start = "\r\033[K" if self._is_terminal else ""
        self._show(f"{start}{self._name}: {how} ({time.monotonic() - self._started_at:.0f} s)")

    @staticmethod
    def _show(text: str, end: str = "\n") -> None:
        print(text, end=end, file=sys.stderr, flush=True)


def leave(work: Callable[[], int]) -> None:
    """Run ``work`` and leave with its exit code, after Ctrl-C with 130 and no traceback."""
    try:
        with machine.signals_end_in_order():
            code = work()
    except KeyboardInterrupt:
        print("\nStopped; what was measured to its end is kept.", file=sys.stderr)
        code = 130
    except RefusedError as error:
        print(error, file=sys.stderr)
        code = 2
    sys.exit(code)
