"""A run that is killed again and again, and what each of its starts tells before it dies.

Ranks save after each step with retention. What they know goes into a file at once, with one call of the
system: so it outlives them, and nothing is told that had not happened.

    test -> start -> go_on (each rank) -> tell -> notes -> Start -> killed_checks.py
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.agreement import gather
from torchtitan.components.checkpointer.integrity.manifest import RunDescription
from torchtitan.tools.disk import using

from tests.crash.killing import Kill, KillingDisk
from tests.ranks.pool import end_of_ranks, RankEnd
from tests.ranks.steering import await_end_of_save
from tests.unit_tests.components.checkpointer.runs import build_run, Run
from tests.unit_tests.components.checkpointer.ways import Way

NUM_SAVES = 50

KEPT = 3
"""``--checkpoint.keep_latest_k`` of these runs."""

LAST_STEPS = 3
"""A start that is left alone makes so many saves at least: enough to delete what others have left."""

OF_THE_RUN = "KILLED_RUN"
"""In the environment of each process of such a run: the folder that it belongs to."""

TOLD = "told"
THERE = "there"

PATIENCE = {"timeout_seconds": 200.0, "settle_seconds": 40.0}


@dataclass(frozen=True)
class Told:
    """What a rank has told."""

    rank: int
    what: str
    step: int
    state: str = ""
    """The digest of all values; of a step that is acknowledged: whether it is ``THERE``."""


@dataclass(frozen=True)
class Start:
    """One start of the run, after all of its ranks have ended."""

    kills: tuple[Kill, ...]
    told: list[Told]
    struck: list[int]
    """Which of the kills have happened."""
    ends: list[RankEnd]

    def steps(self, what: str) -> list[int]:
        return [each.step for each in self.told if each.what == what]

    @property
    def has_saved(self) -> bool:
        """Whether it has got as far as a save that was acknowledged."""
        return max(self.steps("acknowledged"), default=0) > max(self.steps("resumed"), default=0)

    @property
    def victims(self) -> set[str]:
        return {victim for place in self.struck for victim in self.kills[place].victims}

    def __str__(self) -> str:
        """For a failure: what was planned, told and logged."""
        plan = "; ".join(
            f"{kill}{'' if place in self.struck else ' (not reached)'}"
            for place, kill in enumerate(self.kills)
        )
        told = "\n".join(
            f"  {each.rank} {each.what} {each.step} {each.state}" for each in self.told[-12:]
        )
        ends = "\n".join(
            f"--- rank {end.rank}: {end.how}, {end.exit_code}\n{end.detail}\n{end.log}"
            for end in self.ends
        )
        return f"kills: {plan or 'none'}\ntold:\n{told}\n{ends}"


def start(
    folder: Path, notes: Path, way: Way, *, until: int = 0, kills: Sequence[Kill] = ()
) -> Start:
    """Start the run that lives in ``folder``, and let it go on until it ends or is killed.

    ``notes`` is a directory that is made for what is told meanwhile.
    """
    return started(notes, go_on, folder, way, until, tuple(kills), kills=tuple(kills))


def started(
    notes: Path, act: Callable[..., None], *arguments: Any, kills: tuple[Kill, ...] = ()
) -> Start:
    """What comes of ``act(*arguments, notes)`` on two ranks."""
    notes.mkdir()
    ends = end_of_ranks(2, act, *arguments, notes, **PATIENCE)
    struck = [place for place in range(len(kills)) if (notes / str(place)).exists()]
    told = notes / TOLD
    lines = told.read_text().splitlines() if told.exists() else []
    return Start(kills, [parsed(line) for line in lines], struck, ends)


def parsed(line: str) -> Told:
    rank, what, step, *state = line.split()
    return Told(int(rank), what, int(step), *state)


def go_on(folder: Path, way: Way, until: int, kills: tuple[Kill, ...], notes: Path) -> None:
    """On each rank: resume, and train with a save after each step, for ``LAST_STEPS`` at least."""
    os.environ[OF_THE_RUN] = str(folder)
    disk = KillingDisk(notes, dist.get_rank(), tuple(gather(os.getpid())), kills)
    with using(disk):
        run = build_run(folder, keep_latest_k=KEPT, last_save_model_only=False, **way.settings)
        run.manager.describe_run(RunDescription({}, {}))
        try:
            run.manager.load()
            tell(notes, "resumed", run.step, digest(run))
            until = max(until, run.step + LAST_STEPS)
            train_and_save(run, notes)
            await_end_of_save(run.manager)  # until then processes are just starting
            tell_newest(run, notes)
            if dist.get_rank() == 0:
                disk.start_clocks()
            while run.step < until:
                train_and_save(run, notes, is_last=run.step + 1 == until)
            tell(notes, "done", run.step, digest(run))
            run.manager.close()
        except BaseException:
            with suppress(Exception):  # as the trainer does; the first error is the one to tell
                run.manager.close()
            raise


def train_and_save(run: Run, notes: Path, *, is_last: bool = False) -> None:
    """One step, and its save; tells that it has begun, and what the manager knows to be good."""
    run.train(run.step + 1, save=False)
    # The save before, beside this step until here; how it ended comes with the next one.
    await_end_of_save(run.manager)
    tell_newest(run, notes)
    tell(notes, "begun", run.step)
    run.manager.save(run.step, last_step=is_last)
    tell_newest(run, notes)


def tell_newest(run: Run, notes: Path) -> None:
    """Tell what the manager says is good, and whether it is: nothing deletes the newest one."""
    if run.manager.newest_good is not None:
        step = run.manager.newest_good[0]
        path = Path(run.manager.folder) / f"step-{step}" / run.manager.FORMAT.marker
        tell(notes, "acknowledged", step, THERE if path.exists() else "missing")


def tell(notes: Path, what: str, step: int, state: str = "") -> None:
    line = f"{dist.get_rank()} {what} {step} {state}\n".encode()
    descriptor = os.open(notes / TOLD, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def digest(run: Run) -> str:
    """The same for two states that are, on this rank, the same bit for bit."""
    parts = (run.model, run.optimizers, run.lr_schedulers, run.dataloader, run.progress)
    values = [_plain(it) for part in parts for it in sorted(part.state_dict().items())]
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.to_local()  # no collective: another rank may be dead by now
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return [(key, _plain(it)) for key, it in sorted(value.items())]
    return [_plain(it) for it in value] if isinstance(value, (list, tuple)) else value


def undisturbed(folder: Path, until: int) -> list[str]:
    """The digests of the state after each step on this rank, in a run that neither saves nor is killed."""
    run = build_run(folder, enable=False)
    digests = [digest(run)]
    while run.step < until:
        run.train(run.step + 1)
        digests.append(digest(run))
    return digests


def load_each(folder: Path, way: Way, steps: list[int]) -> list[str]:
    """The digests of the states of these checkpoints on this rank."""
    found = []
    for step in steps:
        run = build_run(folder, seed=5, load_only=True, **way.settings)
        assert run.manager.load(step) and run.step == step
        found.append(digest(run))
        run.manager.close()
    return found


def processes_of(folder: Path) -> list[int]:
    """The writer processes of the run that are there; its ranks are seen to the end of by the pool."""
    mark = f"{OF_THE_RUN}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # it has just ended, or is somebody else's
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
