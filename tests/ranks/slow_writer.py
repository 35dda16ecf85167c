"""A writer process that takes its time to start: until somebody opens the pipe that it is told of.

The import of torch alone takes seconds on a busy machine; a test needs it to take as long as it says.
"""

import os

from torchtitan.components.checkpointer.tc import writer_main

PROGRAM = __name__
GATE = "TESTS_SLOW_WRITER_GATE"
"""Of the environment: the path of a named pipe."""


def main() -> None:
    """Entry point of the process."""
    open(os.environ[GATE]).close()
    writer_main.main()
