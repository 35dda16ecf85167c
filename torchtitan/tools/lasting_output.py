"""A standard output that ends no run: what its reader or its disk does not take is lost, and said once.

Python raises where it is written to, prints a traceback for each line of a log, and turns the exit code
of a program that did all its work into 120. A reader that is gone (``| head``) does not come back; a
disk that is full may, so writing is tried again with the next line.

    logging, print -> LastingOutput -> the stream        end of the process -> _settle
"""

import atexit
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

_TROUBLE = (OSError, ValueError)
"""What a stream raises; the second one if somebody has closed it."""


class LastingOutput:
    """A stream that passes on to another one, and raises nothing that this one does."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._was_told = False
        atexit.unregister(_settle)
        atexit.register(_settle)

    def write(self, text: str) -> int:
        """Pass ``text`` on, or lose it."""
        try:
            self._stream.write(text)
        except _TROUBLE as error:
            self._tell(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except _TROUBLE as error:
            self._tell(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _tell(self, error: Exception) -> None:
        if isinstance(error, BrokenPipeError):
            _discard(self._stream)
        if not self._was_told:
            self._was_told = True
            is_error = getattr(self._stream, "name", "") == "<stderr>"
            with suppress(Exception):  # that one may be gone as well
                print(
                    f"[titan] lines of the log are lost, because the standard "
                    f"{'error' if is_error else 'output'} cannot be written: {error!r}. Training goes on.",
                    file=sys.stderr,
                    flush=True,
                )


def _settle() -> None:
    # Python does this after everything else, and then cannot but say that it failed.
    stream = sys.__stdout__
    if stream is not None:
        try:
            stream.flush()
        except _TROUBLE:
            _discard(stream)


def _discard(stream: TextIO) -> None:
    """Let ``stream`` end nowhere, with all that it still holds."""
    with suppress(*_TROUBLE):
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
        stream.flush()


def fill_closed_descriptors() -> None:
    """Open 0, 1 and 2 where whoever started this process has closed them.

    The next file that is opened would get that number, and whatever a library in C++ says would go into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
