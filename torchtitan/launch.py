"""torchrun as run_train.sh starts it: the same options, and a tidy end when a signal stops it.

torchrun itself ends a stopped run with a traceback and exit code 1; here it is 128 + the signal, as
shells and schedulers expect. Everything else, a failed rank above all, is left to torchrun.

    run_train.sh -> launch -> torchrun -> ranks (each follows this process, see tools/signals.py)
"""

import os
import sys

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException

from torchtitan.tools.signals import LAUNCHER_PID


def main() -> None:
    """Run torchrun with the arguments of this process."""
    os.environ[LAUNCHER_PID] = str(os.getpid())
    try:
        torchrun.main()
    except SignalException as stop:
        sys.exit(128 + stop.sigval)


if __name__ == "__main__":
    main()
