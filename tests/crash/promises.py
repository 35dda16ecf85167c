"""What a run owes after all that was said so far: what may be loaded, and what has to be there. Pure.

Nothing here looks at a disk: what a crash state is judged by comes from what the managers were asked for
and what they have answered, in the order in which it happened.

    notes of a history -> Promises.after -> may_load, owed -> checking.py

The notes, whose target is a step and whose content is JSON:

    begun         right before ``save``: {"by": .., "keep": keep_latest_k, "is_last": .., "is_full": ..}
    acknowledged  the manager has said that the save of this step is complete: {"by": ..}
    loaded        a run has loaded the step and goes on from it: {"by": .., "is_asked": whether by load_step}
    pinned        a user has put a file PIN into it
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from tests.crash.operations import Kind, Operation

BEGUN, ACKNOWLEDGED, LOADED, PINNED = "begun", "acknowledged", "loaded", "pinned"
_NONE: frozenset[Any] = frozenset()


@dataclass(frozen=True, order=True, slots=True)
class Saved:
    """One state that was saved, or was to be."""

    step: int
    by: str
    """Which run has saved it; with the step it tells every value in it."""

    is_full: bool = True


@dataclass(frozen=True, slots=True)
class Promises:
    """What is owed at one moment of a history."""

    counting: frozenset[Saved] = _NONE
    """Acknowledged, of the history that counts, and not released by retention."""

    unsure: frozenset[Saved] = _NONE
    """Begun and not acknowledged: it may be complete or not."""

    left: frozenset[Saved] = _NONE
    """Acknowledged, and put aside since: of another history, or pinned and saved again."""

    leaving: frozenset[Saved] = _NONE
    """Of another history, which is being put aside; until a save of the new one is complete any of them
    may be the newest that is still in its place."""

    pinned: frozenset[int] = _NONE
    loaded: int | None = None
    """What the newest run has loaded, until its first save puts aside what lies beyond."""

    @property
    def owed(self) -> frozenset[Saved]:
        """What has to be there, whole."""
        return self.counting | self.left

    @property
    def may_load(self) -> frozenset[Saved]:
        """One of these is what a start without any wishes goes on from."""
        full = sorted(each for each in self.counting if each.is_full)
        newest = frozenset(full[-1:])
        at_least = full[-1].step if full else 0
        begun = {each for each in self.unsure | self.leaving if each.is_full}
        return newest | {each for each in begun if each.step >= at_least}

    @property
    def may_begin_anew(self) -> bool:
        """Whether a start may find nothing to go on from."""
        return not any(each.is_full for each in self.counting)

    def after(self, notes: Iterable[Operation]) -> "Promises":
        """What is owed once all ``notes`` were left as well; operations of other kinds say nothing.

        Of what all ranks note the first counts, and the others say nothing new. What was loaded
        is noted by one rank alone.
        """
        found = self
        for each in notes:
            if each.kind is Kind.NOTE and each.path in _RULES:
                facts = json.loads(each.content or b"{}")
                found = _RULES[each.path](found, int(each.target), facts)
        return found

    def _begun(self, step: int, facts: dict[str, Any]) -> "Promises":
        saved = Saved(step, facts["by"], facts.get("is_full", True))
        if saved in self.unsure | self.counting:
            return self
        found = self if self.loaded is None else self._settled(self.loaded)
        if facts["keep"] and not facts.get("is_last", False):
            found = replace(found, counting=found.counting - found._expired(facts["keep"]))
        return replace(found, unsure=found.unsure | {saved})

    def _settled(self, loaded: int) -> "Promises":
        beyond = frozenset(each for each in self.counting if each.step > loaded)
        unsure = frozenset(each for each in self.unsure if each.step > loaded)
        return replace(
            self,
            counting=self.counting - beyond,
            unsure=self.unsure - unsure,
            left=self.left | beyond,
            leaving=beyond | unsure,
            loaded=None,
        )

    def _expired(self, keep: int) -> frozenset[Saved]:
        full = sorted(each for each in self.counting if each.is_full and each.step)
        weights = sorted(each for each in self.counting if not each.is_full and each.step)
        # The save that begins takes one of the places.
        old = full[: max(0, len(full) - keep + 1)] + weights[: max(0, len(weights) - keep)]
        return frozenset(each for each in old if each.step not in self.pinned)

    def _acknowledged(self, step: int, facts: dict[str, Any]) -> "Promises":
        begun = frozenset(
            each for each in self.unsure if (each.step, each.by) == (step, facts["by"])
        )
        if not begun:
            return self
        before = frozenset(each for each in self.counting if each.step == step)
        is_pinned = step in self.pinned
        return replace(
            self,
            counting=self.counting - before | begun,
            unsure=self.unsure - begun,
            left=self.left | before if is_pinned else self.left,
            leaving=_NONE,
            pinned=self.pinned - {step},  # the file has gone aside with what it lay in
        )

    def _loaded(self, step: int, facts: dict[str, Any]) -> "Promises":
        saved = Saved(step, facts["by"])
        found = replace(self, loaded=step)
        if saved in self.unsure:
            # It was complete after all, and from now on somebody relies on it.
            found = found._acknowledged(step, facts)
        if not facts.get("is_asked", False):
            # What is newer would have been loaded, so what was unsure is known to be nothing.
            found = replace(found, unsure=_NONE)
            # Among them one that was put aside before anybody knew that it is complete.
            known = found.left | {saved}
            back = frozenset(each for each in found.leaving & known if each.step <= step)
            found = replace(
                found, counting=found.counting | back, left=found.left - back, leaving=_NONE
            )
        return found

    def _pinned(self, step: int, facts: dict[str, Any]) -> "Promises":
        return replace(self, pinned=self.pinned | {step})


_RULES = {
    BEGUN: Promises._begun,
    ACKNOWLEDGED: Promises._acknowledged,
    LOADED: Promises._loaded,
    PINNED: Promises._pinned,
}


def facts(**values: Any) -> bytes:
    """The content of a note."""
    return json.dumps(values).encode()
