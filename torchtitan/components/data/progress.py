"""Show how far a long read is: a bar on a terminal, a line now and then in a log file."""

import sys

from tqdm import tqdm  # pyrefly: ignore[untyped-import] the package carries no types

from torchtitan.tools.lasting_output import LastingOutput

_TERMINAL_SECONDS = 0.5
_LOG_SECONDS = 10


def byte_progress(total_bytes: int, description: str, *, delay_seconds: float = 0) -> tqdm:
    """A bar over ``total_bytes`` that shows itself once ``delay_seconds`` are over."""
    stream = sys.stderr  # None where whoever started this process has closed it
    return tqdm(
        total=total_bytes,
        file=None if stream is None else LastingOutput(stream),
        disable=stream is None,
        desc=description,
        delay=delay_seconds,
        unit="B",
        unit_scale=True,
        mininterval=_TERMINAL_SECONDS if stream is not None and stream.isatty() else _LOG_SECONDS,
    )
