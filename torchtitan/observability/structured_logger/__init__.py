"""Structured logging: spans, scalars and instants as JSON lines, one file per rank.

from torchtitan.observability import structured_logger as sl

sl.set_step(3)
with sl.log_trace_span("fwd_bwd"):
    ...
sl.log_trace_scalar({"loss": 2.5})

api (spans, scalars, instants) -> records (fields) + state (step, tags) -> jsonl_handler (file)
libraries that log events of their own -> forwarding -> jsonl_handler
"""

from torchtitan.observability.structured_logger.api import (
    _structured_logger,
    init_arguments,
    init_structured_logger,
    InitArguments,
    log_trace_instant,
    log_trace_scalar,
    log_trace_span,
)
from torchtitan.observability.structured_logger.records import (
    event_extra,
    ExtraFields,
    LogType,
    TraceEventsOnlyFilter,
)
from torchtitan.observability.structured_logger.state import (
    add_step_tag,
    clear_step_tags,
    get_relative_step,
    get_step,
    get_step_tags,
    set_step,
)

__all__ = [
    "ExtraFields",
    "InitArguments",
    "LogType",
    "TraceEventsOnlyFilter",
    "_structured_logger",
    "add_step_tag",
    "clear_step_tags",
    "event_extra",
    "get_relative_step",
    "get_step",
    "get_step_tags",
    "init_arguments",
    "init_structured_logger",
    "log_trace_instant",
    "log_trace_scalar",
    "log_trace_span",
    "set_step",
]
