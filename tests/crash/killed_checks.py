"""What holds after each start of a run that was killed, and of its folder in the end.

test_kills.py, test_failing_disks.py -> Survival.after (each start) -> Survival.in_the_end
"""

import signal
from pathlib import Path

from torchtitan.components.checkpointer.integrity.manifest import MANIFEST, read
from torchtitan.components.checkpointer.storage import FilesystemStorage

from tests.crash.killed_runs import KEPT, load_each, PATIENCE, processes_of, Start, THERE
from tests.ranks.pool import run_on_ranks
from tests.ranks.processes import await_end
from tests.unit_tests.components.checkpointer.runs import names
from tests.unit_tests.components.checkpointer.ways import Way


class Survival:
    """What one run has been through; each method fails with the whole story of the start."""

    def __init__(self, folder: Path, way: Way, states: list[list[str]]) -> None:
        """``states`` are the digests of the state after each step, on each rank."""
        self._folder, self._way, self._states = folder, way, states
        self.acknowledged: list[int] = []
        """The steps that the run was told of as durable, on any rank."""
        self._resumed: set[int] = set()

    def after(self, begun: Start, story: str) -> None:
        """Check what ``begun`` went on from, and that what counts is there."""
        for told in begun.told:
            if told.what == "resumed":
                assert told.step >= max(self.acknowledged, default=0), story
            if told.what in ("resumed", "done"):
                assert told.state == self._states[told.rank][told.step], story
            if told.what == "acknowledged":
                assert told.state == THERE, story
        # Only a lock whose holder cannot be looked for is waited for.
        assert not any("Waiting up to" in end.log for end in begun.ends), story
        self._resumed |= {*begun.steps("resumed")}
        self.acknowledged = sorted({*self.acknowledged, *begun.steps("acknowledged")})
        # The save in flight has one of the places.
        kept = {f"step-{step}" for step in self.acknowledged[1 - KEPT :]}
        assert kept <= {*self._way.complete(self._folder)}, story

    def in_the_end(self, story: str) -> None:
        """Check the folder after a start that was left alone: whole checkpoints, and nothing else."""
        found = self._way.complete(self._folder)
        assert names(self._folder) == found, story
        steps = sorted(int(name.removeprefix("step-")) for name in found)
        # Nothing expires with the last save.
        assert KEPT <= len(steps) <= KEPT + 1, story
        assert {*self.acknowledged[-KEPT:]} <= {*steps}, story
        for step in steps:
            path = self._folder / f"checkpoint/step-{step}"
            manifest = read(FilesystemStorage(), str(path))
            there = {str(file.relative_to(path)) for file in path.rglob("*")}
            if manifest is not None:
                assert there == {MANIFEST, *manifest.files}, story
            else:
                # Killed when all but that was there; it counts, with what was to become the manifest.
                assert step in self._resumed and self._way.format.backend == "dcp", story
                temporary = {name for name in there if name.endswith(".tmp")}
                assert temporary <= {f"{MANIFEST}.tmp"}, story
        loaded = run_on_ranks(2, load_each, self._folder, self._way, steps, **PATIENCE)
        assert loaded == [[states[step] for step in steps] for states in self._states], story
        await_end(processes_of(self._folder))


def check_ends(begun: Start, way: Way, story: str) -> None:
    """Each rank was killed, has felt the loss of another one in time, or is through."""
    is_ended = any(victim.startswith("rank") for victim in begun.victims)
    for end in begun.ends:
        # A writer waits for that of a dead rank for as long as the limit, if it has not met it yet; what
        # ends it sooner is not the manager's, but the launcher.
        is_meeting = way.has_writer and is_ended and not begun.has_saved
        assert end.how != "hung" or is_meeting, story
        if f"rank {end.rank}" in begun.victims:
            assert end.exit_code == -signal.SIGKILL or end.how == "returned", story
        elif not is_ended:
            # The loss of a writer costs a save, and not the run.
            assert end.how == "returned", story
