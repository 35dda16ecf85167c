"""Measure saves and loads of checkpoints: each manager beside the bare library, and the machine's limits.

    python -m benchmarks.checkpoint                     # the first three parts, for 50 million parameters
    python -m benchmarks.checkpoint --model tiny --ranks 2 --pairs 3 --cases dcp-async
    python -m benchmarks.checkpoint --parts digests verify

Raw samples go to the output folder, one JSON file per model, number of ranks, part and case; tables and a
page with plots are made of all files that lie there, also those of earlier calls.

    save    saves, in the same processes in turns: manager, library, manager, ...
    load    loads of what as many and what other ranks saved, likewise
    growth  memory, descriptors and shared memory over many saves, on few ranks, of a small model
    digests saves of a manager with digests and manifest, and without
    verify  loads of a manager that check everything, sizes, nothing
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.harness import ranks, results
from benchmarks.harness.models import Size, SIZES
from benchmarks.harness.program import (
    leave,
    Matrix,
    Options,
    publish,
    require_known,
    require_models,
    Room,
    Tell,
    timeout_of,
)
from benchmarks.harness.rank import Call
from benchmarks.harness.results import Cell
from benchmarks.saving.cases import CASES, TABLES
from benchmarks.saving.figures import figures
from benchmarks.saving.tables import document

_PROGRAMS = {
    "save": "benchmarks.saving.save:measure",
    "load": "benchmarks.saving.load:measure",
    "growth": "benchmarks.saving.growth:measure",
    "digests": "benchmarks.saving.save:measure",
    "verify": "benchmarks.saving.load:measure",
}
_LOADS = ("load", "verify")
PARTS = tuple(_PROGRAMS)
# Measured on a quiet machine: a rank with torch loaded, and a process that a library starts to write.
_RANK_BYTES, _WRITER_BYTES = 700 << 20, 300 << 20
_START_SECONDS = 300.0
"""For both sides of a case to start and to save twice, of the largest model on a slow machine."""
REGION = "checkpoint"


@dataclass(kw_only=True, slots=True)
class CheckpointOptions(Options):
    """What to measure, how often, and where the numbers go."""

    model: tuple[str, ...] = ("50M",)
    """Models by their number of parameters: tiny, 4M, 50M, 300M."""

    parts: tuple[str, ...] = ("save", "load", "growth")
    """save, load, growth; digests and verify, where the manager is compared with itself."""

    cases: tuple[str, ...] = tuple(CASES)
    """Modes; for loads, the formats of these modes."""

    cold: bool = False
    """Load from the disk instead of from the page cache."""

    warm_up_seconds: float = 5.0
    """Steps between the start of a manager and its first save; what it has started is then waited for until
    it is ready. 0 does neither."""

    first_saves: int = 6
    """How often each side of an asynchronous case is started anew to look at its first save and its memory;
    fewer than 6 give no interval."""

    growth_model: str = "4M"
    """Model whose saves are repeated to see whether something grows."""

    growth_saves: int = 50
    """How often they are repeated; at least 5."""

    output: Path = Path("outputs/benchmarks/checkpoint")
    """Folder for raw samples, tables and page."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        require_models(self.model)
        require_models([self.growth_model])
        require_known("--parts", self.parts, PARTS)
        require_known("--cases", self.cases, list(CASES))
        if self.first_saves < 1:
            raise ValueError(f"--first-saves {self.first_saves}: at least 1 is needed.")
        if self.growth_saves < 5:
            raise ValueError(f"--growth-saves {self.growth_saves}: at least 5 are needed.")


