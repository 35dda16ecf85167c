"""Bring the events that a library logs in the ordinary way into the structured log.

A record is an event when it carries ``log_type_name``; whatever else a library logs stays where it was.
The structured logger does not propagate, so its own records never come this way.

    library: logger.info(text, extra={"log_type_name": ...}) -> root logger -> ForwardingHandler
        -> handlers of the structured logger
"""

import logging
from collections.abc import Callable

from torchtitan.observability.structured_logger.records import ExtraFields


class ForwardingHandler(logging.Handler):
    """Hands events of the root logger to the handlers of ``target``, unless ``is_off()``."""

    def __init__(self, target: logging.Logger, is_off: Callable[[], bool]) -> None:
        logging.Handler.__init__(self)
        self._target = target
        self._is_off = is_off

    def install(self) -> None:
        """Listen on the root logger; does nothing where this is done already."""
        root = logging.getLogger()
        # addHandler looks as well, but under the one lock of all logging, and this comes with each record.
        if self not in root.handlers:
            root.addHandler(self)

    def remove(self) -> None:
        """Listen no longer."""
        logging.getLogger().removeHandler(self)

    def handle(self, record: logging.LogRecord) -> bool:
        """Pass ``record`` on; in parallel with other threads, unlike other handlers.

        A lock here would be taken before that of the file. The file's handler, which holds its own, takes
        them the other way round when it warns of a full disk: two threads would wait for each other.
        """
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Called by ``handle``."""
        is_event = hasattr(record, ExtraFields.LOG_TYPE_NAME.value)
        if is_event and record.name != self._target.name and not self._is_off():
            if self._target.isEnabledFor(record.levelno):
                self._target.handle(record)
        # Where nobody listens, logging prints warnings itself. This handler shows nothing to anybody, and
        # must not end that.
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and self._is_alone(record.name):
            last.handle(record)

    def _is_alone(self, name: str) -> bool:
        # The record has come up to the root, so every logger on its way had its turn.
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent
        return True
