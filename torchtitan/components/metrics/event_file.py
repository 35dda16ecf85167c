"""One event file, as TensorBoard reads them, written at once by whoever logs.

The writer of torch hands events to a thread. When its disk is full, that thread ends with a traceback
of its own and takes no event any more. Here a call writes what it was given, as a whole, or raises.

    TensorBoardLogger -> EventFile -> GrowingFile
"""

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from torchtitan.observability.growing_file import GrowingFile

_VERSION = "brain.Event:2"
_numbers = itertools.count()


class EventFile:
    """A new file in a folder of event files; needs the package tensorboard."""

    def __init__(self, folder: str, *, purge_step: int | None, text: Mapping[str, str]) -> None:
        """Begin with ``text`` by its name; from ``purge_step`` on it replaces what earlier files say.

        Raises:
            ImportError: tensorboard is not there.
        """
        # Late: it costs a second to import, and only runs that use it need the package.
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        protocol: Any = event_pb2  # its classes are made while it is imported
        self._make_event, self._make_scalar = protocol.Event, summary.scalar
        self._record_writer = RecordWriter
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = GrowingFile(os.path.join(folder, name))
        begin = [self._event(file_version=_VERSION)]
        if purge_step is not None:
            restart = protocol.SessionLog(status=protocol.SessionLog.START)
            begin.append(self._event(file_version=_VERSION, step=purge_step))
            begin.append(self._event(session_log=restart, step=purge_step))
        begin += [
            self._event(summary=summary.text(name, value), step=purge_step)
            for name, value in text.items()
        ]
        self._begin = b"".join(begin)

    def begin(self) -> None:
        """Make the file now; otherwise the first numbers do."""
        self._append(b"")

    def add_scalars(self, values: Mapping[str, Any], step: int) -> None:
        """Append all of ``values`` under ``step``, or none and raise the ``OSError``."""
        events = (
            self._event(summary=self._make_scalar(name, value), step=step)
            for name, value in values.items()
        )
        self._append(b"".join(events))

    def close(self) -> None:
        self._file.close()

    def _append(self, events: bytes) -> None:
        self._file.append(self._begin + events)
        self._begin = b""

    def _event(self, **fields: Any) -> bytes:
        given = {name: value for name, value in fields.items() if value is not None}
        event = self._make_event(wall_time=time.time(), **given)
        framed = io.BytesIO()
        self._record_writer(framed).write(event.SerializeToString())
        return framed.getvalue()
