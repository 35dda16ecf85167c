"""Spans, instants and scalars: the calls with which a program tells what it does and how long it takes.

Every call is safe anywhere: before ``init_structured_logger``, after it was told to stay off, and in code
that torch compiles, it does nothing.

    with log_trace_span("fwd_bwd"):  ->  fwd_bwd_start ... fwd_bwd_end (value = milliseconds)
        -> logger "torchtitan.structured_logger" -> its handlers (JSON lines unless the environment says otherwise)
    events of libraries -> forwarding -> the same handlers
"""

import functools
import importlib
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import TracebackType
from typing import Any, cast, NamedTuple, TypeVar

from torchtitan.observability.structured_logger.forwarding import ForwardingHandler
from torchtitan.observability.structured_logger.jsonl_handler import register_jsonl_handler
from torchtitan.observability.structured_logger.records import event_extra, helper_source, LogType

HANDLERS_VARIABLE = "TITAN_STRUCT_LOGGER_HANDLERS"
"""Environment variable: comma-separated dotted names of handler factories that replace the JSON-lines file."""

_structured_logger = logging.getLogger("torchtitan.structured_logger")
_structured_logger.propagate = False
_structured_logger.setLevel(logging.INFO)

_disabled = False
_is_initialized = False
_arguments: "InitArguments | None" = None

F = TypeVar("F", bound=Callable[..., Any])


class InitArguments(NamedTuple):
    """What a process records under, as ``init_structured_logger`` takes it."""

    source: str
    output_dir: str
    rank: int

    def of_helper(self, name: str) -> "InitArguments":
        """For a process that works for this one: a file of its own, which readers take for no start of a run."""
        return self._replace(source=helper_source(self.source, name))


def init_structured_logger(
    source: str, output_dir: str, rank: int | None = None, enable: bool = True
) -> None:
    """Start recording, also what libraries log as events; the first call decides, later ones do nothing.

    ``source`` names the program (``training``) and begins the file name. ``rank`` defaults to the
    environment's ``RANK``, or 0. Raises ``ImportError`` for a handler factory that cannot be found.
    """
    global _disabled, _is_initialized, _arguments
    if _is_initialized:
        return
    if not enable:
        _disabled = True
        _is_initialized = True
        return
    if rank is None:
        rank = int(os.environ.get("RANK", "0"))
    for factory in _handler_factories():
        factory(
            structured_logger=_structured_logger, rank=rank, source=source, output_dir=output_dir
        )
    # Absolute, because a helper process may start in another directory.
    _arguments = InitArguments(source, os.path.abspath(output_dir), rank)
    _is_initialized = True
    _forwarding.install()


def init_arguments() -> InitArguments | None:
    """What this process records under; None before ``init_structured_logger`` and where it was told to stay off."""
    return _arguments if _is_initialized and not _disabled else None


def _handler_factories() -> list[Callable[..., object]]:
    names = [name.strip() for name in os.environ.get(HANDLERS_VARIABLE, "").split(",")]
    return [_find_factory(name) for name in names if name] or [register_jsonl_handler]


def _find_factory(dotted_name: str) -> Callable[..., object]:
    module_name, _, attribute = dotted_name.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ImportError(
            f"{HANDLERS_VARIABLE} names the handler factory {dotted_name!r}, which cannot be imported: "
            f"{error}. Give the full name of a function, such as "
            f"'{register_jsonl_handler.__module__}.{register_jsonl_handler.__name__}', or unset the variable."
        ) from error


def _is_off() -> bool:
    # Reached through sys.modules so that this package needs only the standard library.
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        return True
    return _disabled or not _structured_logger.handlers


_forwarding = ForwardingHandler(_structured_logger, _is_off)


def _emit(message: str, extra: dict[str, Any], stacklevel: int) -> None:
    if _is_initialized:
        # Again: whoever configures logging anew (basicConfig(force=True)) throws out the handlers of the root.
        _forwarding.install()
    # Counted from the public function: 1 is that function, 2 the code that called it.
    _structured_logger.info("%s", message, extra=extra, stacklevel=stacklevel + 1)


class log_trace_span:  # noqa: N801 (reads as a verb in `with` and as a decorator)
    """Times a block or a function, sync or async: ``with log_trace_span("optim"):`` or ``@log_trace_span("eval")``.

    ``description`` says more about this use of the name. ``stacklevel`` 2 blames the code that
    opens the span, 3 the code that called it, and so on.
    """

    def __init__(
        self, event_type: str, description: str | None = None, *, stacklevel: int = 2
    ) -> None:
        self._event_type = event_type
        self._description = description
        self._stacklevel = stacklevel
        self._started_ns: int | None = None

    def __enter__(self) -> "log_trace_span":
        if _is_off():
            return self
        self._emit("start", "", None)
        self._started_ns = time.perf_counter_ns()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._started_ns is None or _is_off():
            return
        duration_ms = (time.perf_counter_ns() - self._started_ns) / 1e6
        self._started_ns = None
        if error_type is not None:
            self._emit("error", f" {error_type.__name__}: {error}", None)
        self._emit("end", f" {duration_ms:.3f} ms", duration_ms)

    def _emit(self, phase: str, detail: str, value: float | None) -> None:
        name = self._description or self._event_type
        extra = event_extra(f"{self._event_type}_{phase}", event_name=name, value=value)
        _emit(f"{name} {phase}{detail}", extra, self._stacklevel + 1)

    def __call__(self, function: F) -> F:
        # A span per call: one shared object would mix the start times of calls that overlap.
        def span() -> log_trace_span:
            return log_trace_span(
                self._event_type, self._description, stacklevel=self._stacklevel + 1
            )

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def timed_async(*args: Any, **kwargs: Any) -> Any:
                with span():
                    return await function(*args, **kwargs)

            return cast(F, timed_async)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with span():
                return function(*args, **kwargs)

        return cast(F, timed)


def log_trace_instant(event_type: str, *, stacklevel: int = 2) -> None:
    """Record that ``event_type`` happened now."""
    if not _is_off():
        _emit(event_type, event_extra(event_type, log_type=LogType.INSTANT), stacklevel)


def log_trace_scalar(values: Mapping[str, int | float], *, stacklevel: int = 2) -> None:
    """Record one value for each name. Anything but a real number is left out with a warning."""
    if _is_off():
        return
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            logging.getLogger(__name__).warning(
                f"scalar {name!r} is left out of the structured log: {type(value).__name__} is not a number. "
                "Pass an int or a float (for a tensor: its .item())."
            )
            continue
        number = int(value) if isinstance(value, Integral) else float(value)
        extra = event_extra("metric_value", event_name=name, value=number)
        _emit(f"{name} = {number}", extra, stacklevel)
