"""Stories on a disk that fails: what a run answers then, whether it goes on, and what is owed after it.

A save may fail only if something was refused in it, and in one way only. So each save of a story is
looked at by itself: it is good, or it is told as failed, once and with step, path and cause.

    stories.py -> TroubledStage -> TroubledRun -> a real manager on a FaultyDisk
                        |-> notes, FAILED among them -> owed_after -> checking.py
"""

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan.components.checkpointer.errors import (
    CheckpointNotFoundError,
    CheckpointSaveError,
    CheckpointSaveTimeoutError,
)

from tests.crash.faults import Faults, How
from tests.crash.operations import Operation
from tests.crash.promises import BEGUN, facts, Promises, Saved
from tests.crash.small_run import Note, SmallRun
from tests.crash.stories import Stage
from tests.unit_tests.components.checkpointer.ways import Way

FAILED = "failed"
"""A note: the save of this step, the newest begun, is told as failed. ``may_count``: and as one whose
checkpoint could not be taken back."""

TROUBLE = "trouble"
"""A note: something was refused in the save that is noted next."""

RAISE, WARN = "raise", "warn"

_STAYS = "what names it as complete stays there"
_CAUSES = ("Input/output error", "No space left on device", "Invalid argument")


class RunEndedError(Exception):
    """The story cannot go on: its run has ended with an error, or has nothing to begin from."""


class Warnings(logging.Handler):
    """What is told meanwhile."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> "Warnings":
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger().removeHandler(self)


@dataclass
class Life:
    """What has happened in the runs of one story so far."""

    faults: Faults
    policy: str
    note: Note
    num_runs: int = 0
    num_failed: int = 0
    acknowledged: set[int] = field(default_factory=set)
    full: set[int] = field(default_factory=set)

    def recover(self) -> None:
        """Mend a disk that stays as it is, once it has cost two saves of a run that goes on."""
        fault = self.faults.fault
        stays = fault is not None and fault.how in (How.FULL, How.GONE)
        if self.policy == WARN and stays and self.num_failed == 2:
            self.faults.end()


class TroubledRun(SmallRun):
    """A run that bears failed saves, or ends with the first."""

    def __init__(self, folder: str, way: Way, life: Life, **settings: Any) -> None:
        self._life = life
        policy: dict[str, Any] = {"on_save_failure": life.policy, "lock_timeout_seconds": 10}
        if life.policy == WARN:
            policy["max_failed_saves"] = 99
        super().__init__(folder, way, note=life.note, **policy, **settings)

    def load(self, step: int = -1) -> bool:
        try:
            is_loaded = super().load(step)
        except CheckpointNotFoundError:
            if self._life.acknowledged & ({step} if step != -1 else self._life.full):
                raise
            is_loaded = False
        if not is_loaded and self._life.num_runs > 1:
            # The run before it has lost all its saves; what the story is about has not come about.
            self.close()
            raise RunEndedError
        return is_loaded

    def save(self, step: int, *, by: str = "", is_last: bool = False) -> None:
        life, faults = self._life, self._life.faults
        life.recover()
        num_raised = len(faults.raised)
        self.by = by or self.by
        self.become(step)
        is_full = not (is_last and self.weights_alone)
        asked = {"by": self.by, "keep": self.keep, "is_last": is_last, "is_full": is_full}
        life.note(BEGUN, step, facts(**asked))
        with Warnings() as warned:
            raised = self._try(step, is_last)
        is_refused = len(faults.raised) > num_raised
        if is_refused:
            life.note(TROUBLE, step, b"")
        told = [line for line in warned.lines if line.startswith("Saving the checkpoint of")]
        told += [] if raised is None else [str(raised)]
        if not told:
            self._open = step, self.by
            self.settle()
            life.acknowledged.add(step)
            life.full |= {step} if is_full else set()
            return
        life.num_failed += 1
        stays = any(_STAYS in line for line in warned.lines)
        life.note(FAILED, step, facts(by=self.by, is_full=is_full, may_count=stays))
        assert is_refused, f"the save of step {step} failed and nothing was refused in it: {told}"
        _require_clear(told, step, f"{self.manager.folder}/step-{step}")
        if raised is not None:
            assert life.policy == RAISE or is_last, f"it was to go on, and raised {raised}"
            self.close()
            raise RunEndedError

    def _try(self, step: int, is_last: bool) -> CheckpointSaveError | None:
        try:
            is_saved = self.manager.save(step, last_step=is_last)
        except CheckpointSaveError as error:
            assert not isinstance(error, CheckpointSaveTimeoutError), error
            return error
        assert (
            is_saved or self._life.policy == WARN
        ), f"step {step} was not saved, and nobody was told"
        return None


def _require_clear(told: list[str], step: int, path: str) -> None:
    """Check that a failure was told once, in words of use."""
    assert len(told) == 1, f"told more than once: {told}"
    assert f"Saving the checkpoint of step {step} to {path} " in told[0], told[0]
    assert any(cause in told[0] for cause in _CAUSES), f"it does not say why: {told[0]}"


@dataclass(frozen=True)
class TroubledStage(Stage):
    """Where a story takes place on a disk that fails; its own ``disk`` is that of users, which does not."""

    life: Life = field(kw_only=True)

    def run(self, by: str, **settings: Any) -> SmallRun:
        self.life.num_runs += 1
        return TroubledRun(self.disk.root, self.way, self.life, by=by, **settings)

    def pin(self, step: int) -> None:
        if os.path.isdir(f"{self.disk.root}/checkpoint/step-{step}"):
            super().pin(step)


def is_nothing_to_go_on_from(owed: Promises) -> bool:
    """Whether all full saves have failed and that of the weights was good: a start refuses that, in words."""
    weights = [each for each in owed.counting if not each.is_full]
    return bool(weights) and not any(each.is_full for each in owed.may_load)


def owed_after(notes: Iterable[Operation]) -> Promises:
    """What is owed where saves have failed: their checkpoints must not count, unless that was said."""
    found = Promises()
    for each in notes:
        found = found.after([each])
        if each.path == FAILED:
            found = _after_failure(found, each)
    return found


def _after_failure(found: Promises, failed: Operation) -> Promises:
    said = json.loads(failed.content)
    if said["may_count"]:
        return found
    saved = Saved(int(failed.target), said["by"], said["is_full"])
    return replace(found, unsure=found.unsure - {saved})
