"""Where a run stands: the training step and the tags that every structured record carries.

Two homes for each value. The module global is what plain code and its background threads see
(a checkpoint thread must stamp the step of the training loop). The ContextVar is what an asyncio
task sees, so that tasks working on different steps do not stamp each other's.

    set_step / add_step_tag -> [globals | ContextVars] -> get_step / get_step_tags -> the formatter
"""

import asyncio
from contextvars import ContextVar

_STEP_GLOBAL: int | None = None
_STEP_CV: ContextVar[int | None] = ContextVar("structured_logger_step", default=None)
_RELATIVE_STEP_GLOBAL: int | None = None
_RELATIVE_STEP_CV: ContextVar[int | None] = ContextVar(
    "structured_logger_relative_step", default=None
)
_TAGS_GLOBAL: tuple[str, ...] = ()
_TAGS_CV: ContextVar[tuple[str, ...] | None] = ContextVar("structured_logger_tags", default=None)


def running_task() -> "asyncio.Task[object] | None":
    """The asyncio task that runs the caller, or None in plain code."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def set_step(step: int, *, relative_step: int | None = None) -> None:
    """Enter ``step``; ``relative_step`` counts from the step this process resumed at. Drops all tags."""
    global _STEP_GLOBAL, _RELATIVE_STEP_GLOBAL
    _STEP_GLOBAL = step
    _STEP_CV.set(step)
    _RELATIVE_STEP_GLOBAL = relative_step
    _RELATIVE_STEP_CV.set(relative_step)
    clear_step_tags()


def get_step() -> int | None:
    """The current step; None before the first ``set_step``."""
    step = _STEP_CV.get()
    return _STEP_GLOBAL if step is None else step


def get_relative_step() -> int | None:
    """The current step counted from the resumed one; None when it was not given."""
    # A task or thread whose own step is unset has no relative step of its own either.
    return _RELATIVE_STEP_GLOBAL if _STEP_CV.get() is None else _RELATIVE_STEP_CV.get()


def add_step_tag(tag: str) -> None:
    """Mark the current step, once, with ``tag`` (for example ``gc`` or ``eval``)."""
    tags = get_step_tags()
    if tag not in tags:
        _store_tags((*tags, tag))


def clear_step_tags() -> None:
    """Forget the tags of the current step."""
    _store_tags(())


def get_step_tags() -> tuple[str, ...]:
    """The tags of the current step, oldest first."""
    tags = _TAGS_CV.get()
    return _TAGS_GLOBAL if tags is None else tags


def _store_tags(tags: tuple[str, ...]) -> None:
    global _TAGS_GLOBAL
    if running_task() is not None:
        _TAGS_CV.set(tags)
        return
    # Unset the ContextVar: a pool thread keeps its context for life and would go on
    # showing the tags of the step in which it first added one.
    _TAGS_CV.set(None)
    _TAGS_GLOBAL = tags
