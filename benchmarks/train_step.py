"""Measure the step of the trainer beside that of a bare PyTorch loop with the same model and batch.

    python -m benchmarks.train_step
    python -m benchmarks.train_step --model tiny --ranks 1 --pairs 3

Raw samples go to the output folder, one JSON file per model and number of ranks; tables and a page with
plots are made of all files that lie there, also those of earlier calls.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.harness import ranks, results
from benchmarks.harness.machine import Machine
from benchmarks.harness.models import SIZES
from benchmarks.harness.page import Bars, Figure, Intervals
from benchmarks.harness.pairs import Estimate, ratio_of_pairs, verdict
from benchmarks.harness.program import (
    leave,
    Matrix,
    Options,
    publish,
    require_models,
    Room,
    Tell,
    timeout_of,
)
from benchmarks.harness.rank import Call
from benchmarks.harness.results import Cell, Result, slowest
from benchmarks.harness.table import counted, percent, ratio, seconds, table

LIMIT = 1.05
"""What the trainer may take, over the bare loop."""

PART, _CASE, REGION = "step", "trainer", "train_step"
_RANK_BYTES = 900 << 20
_COPIES = 3
"""Of the state: that of the trainer, that of the bare loop, and less than one of gradients and of weights
as they were in the beginning."""


@dataclass(kw_only=True, slots=True)
class StepOptions(Options):
    """What to measure, how often, and where the numbers go."""

    model: tuple[str, ...] = ("4M",)
    """Models by their number of parameters: tiny, 4M (that of the recipe llama3_jargon), 50M, 300M."""

    ranks: tuple[int, ...] = (1, 2)
    """Numbers of processes, one measurement after the other."""

    steps: int = 5
    """Steps of a block, after which the other one has its turn. The trainer logs once in a block."""

    output: Path = Path("outputs/benchmarks/train_step")
    """Folder for raw samples, tables and page."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        require_models(self.model)
        if self.steps < 1:
            raise ValueError(f"--steps {self.steps}: at least 1 is needed.")


def room_of(cell: Cell) -> Room:
    """What a cell needs; on the disk, logs and the tokens of the corpus."""
    memory = _COPIES * SIZES[cell.model].state_bytes + cell.ranks * _RANK_BYTES
    return Room(memory_bytes=memory, disk_bytes=64 << 20)


def measure(cell: Cell, folder: Path, budget: float, tell: Tell, options: StepOptions) -> list[Any]:
    """Start the ranks of one cell; what they return, by rank."""
    arguments = {"model": cell.model, "folder": str(folder), "budget_seconds": budget}
    arguments |= {"num_pairs": options.pairs, "num_steps": options.steps}
    return ranks.run(
        cell.ranks,
        Call(target="benchmarks.stepping:measure", arguments=arguments, joins_group=False),
        log_folder=folder,
        timeout_seconds=timeout_of(budget),
        tell=tell,
    )


def samples(result: Result, side: str) -> list[float]:
    """Seconds of a step, one number per pair: those of the slowest rank."""
    return slowest([rank["seconds"][side] for rank in result.by_rank])


def compared(result: Result) -> Estimate:
    """Trainer over bare loop."""
    found = ratio_of_pairs(samples(result, "trainer"), samples(result, "bare"))
    assert found is not None, "every step takes time"
    return found


def document(found: Sequence[Result]) -> str:
    """The table with what has to be known to read it, as Markdown."""
    machines = dict.fromkeys(Machine(**result.machine).in_words for result in found)
    rows = []
    for result in found:
        over = compared(result)
        rows.append(
            [
                f"{result.cell.model}, {counted(result.cell.ranks, 'rank')}",
                str(result.by_rank[0]["num_tokens"]),
                counted(over.num, "pair"),
                seconds(statistics.median(samples(result, "bare"))),
                seconds(statistics.median(samples(result, "trainer"))),
                ratio(over),
                verdict(over, LIMIT).value,
                percent(result.foreign_share(int(result.machine["num_cores"]))),
            ]
        )
    head = ["model", "tokens of a rank", "pairs", "bare loop", "trainer", "trainer over bare loop"]
    head += [f"limit {LIMIT}", "CPU of others"]
    return f"Measured on: {'; '.join(machines)}\n\n{table(head, rows)}"


def figures(found: Sequence[Result]) -> list[Figure]:
    """What there is to draw."""
    labels = [f"{result.cell.model}, {counted(result.cell.ranks, 'rank')}" for result in found]
    sides = ("bare", "trainer")
    return [
        Intervals(
            title="Trainer over bare loop",
            axis="median ratio of the pairs and its 95 % interval; dashed: the limit",
            limit=LIMIT,
            labels=labels,
            values=[compared(result) for result in found],
        ),
        Bars(
            title="Time of a step",
            axis="seconds",
            labels=labels,
            values={s: [statistics.median(samples(result, s)) for result in found] for s in sides},
            spread={s: [samples(result, s) for result in found] for s in sides},
        ),
    ]


def report(options: StepOptions) -> None:
    """Publish all that lies in the output folder."""
    if found := results.read_all(options.output, [PART]):
        text = document(found)
        publish(options, options.output, "Steps", text, figures(found), region=REGION)
    else:
        print(f"There are no results in {options.output}.", file=sys.stderr)


def work(options: StepOptions) -> int:
    """Measure and report; the exit code."""
    matrix = Matrix(options, options.output)
    if not options.report:
        cells = [
            Cell(part=PART, case=_CASE, model=model, ranks=world_size)
            for model in options.model
            for world_size in options.ranks
        ]
        matrix.require_room(cells, room_of)
        matrix.carry_out(
            cells,
            lambda cell, folder, budget, tell: measure(cell, folder, budget, tell, options),
            settings={"steps": options.steps},
        )
    report(options)
    return matrix.end()


def main() -> None:
    """The program."""
    options = tyro.cli(StepOptions, prog="python -m benchmarks.train_step", description=__doc__)
    leave(lambda: work(options))


if __name__ == "__main__":
    main()
