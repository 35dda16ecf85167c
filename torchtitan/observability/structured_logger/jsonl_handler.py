"""Write structured records to one JSON-lines file per rank and process start.

Every record is handed to the kernel before the call returns, so the log of a process that is
killed with SIGKILL ends at its last event. (A power cut may still lose the tail: no fsync here.)
A disk that takes no records is one warning, and no end of the run, not even at its start.

    logging record -> TraceEventsOnlyFilter -> TraceJsonlFormatter -> TraceJsonlHandler
        -> <output_dir>/structured_logs/<source>.global_rank_<r>.<start>-<random>.jsonl
"""

import itertools
import json
import logging
import math
import os
import secrets
import socket
import sys
import threading
import time
from typing import Any

from torchtitan.observability.growing_file import GrowingFile
from torchtitan.observability.structured_logger import state
from torchtitan.observability.structured_logger.records import (
    event_extra,
    ExtraFields,
    LIBRARY_FIELDS,
    LogType,
    MAX_MESSAGE_SIZE,
    span_and_phase,
    TraceEventsOnlyFilter,
)

FOLDER = "structured_logs"


class TraceJsonlFormatter(logging.Formatter):
    """Turns a record into one line of JSON."""

    def __init__(self, rank: int, source: str) -> None:
        logging.Formatter.__init__(self)
        self._rank = rank
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._source = source
        self._host_name = socket.gethostname()
        self._seq_ids = itertools.count()
        self._previous_seconds: float | None = None

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self._log_dict(record), separators=(",", ":"), default=repr)

    def _log_dict(self, record: logging.LogRecord) -> dict[str, Any]:
        # logging.Handler holds its lock while it formats: the two counters need none of their own.
        previous, self._previous_seconds = self._previous_seconds, record.created
        delta_ms = 0.0 if previous is None else (record.created - previous) * 1000
        where = (record.filename, record.lineno, record.funcName)
        return {
            "seq_id": next(self._seq_ids),
            "time": record.created,
            "time_ms": int(record.created * 1e3),
            "time_us": int(record.created * 1e6),
            "delta_ms": round(delta_ms, 3),
            "source": self._source,
            "rank": self._rank,
            "global_rank": self._rank,
            "local_rank": self._local_rank,
            "host_name": self._host_name,
            "pid": os.getpid(),
            "tid": threading.get_native_id(),
            "task_name": _task_name(),
            **_structured_fields(record),
            "caller": ":".join(str(part) for part in where),
            "log_file": record.filename,
            "log_function": record.funcName,
            "log_level": record.levelname,
            "logger_name": record.name,
            "message": record.getMessage()[:MAX_MESSAGE_SIZE],
        }


def _structured_fields(record: logging.LogRecord) -> dict[str, Any]:
    kind = str(getattr(record, ExtraFields.LOG_TYPE_NAME.value, LogType.TEXT.value))
    fields = event_extra(kind, log_type=LogType.TEXT, event_name=span_and_phase(kind)[0])
    for name in fields:
        if (given := getattr(record, name, None)) is not None:
            fields[name] = given
    if not hasattr(record, ExtraFields.RELATIVE_STEP.value):
        _tell_apart_from_the_loop(fields)
    for name, attributes in LIBRARY_FIELDS.items():
        found = (getattr(record, attribute, None) for attribute in attributes)
        if (given := next((each for each in found if each is not None), None)) is not None:
            fields[name] = given
    value = fields[ExtraFields.VALUE.value]
    if isinstance(value, float) and not math.isfinite(value):
        # JSON has no NaN and no infinity, and strict readers reject the whole line; the message still shows it.
        fields[ExtraFields.VALUE.value] = None
    return fields


def _tell_apart_from_the_loop(fields: dict[str, Any]) -> None:
    """Drop what belongs to the loop's step from an event of a library that is about another step."""
    step, now, relative = (
        fields[ExtraFields.STEP.value],
        state.get_step(),
        state.get_relative_step(),
    )
    if step == now:
        return
    fields[ExtraFields.STEP_TAGS.value] = []
    is_known = isinstance(step, int) and now is not None and relative is not None
    fields[ExtraFields.RELATIVE_STEP.value] = step - (now - relative) if is_known else None


def _task_name() -> str:
    task = state.running_task()
    return threading.current_thread().name if task is None else task.get_name()


class TraceJsonlHandler(logging.Handler):
    """Appends records to a new file of this process, each before the call returns."""

    def __init__(self, rank: int, source: str, output_dir: str) -> None:
        logging.Handler.__init__(self)
        # A restarted run must add a file, never overwrite the log of the run that died.
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        name = f"{source}.global_rank_{rank}.{stamp}.jsonl"
        self._file = GrowingFile(os.path.join(output_dir, FOLDER, name))
        self.baseFilename = self._file.path
        self.setFormatter(TraceJsonlFormatter(rank, source))
        self.addFilter(TraceEventsOnlyFilter())
        self._warned = False
        self._write(b"")

    def emit(self, record: logging.LogRecord) -> None:
        """Append ``record``; after a failure the next one is tried all the same."""
        try:
            line = f"{self.format(record)}\n".encode()
        except Exception:  # a record that nobody can format
            self.handleError(record)
        else:
            self._write(line)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (name given by logging)
        """Say that the log has holes, without the traceback that ``logging`` would print for each."""
        self._tell(sys.exc_info()[1])

    def close(self) -> None:
        """Let go of the file; threads that outlive the exit of Python may still log."""
        self._file.close()
        logging.Handler.close(self)

    def _write(self, line: bytes) -> None:
        try:
            self._file.append(line)
        except OSError as error:
            self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        # Once: a full disk must not stop training or flood its output.
        if not self._warned:
            self._warned = True
            logging.getLogger(__name__).warning(
                f"the structured log {self.baseFilename} misses records: {error!r}. Training goes on, and "
                "so does the log when it can be written again; free space on that disk, or choose another "
                "--dump_folder."
            )


def register_jsonl_handler(
    *, structured_logger: logging.Logger, rank: int, source: str, output_dir: str
) -> None:
    """Let ``structured_logger`` write to a JSON-lines file below ``output_dir``."""
    structured_logger.addHandler(TraceJsonlHandler(rank, source, output_dir))
