"""The human-readable log: one line per event on stdout.

``logger`` is the root logger, so libraries that log through the standard library appear in the
same format, as far as they say what no line of this program says (console_filter). Lines of rank 0 begin
with ``[titan] ``, those of another rank name it.
"""

import logging
import os
import sys

from torchtitan.tools.console_filter import BriefFilter
from torchtitan.tools.lasting_output import LastingOutput

logger = logging.getLogger()

_warned: set[tuple[str, str]] = set()


class _TitanHandler(logging.StreamHandler):
    """Marks the handler that ``init_logger`` added, so that a second call replaces it."""


def init_logger() -> None:
    """Send INFO and above to stdout; may be called again, for example after stdout was replaced."""
    rank = int(os.environ.get("RANK", "0"))
    prefix = "[titan]" if rank == 0 else f"[titan rank {rank}]"
    stream = sys.stdout or sys.stderr  # None where whoever started this process has closed it
    handler = _TitanHandler(None if stream is None else LastingOutput(stream))
    handler.setFormatter(
        logging.Formatter(f"{prefix} %(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    handler.addFilter(BriefFilter())
    for old in list(logger.handlers):
        # A bare StreamHandler is what basicConfig adds when a library logs while it is imported;
        # kept, it would print every line a second time.
        if isinstance(old, _TitanHandler) or type(old) is logging.StreamHandler:
            logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # Level 5 silences Kineto, whose C++ side prints several lines for every profiled step.
    os.environ["KINETO_LOG_LEVEL"] = "5"


def warn_once(logger: logging.Logger, msg: str) -> None:
    """Warn about ``msg`` the first time it is seen in this process."""
    key = (logger.name, msg)
    if key not in _warned:
        _warned.add(key)
        logger.warning(msg, stacklevel=2)
