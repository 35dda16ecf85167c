"""What is logged while a crash point is checked: told if that fails, and thrown away otherwise."""

import logging
from types import TracebackType

_WAITS = "Waiting up to"
"""How the lock says that it waits for a run that may be alive. Nobody is, after a crash."""


class Lines(logging.Handler):
    """Takes the place of all handlers in the block, which would keep millions of lines."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Raises AssertionError when a lock is waited for, which takes ten seconds."""
        self._records.append(record)
        message = record.getMessage()
        assert not message.startswith(_WAITS), message

    def __enter__(self) -> "Lines":
        root = logging.getLogger()
        self._before = root.handlers, root.level
        root.handlers = [self]
        root.setLevel(logging.INFO)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        root = logging.getLogger()
        root.handlers, level = self._before
        root.setLevel(level)

    def __str__(self) -> str:
        return "\n".join(f"{each.levelname} {each.getMessage()}" for each in self._records)
