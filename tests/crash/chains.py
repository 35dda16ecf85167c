"""One crash after the other: what starts in what a crash has left is cut short as well, again and again.

What each run does and where it is cut is drawn from a seed: it goes on or back, saves steps, some of them
again or as the last one, pins, deletes at once or when there is time. After a kill the system still has
all that was done, by all runs of the chain; after a power cut there is only what the disk has kept.

    tree -> a run in it, recorded -> crash states after some of its operations -> checking.py
      ^--- one of them <-----------------------'
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchtitan.tools import disk

from tests.crash.checking import Checker, PromiseBrokenError
from tests.crash.model import DiskModel
from tests.crash.operations import Kind, Operation, read_log
from tests.crash.points import crash_states, KILLED
from tests.crash.promises import Promises
from tests.crash.recording import RecordingDisk
from tests.crash.small_run import NAMES, SmallRun
from tests.crash.stories import Stage
from tests.crash.tree import EMPTY, lay_out, Tree
from tests.unit_tests.components.checkpointer.ways import Way

_NUM_CHECKED = 4
"""Operations of each run after which a crash is looked at; of each the kill, and another state."""

_DEPTHS = (2, 3, 3)


@dataclass
class Chain:
    """The disk and what was said so far, and what is drawn next."""

    way: Way
    place: Path
    draw: random.Random

    def __post_init__(self) -> None:
        self._start: Tree = EMPTY
        self._done: list[Operation] = []
        """What happened since the disk was as ``_start``, and before that the notes alone."""
        self._names = [name for name in NAMES if name != "again"]
        self.story: list[str] = []
        """What has happened, for people."""

    def grow(self) -> int:
        """Live through runs and crashes; how many states were checked.

        Raises:
            PromiseBrokenError: tells the story up to there.
        """
        (self.place / "checked").mkdir()
        checker = Checker.of(self.way, self.place / "checked")
        count = 0
        for number in range(self.draw.choice(_DEPTHS)):
            for tree, promises in self._next(self.place / f"run-{number}"):
                count += 1
                try:
                    checker.check(tree, promises)
                except PromiseBrokenError as error:
                    raise PromiseBrokenError("\n".join([*self.story, str(error)])) from error
        return count

    def _next(self, root: Path) -> Iterator[tuple[Tree, Promises]]:
        """What crashes leave of one more run; the chain goes on from one of them."""
        model = DiskModel(self._start)
        for each in self._done:
            model.apply(each)
        lay_out(model.tree(), root)
        self._live(Stage(self.way, RecordingDisk(str(root), f"{root}.log")))
        history = read_log(f"{root}.log")
        chosen = self.draw.sample(range(len(history)), _NUM_CHECKED)
        cut, done, crash = self.draw.choice(chosen), self._done, None
        for number, operation in enumerate(history):
            model.apply(operation)
            done = [*done, operation]
            if number not in chosen:
                continue
            states = list(crash_states(model, operation))
            picked = [states[0], self.draw.choice(states)]
            if number == cut:
                crash = (*self.draw.choice(picked), done)
            for variant, tree in picked:
                self.story.append(f"checked after operation {number + 1} ({operation}): {variant}")
                yield tree, Promises().after(done)
                self.story.pop()
            if number == max(chosen):
                break
        assert crash is not None
        self._crash(*crash)

    def _crash(self, variant: str, tree: Tree, done: list[Operation]) -> None:
        self.story.append(
            f"cut after operation {len(done) - len(self._done)} ({done[-1]}): {variant}"
        )
        if variant == KILLED:
            self._done = done
        else:
            self._start, self._done = tree, [each for each in done if each.kind is Kind.NOTE]

    def _live(self, stage: Stage) -> None:
        owed, draw = Promises().after(self._done), self.draw
        settings = {
            "keep": draw.choice([0, 2, 2, 3]),
            "last_save_model_only": draw.random() < 0.3,
            "lock_timeout_seconds": 10,
            # No crash damages what counts.
            "on_damaged": "fail",
        }
        full = sorted(each.step for each in owed.counting if each.is_full)
        asked = draw.choice(full) if full and draw.random() < 0.35 else -1
        with disk.using(stage.disk):
            run = stage.run(self._name(), **settings)
            self.story.append(f"run {run.by}, {settings}, load {asked}")
            if run.load(asked):
                assert asked != -1 or run.found() in owed.may_load, f"{self.story}: {run.found()}"
            else:
                assert owed.may_begin_anew, f"{self.story}: nothing was loaded"
            if draw.random() < 0.5:
                run.delete_before_writing()
            for left in reversed(range(draw.randint(1, 3))):
                self._save(stage, run, may_be_last=not left and bool(full))
            run.close()

    def _save(self, stage: Stage, run: SmallRun, *, may_be_last: bool) -> None:
        step, draw = run.progress.values["step"], self.draw
        # A name is left for each run that may follow.
        if step and len(self._names) >= max(_DEPTHS) and draw.random() < 0.25:
            name = self._name()
            self.story.append(f"save {step} again, by {name}")
            run.save(step, by=name)
        else:
            step += draw.choice([1, 1, 1, 2])
            is_last = may_be_last and draw.random() < 0.35
            self.story.append(f"save {step}{', the last one' if is_last else ''}")
            run.save(step, is_last=is_last)
        if draw.random() < 0.15:
            run.settle()
            self.story.append(f"pin {step}")
            stage.pin(step)

    def _name(self) -> str:
        return self._names.pop(self.draw.randrange(len(self._names)))