def cells_of(options: CheckpointOptions) -> list[Cell]:
    """What ``options`` ask for, in the order in which it is measured."""
    cells = []
    formats = {case.partition("-")[0] for case in options.cases}
    for model in options.model:
        for world_size in options.ranks:
            cells += [
                Cell(part=part, case=name, model=model, ranks=world_size)
                for part in PARTS
                if part in options.parts and part != "growth"
                for name in TABLES[part]
                if name in (formats if part in _LOADS else options.cases)
            ]
    if "growth" in options.parts:
        # Leaks do not depend on the number of ranks beyond there being others.
        world_size = min((n for n in options.ranks if n > 1), default=options.ranks[0])
        cells += [
            Cell(part="growth", case=case, model=options.growth_model, ranks=world_size)
            for case in options.cases
        ]
    return cells


def room_of(cell: Cell) -> Room:
    """What a cell needs: the state, its gradients, a staged copy for each side and one for the limits."""
    size: Size = SIZES[cell.model]
    world_size = max(cell.ranks, other_ranks(cell.ranks) if cell.part in _LOADS else 1)
    processes = world_size * (_RANK_BYTES + 2 * _WRITER_BYTES)
    return Room(
        memory_bytes=4 * size.state_bytes + size.gradient_bytes + processes,
        # A checkpoint of each side in each layout, and the file that is written for the limits.
        disk_bytes=5 * size.state_bytes,
    )


def other_ranks(world_size: int) -> int:
    """The number of ranks whose checkpoints ``world_size`` ranks load in another layout."""
    return 2 if world_size != 2 else 1


def measure(cell: Cell, folder: Path, seconds: float, tell: Tell, options: Any) -> list[Any]:
    """Start the ranks of one cell; what they return, by rank."""
    common = {"case": cell.case, "model": cell.model, "folder": str(folder)}
    if cell.part == "growth":
        extra: dict[str, Any] = {"num_saves": options.growth_saves}
    else:
        common["part"] = cell.part
        extra = {"num_pairs": options.pairs, "budget_seconds": seconds}
    if cell.part in ("save", "digests"):
        extra |= {
            "warm_up_seconds": options.warm_up_seconds,
            "num_firsts": options.first_saves,
        }
    if cell.part in _LOADS:
        other = folder / "other"
        other.mkdir()
        extra |= {"cold": options.cold, "other_folder": str(other)}
        num_others = other_ranks(cell.ranks)
        tell(f"saving on {num_others} ranks")
        ranks.run(
            num_others,
            Call(target="benchmarks.saving.load:seed", arguments={**common, "folder": str(other)}),
            log_folder=folder,
            timeout_seconds=timeout_of(0),
        )
    starts = options.first_saves if cell.part == "save" else 1
    return ranks.run(
        cell.ranks,
        Call(target=_PROGRAMS[cell.part], arguments=common | extra),
        log_folder=folder,
        timeout_seconds=timeout_of(seconds) + starts * _START_SECONDS,
        tell=tell,
    )


def report(options: CheckpointOptions) -> None:
    """Publish all that lies in the output folder."""
    if found := results.read_all(options.output, PARTS):
        text = document(found)
        publish(options, options.output, "Checkpoints", text, figures(found), region=REGION)
    else:
        print(f"There are no results in {options.output}.", file=sys.stderr)


def work(options: CheckpointOptions) -> int:
    """Measure and report; the exit code."""
    if options.report:
        report(options)
        return 0
    cells, matrix = [], Matrix(options, options.output)
    for cell in cells_of(options):
        if obstacle := TABLES[cell.part][cell.case].obstacle():
            matrix.failures.append(f"{cell}: left out, {obstacle}")
        else:
            cells.append(cell)
    matrix.require_room(cells, room_of)
    matrix.carry_out(
        cells,
        lambda cell, folder, seconds, tell: measure(cell, folder, seconds, tell, options),
        settings={
            "cold": options.cold,
            "warm_up_seconds": options.warm_up_seconds,
            "first_saves": options.first_saves,
        },
    )
    report(options)
    return matrix.end()


def main() -> None:
    """The program."""
    options = tyro.cli(
        CheckpointOptions, prog="python -m benchmarks.checkpoint", description=__doc__
    )
    leave(lambda: work(options))


if __name__ == "__main__":
    main()
