"""What one structured record holds: its kinds, its fields and the filter that knows it from plain text.

A record is an ordinary ``logging`` record with the ``ExtraFields`` attached as attributes, so
any ``logging.Handler`` can take part.
"""

import logging
from enum import Enum
from typing import Any

from torchtitan.observability.structured_logger import state

MAX_MESSAGE_SIZE = 1000
"""Longest message of a record, in characters; the rest is cut off."""


class LogType(str, Enum):
    """The kinds of record."""

    EVENT = "event"
    """Start, error or end of a span, or one value of a scalar."""

    INSTANT = "instant"
    """A moment without a duration."""

    TEXT = "text"
    """A plain message somebody logged on the structured logger."""


class ExtraFields(str, Enum):
    """The attributes that a structured record has beyond those of ``logging``."""

    LOG_TYPE = "log_type"
    LOG_TYPE_NAME = "log_type_name"
    """What happened: ``<span>_start``, ``<span>_error``, ``<span>_end``, an instant, ``metric_value``."""

    EVENT_NAME = "event_name"
    """To what: the metric's name, or the description of the span or else its name."""

    VALUE = "value"
    """The number: milliseconds at the end of a span, or the metric."""

    STEP = "step"
    RELATIVE_STEP = "relative_step"
    STEP_TAGS = "step_tags"


LIBRARY_FIELDS = {
    "context": ("context",),
    "measured_from_start_time_ms": ("measured_from_start_time_ms", "total_time_ms"),
}
"""What records of libraries have beyond these, by its name in the log: the attributes to take it from.

``context`` is a list of ``key:value``, the second is milliseconds since the work began that the event is a part of.
"""


def event_extra(
    log_type_name: str,
    *,
    log_type: LogType = LogType.EVENT,
    event_name: str | None = None,
    value: int | float | None = None,
) -> dict[str, Any]:
    """The ``extra=`` of a ``logging`` call that makes its record a structured one."""
    return {
        ExtraFields.LOG_TYPE.value: log_type.value,
        ExtraFields.LOG_TYPE_NAME.value: log_type_name,
        ExtraFields.EVENT_NAME.value: log_type_name if event_name is None else event_name,
        ExtraFields.VALUE.value: value,
        ExtraFields.STEP.value: state.get_step(),
        ExtraFields.RELATIVE_STEP.value: state.get_relative_step(),
        ExtraFields.STEP_TAGS.value: list(state.get_step_tags()),
    }


def span_and_phase(log_type_name: str) -> tuple[str, str]:
    """``("optim", "end")`` for ``optim_end``; the phase is empty for what is no part of a span."""
    span, _, phase = log_type_name.rpartition("_")
    return (span, phase) if phase in ("start", "error", "end") else (log_type_name, "")


def helper_source(source: str, name: str) -> str:
    """The source of a process that works for one of ``source``; ``main_source`` goes back."""
    return f"{source}.{name}"


def main_source(source: str) -> str | None:
    """The source that ``source`` works for, if it is that of a helper."""
    main, dot, _ = source.rpartition(".")
    return main if dot else None


class TraceEventsOnlyFilter(logging.Filter):
    """Passes events and instants; stops plain text."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = getattr(record, ExtraFields.LOG_TYPE.value, LogType.TEXT.value)
        return kind in (LogType.EVENT.value, LogType.INSTANT.value)
