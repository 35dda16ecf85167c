"""What the asynchronous saves through torch_checkpointing are to keep to, and whether they do. Pure.

Beside the comparison with the bare library, which every manager is held to, they have limits of their
own, in copies of the state that the machine makes and in saves of their own.

    Saves of tc-async -> aims_of -> the table of ``aims_table``
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.pairs import Estimate, estimate, ratio_of_pairs, Verdict, verdict
from benchmarks.harness.table import counted, NOTHING, ratio, table
from benchmarks.saving.cases import LIBRARY, MANAGER
from benchmarks.saving.findings import METRICS, Saves

CASE = "tc-async"
_NO_WAIT_SECONDS = 0.001
"""As good as no wait: less than the ranks of a step are apart anyway."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Aim:
    """One limit and what was measured of it."""

    title: str
    limit: float
    found: Estimate | None
    """None where the machine has not told what it is measured in."""

    @property
    def verdict(self) -> Verdict:
        if self.found is None:
            return Verdict.TOO_FEW
        return verdict(self.found, self.limit)


def aims_of(saves: Saves) -> list[Aim]:
    """The limits of the manager in this cell."""
    copy = saves.limit("blocked")
    blocked = saves.samples(MANAGER, "blocked")
    later = statistics.median(blocked)
    firsts = [one / later for one in saves.first(MANAGER, METRICS["blocked"].of)]
    # What the writer process needs for itself is no buffer, and does not grow with the state.
    memory = saves.memory(MANAGER, "peak_own", "peak_shared")
    waits = saves.samples(MANAGER, "wait_beside")
    durable = [saves.samples(side, "durable") for side in (MANAGER, LIBRARY)]
    return [
        Aim(
            title="save() itself, in copies",
            limit=0.05,
            found=_in_copies(saves.samples(MANAGER, "call"), copy),
        ),
        Aim(
            title="wait after a forward and backward, in ms",
            limit=1000 * _NO_WAIT_SECONDS,
            found=estimate(waits).scaled(1000) if waits else None,
        ),
        Aim(
            title="blocked, nothing to overlap, in copies",
            limit=2.2,
            found=_in_copies(blocked, copy),
        ),
        Aim(title="first save over a later one, blocked", limit=1.5, found=estimate(firsts)),
        Aim(title="durable, over the library", limit=1.15, found=ratio_of_pairs(*durable)),
        Aim(title="memory, in states of the rank", limit=1.1, found=estimate(memory)),
    ]


def aims_table(saves: Sequence[Saves]) -> str:
    """A row per cell, and a column per limit."""
    rows, titles = [], ["state"]
    for cell in saves:
        if cell.result.cell.case == CASE and MANAGER in cell.sides:
            aims = aims_of(cell)
            titles = ["state", *(f"{aim.title}: {aim.limit:g}" for aim in aims)]
            place = f"{cell.result.cell.model}, {counted(cell.result.cell.ranks, 'rank')}"
            rows.append([place, *(_told(aim) for aim in aims)])
    return table(titles, rows) if rows else ""


def _told(aim: Aim) -> str:
    if aim.found is None:
        return NOTHING
    return f"{ratio(aim.found)} {aim.verdict.value}"


def _in_copies(samples: Sequence[float], copy: float | None) -> Estimate | None:
    return None if copy is None else estimate(samples).scaled(1 / copy)
