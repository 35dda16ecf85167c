"""Raw samples on disk: one JSON file per measured cell of the matrix, kept beside the tables made of them.

A cell that is measured again replaces its file, so a matrix may be filled by several runs of the program.

    Cell (what) -> measured on ranks -> Result -> <part>-<model>-<ranks>-<case>.json -> read_all -> report
"""

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.errors import RefusedError

_SCHEMA = 2


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Cell:
    """What one file is about."""

    model: str
    ranks: int
    part: str
    case: str

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.model}, {ranks}, {self.part} {self.case}"

    @property
    def file_name(self) -> str:
        return f"{self.part}-{self.model}-{self.ranks}-{self.case}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What was measured in one cell, as the ranks returned it."""

    cell: Cell
    by_rank: list[Any]
    machine: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)

    def foreign_share(self, num_cores: int) -> float | None:
        """Median share of the machine's cores that was not at the disposal of this measurement.

        Other programs, and the kernel's own threads, among them those that write dirty pages.
        """
        samples = [rank.get("cpu", []) for rank in self.by_rank]
        shares = []
        for clocks in zip(*samples, strict=True):
            seconds = max(wall for wall, _, _ in clocks)
            used, own = max(machine for _, _, machine in clocks), sum(own for _, own, _ in clocks)
            shares.append(max(0.0, used - own) / (seconds * num_cores))
        return statistics.median(shares) if shares else None


def write(result: Result, folder: Path) -> Path:
    """Keep ``result``; a file of the same cell is replaced, never left half written."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / result.cell.file_name
    content = json.dumps({"schema": _SCHEMA, **asdict(result)})
    half = path.with_suffix(".tmp")
    half.write_text(content + "\n")
    os.replace(half, path)
    return path


def read_all(folder: Path, parts: Iterable[str]) -> list[Result]:
    """All results of ``parts`` in ``folder``, in the order of the tables.

    Raises:
        RefusedError: a file was written by another version of this program.
    """
    found = []
    for part in parts:
        for path in sorted(folder.glob(f"{part}-*.json")):
            content = json.loads(path.read_text())
            if content.pop("schema", None) != _SCHEMA:
                raise RefusedError(
                    f"{path} is of another version of this program: measure that case again, or "
                    "move the file away."
                )
            found.append(Result(cell=Cell(**content.pop("cell")), **content))
    return sorted(found, key=_place)


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Sample by sample that of the rank which took longest."""
    return [max(values) for values in zip(*by_rank, strict=True)]


def _place(result: Result) -> tuple[Any, ...]:
    # Sizes by number: 4M before 50M; a name without one first.
    digits = "".join(filter(str.isdigit, result.cell.model))
    return int(digits or 0), result.cell.ranks, result.cell.part, result.cell.case
