"""The words in which a start is told: what was passed over, and what does not count. Pure.

A user who expected another start finds the reason in the line that tells of this one.
"""

import os
from collections.abc import Iterable, Mapping, Sequence

from torchtitan.components.checkpointer.discovery import Kind, OwnFolder, step_name
from torchtitan.components.checkpointer.history import SUPERSEDED, SUPERSEDED_RECORD
from torchtitan.tools import filesystem

FRESH_START = "No checkpoint was provided, this is a fresh start."

_MAX_NAMES = 5
_MEANING = {
    Kind.FULL: "full",
    Kind.MODEL_ONLY: "weights only",
    Kind.UNREADABLE: "its index cannot be read",
    Kind.DAMAGED: "damaged",
}
_OF_ANOTHER: dict[Kind | None, str] = {
    None: "a seed",
    Kind.FULL: "a full checkpoint",
    Kind.MODEL_ONLY: "a checkpoint of weights",
    Kind.UNREADABLE: "a checkpoint, with an index that cannot be read,",
    Kind.DAMAGED: "a damaged checkpoint",
}


def what_was_passed_over(
    reason: str, chosen: int, passed_over: Mapping[int, Kind], own: OwnFolder
) -> str:
    """``reason``, and which steps above the ``chosen`` one were not taken and why."""
    why = {step: _MEANING[kind] for step, kind in passed_over.items()}
    for step in (*own.unfinished.values(), *own.half_deleted.values()):
        if step > chosen:
            why.setdefault(step, why_incomplete(own, step))
    if not why:
        return reason
    named = [f"{step_name(step)} ({why[step]})" for step in sorted(why)]
    return f"{reason}; passed over: {shortened(named)}"


def why_incomplete(own: OwnFolder, step: int) -> str:
    """Why ``step``, whose directory is in the folder, is no complete checkpoint; empty if there is none."""
    if step in own.half_deleted.values():
        return "its deletion did not finish"
    return "its save did not finish" if step in own.unfinished.values() else ""


def what_does_not_count(own: OwnFolder) -> str:
    """A sentence about what lies in the folder beside checkpoints, or nothing."""
    groups = []
    if own.unfinished:
        groups.append(f"{shortened(list(own.unfinished))} (saves that did not finish)")
    if own.half_deleted:
        groups.append(f"{shortened(list(own.half_deleted))} (deletions that did not finish)")
    if own.foreign:
        groups.append(f"{shortened(own.foreign)} (no names of checkpoints)")
    return f" In {own.path} these do not count: {', '.join(groups)}." if groups else ""


def all_damaged(own: OwnFolder, passed_over: Mapping[int, Kind]) -> str:
    """That none of the full checkpoints can be loaded, and what is wrong with each."""
    why = dict(own.damaged)
    for step, kind in passed_over.items():
        if kind is Kind.UNREADABLE:
            why.setdefault(step, _MEANING[kind])
    each = "; ".join(
        f"{step_name(step)}: {why[step].rstrip('.')}" for step in sorted(why, reverse=True)
    )
    return (
        f"{own.path} holds no full checkpoint that is not damaged. {each}. Nothing is begun "
        "anew beside them. Mend one, or load one as far as it can be read with --checkpoint.load_step N "
        "--checkpoint.verify off; to begin again choose a new --checkpoint.folder."
    )


def what_else_there_is(path: str, step: int, *, is_own: bool) -> str:
    """How to load ``path`` instead of a damaged one."""
    if is_own:
        return f"The newest other full one is {step_name(step)}: --checkpoint.load_step {step}"
    return f"The newest other full one beside it is --checkpoint.initial_load_path {path}"


def what_leaves(own: OwnFolder, loaded_step: int, *, is_moved: bool) -> str:
    """That what is beyond the step that was loaded is left, or nothing.

    Args:
        is_moved: whether it is moved aside; otherwise a record says that it does not count.
    """
    newer = sorted(step for step in own.step_paths if step > loaded_step)
    if not newer:
        return ""
    names = shortened(
        [f"{step_name(step)}{' (damaged)' if step in own.damaged else ''}" for step in newer]
    )
    if is_moved:
        what = (
            f"moves {names} of {own.path} into {SUPERSEDED}/, where nothing is loaded or deleted."
        )
    else:
        what = (
            f"writes {SUPERSEDED_RECORD}, which lists {names} of {own.path}: what it lists stays in place, "
            "is passed over from then on, and is not deleted."
        )
    is_history = not own.damaged.keys() >= set(newer)
    behind = " and leaves a history behind" if is_history else ""
    return f"This run goes on from step {loaded_step}{behind}: its first save {what}"


def this_run_cannot(path: str, kind: Kind | None, *, backend: str, own_backend: str) -> str:
    """That ``path`` is of ``backend`` and not of this run's; None as ``kind`` stands for a seed."""
    return f"{path} is {_OF_ANOTHER[kind]} of {backend}, and this run uses {own_backend}, which cannot read it"


def those_of_others(own: OwnFolder) -> str:
    """Which of the steps are of other back ends, as an addition to their list, or nothing."""
    steps: dict[str, list[int]] = {}
    for step, backend in sorted(own.others.items()):
        steps.setdefault(backend, []).append(step)
    return "".join(f" (of {backend}: {found})" for backend, found in sorted(steps.items()))


def listed(steps: Iterable[int]) -> str:
    """Steps for an error message."""
    return str(sorted(steps) or "none")


def shortened(names: Sequence[str]) -> str:
    """The first few ``names`` and how many more there are."""
    more = len(names) - _MAX_NAMES
    shown = ", ".join(names[:_MAX_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown


def is_inside(path: str, folder: str) -> bool:
    """Whether ``path`` is ``folder`` or below it, judged by name."""
    if filesystem.is_remote(path) or filesystem.is_remote(folder):
        return f"{path}/".startswith(f"{folder.rstrip('/')}/")
    folder = os.path.abspath(folder)
    return os.path.commonpath([os.path.abspath(path), folder]) == folder
