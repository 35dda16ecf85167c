"""Put the files of a run together: which belong to one start, and what counts of several starts.

The one fact to know: the later start wins. A start that goes on after step N replaces whatever
earlier starts did beyond N, in the curves and in the count of steps; the time they took is gone
all the same, and is counted.

    files -> RankLog each, helpers aside -> starts (overlapping in time, each rank once) -> curves, lost steps
"""

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.observability.run_log.rank_log import RankLog, read_rank_log, Save
from torchtitan.observability.run_log.records import BrokenLines, log_files
from torchtitan.observability.structured_logger.records import main_source

# Ranks of one start begin to write at about the same time; a restart takes longer, it loads torch.
_SLACK_SECONDS = 1.0
# One process reads some 20 MB a second; a second process takes a tenth of one to start.
_ALONE_BYTES = 20_000_000


@dataclass(kw_only=True, slots=True, frozen=True)
class Start:
    """One start of a run on all its ranks."""

    ranks: dict[int, RankLog]

    @property
    def begin(self) -> float:
        return min(log.begin for log in self.ranks.values())

    @property
    def end(self) -> float:
        return max(log.end for log in self.ranks.values())

    @property
    def resumed_after(self) -> int | None:
        """The step it went on after; None if it never began one."""
        found = [log.resumed_after for log in self.ranks.values()]
        return min((step for step in found if step is not None), default=None)

    @property
    def last_step(self) -> int | None:
        """The last step that a rank finished."""
        return max((step for log in self.ranks.values() for step in log.step_seconds), default=None)

    @property
    def closed_in_order(self) -> bool:
        """Whether every rank took its leave; a run that was killed or failed does not."""
        return all(log.closed_in_order for log in self.ranks.values())

    def parts(self) -> list[str]:
        """What the time went to, the largest part first."""
        totals: dict[str, float] = {}
        for log in self.ranks.values():
            for part, seconds in log.seconds_by_part.items():
                totals[part] = totals.get(part, 0.0) + seconds
        return sorted((part for part in totals if totals[part]), key=lambda part: -totals[part])

    def mean_seconds(self, part: str) -> float:
        """The time that went to ``part``, as the mean over the ranks."""
        each = [log.seconds_by_part.get(part, 0.0) for log in self.ranks.values()]
        return sum(each) / len(each)

    def waits(self) -> dict[int, float]:
        """Seconds that each rank waited for the last one to have its data, over all steps.

        A rank that has its data waits, in the next collective, until every rank has. Whoever is late
        in a later collective shows elsewhere: in the part of the others that holds the collective.
        Exact on one machine; the clocks of several may differ by more than the ranks wait.
        """
        waited = dict.fromkeys(self.ranks, 0.0)
        steps = set.intersection(*(set(log.ready_at) for log in self.ranks.values()))
        for step in steps:
            times = {rank: log.ready_at[step] for rank, log in self.ranks.items()}
            latest = max(times.values())
            for rank, ready in times.items():
                waited[rank] += latest - ready
        return waited


@dataclass(kw_only=True, slots=True, frozen=True)
class Run:
    """All starts of a run, oldest first."""

    folder: Path
    starts: list[Start]
    helpers: list[RankLog] = field(default_factory=list)
    """What processes wrote that worked for a rank, such as one that writes its checkpoints."""

    def curve(self, name: str) -> dict[int, float]:
        """The value of ``name`` by step, over all starts; where several ranks have one, their mean."""
        whole: dict[int, float] = {}
        for start in self.starts:
            if start.resumed_after is None:
                continue
            whole = {step: value for step, value in whole.items() if step <= start.resumed_after}
            whole |= _mean_over_ranks([log.scalars.get(name, {}) for log in start.ranks.values()])
        return dict(sorted(whole.items()))

    def names(self) -> list[str]:
        """The names that have a curve."""
        logs = self._logs()
        return sorted({name for log in logs for name in log.scalars})

    def saves(self) -> list[Save]:
        """All saves, also those that failed, in the order in which they were reported."""
        return sorted(
            (save for log in self._logs() for save in log.saves), key=lambda save: save.reported_at
        )

    def lost_steps(self) -> tuple[int, float]:
        """How many steps no later start built on, and the seconds that these had taken."""
        num_steps, seconds = 0, 0.0
        for index, start in enumerate(self.starts):
            later = [each.resumed_after for each in self.starts[index + 1 :]]
            kept = min((step for step in later if step is not None), default=None)
            if kept is None:
                continue
            lost = [
                {step: taken for step, taken in log.step_seconds.items() if step > kept}
                for log in start.ranks.values()
            ]
            num_steps += len(set().union(*lost))
            seconds += max((sum(each.values()) for each in lost), default=0.0)
        return num_steps, seconds

    def broken(self) -> list[BrokenLines]:
        """The lines that could not be read, for each file."""
        return [log.broken for log in (*self._logs(), *self.helpers)]

    def _logs(self) -> Iterable[RankLog]:
        return (log for start in self.starts for log in start.ranks.values())


def read_run(folder: Path) -> Run:
    """All starts of the run that dumps into ``folder``.

    Raises ``FileNotFoundError`` if it left no structured logs.
    """
    paths = log_files(folder)
    if sum(path.stat().st_size for path in paths) < _ALONE_BYTES:
        logs = [read_rank_log(path) for path in paths]
    else:
        with ProcessPoolExecutor() as pool:
            logs = list(pool.map(read_rank_log, paths))
    if not any(log.num_records for log in logs):
        raise FileNotFoundError(
            f"no record of a run in {', '.join(path.name for path in paths[:3])} in {paths[0].parent}. Name "
            "the --dump_folder of a run; one that has just begun has no records yet."
        )
    logs = [log for log in logs if log.num_records]
    sources = {log.source for log in logs}
    # A helper shares the rank and the time of the process that it works for; it is no start.
    helpers = [log for log in logs if main_source(log.source) in sources]
    starts = group_starts([log for log in logs if main_source(log.source) not in sources])
    return Run(folder=folder, starts=starts, helpers=helpers)


def group_starts(logs: Iterable[RankLog]) -> list[Start]:
    """The starts that ``logs`` belong to, oldest first.

    A run has one live start at a time: files that overlap in time are ranks of one start. (The
    names of the files do not tell: each holds the second at which its rank began to write.)
    """
    starts: list[dict[int, RankLog]] = []
    end = 0.0
    for log in sorted(logs, key=lambda log: log.begin):
        if not starts or log.begin > end + _SLACK_SECONDS or log.rank in starts[-1]:
            starts.append({})
            end = log.end
        starts[-1][log.rank] = log
        end = max(end, log.end)
    return [Start(ranks=dict(sorted(ranks.items()))) for ranks in starts]


def _mean_over_ranks(values: list[dict[int, float]]) -> dict[int, float]:
    steps = {step for each in values for step in each}
    found = {step: [each[step] for each in values if step in each] for step in steps}
    return {step: sum(each) / len(each) for step, each in found.items()}
