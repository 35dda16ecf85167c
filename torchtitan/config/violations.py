"""Report every broken setting at once instead of the first one.

A config's ``__post_init__`` calls ``reject(message)`` for each rule that a value breaks. In code that
is a ``ValueError`` on the spot. While a command line is parsed, ``collecting()`` gathers the
messages instead, so that a user who got three flags wrong hears of all three in one go.

    __post_init__ -> reject -> ValueError            (a recipe or a test builds a config)
    __post_init__ -> reject -> the list of collecting() -> one message, exit code 2   (command line)
"""

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn

EXIT_CODE = 2
"""Exit code for settings that cannot be used, as for a mistyped command line."""

_collected: ContextVar[list[str] | None] = ContextVar("collected_violations", default=None)


def reject(message: str) -> None:
    """Raise ``ValueError(message)``, or note it when a caller is collecting.

    Code after a ``reject`` must therefore stand a value that was just rejected.
    """
    found = _collected.get()
    if found is None:
        raise ValueError(message)
    # tyro and dataclasses.replace build the same config more than once.
    if message not in found:
        found.append(message)


def is_collecting() -> bool:
    """Whether a command line is being parsed, which builds each config more than once."""
    return _collected.get() is not None


@contextmanager
def collecting() -> Generator[list[str]]:
    """Gather the messages of every ``reject`` in the block, each once, in order."""
    found: list[str] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def speaks() -> bool:
    """Whether this process is the one of its machine that tells the user; all ranks fail alike."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def exit_with(found: Sequence[str]) -> NoReturn:
    """Print all messages as one, and end the process with ``EXIT_CODE``."""
    if speaks():
        what = "1 setting" if len(found) == 1 else f"{len(found)} settings"
        lines = [f"{what} cannot be used:", *(f"  - {message}" for message in found)]
        print("\n".join(lines), file=sys.stderr, flush=True)
    raise SystemExit(EXIT_CODE)
