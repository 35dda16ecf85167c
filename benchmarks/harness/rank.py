"""The main module of one rank of a measurement; ``ranks.py`` starts it.

It imports nothing of ours before it knows what to run. Libraries that spawn a process of their own import
the main module of their parent once more in there, and would otherwise measure our imports.

    python -m benchmarks.harness.rank <descriptor of the pipe> <process id of whoever started it>
    receives a Call, sends ("told", text)*, then ("returned", value) or ("raised", traceback)
"""

import ctypes
import faulthandler
import os
import pkgutil
import resource
import signal
import sys
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What a rank is to do."""

    target: str
    """``module:function``; the function takes a way to tell how it goes on, then ``arguments``."""

    arguments: dict[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 600.0
    """For collectives of the group that stands around the call."""

    joins_group: bool = True
    """Whether such a group is made; a trainer makes its own."""


def main() -> None:
    """Do what the pipe asks for and leave."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    # What the libraries hold per tensor does not fit into the usual 1,024 descriptors.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    pipe = Connection(descriptor)
    try:
        reply = "returned", _carry_out(pipe.recv(), pipe)
    except (Exception, SystemExit, KeyboardInterrupt):
        reply = "raised", traceback.format_exc()
    try:
        pipe.send(reply)
    except OSError:
        pass  # nobody is left to hear it
    sys.stdout.flush()
    sys.stderr.flush()
    # A tidy end waits for threads and groups of peers that may have failed, and for the processes that
    # a library leaves running; whoever started this ends those.
    os._exit(0)


def _carry_out(call: Call, pipe: Connection) -> Any:
    torch.set_num_threads(1)
    if call.joins_group:
        dist.init_process_group("gloo", timeout=timedelta(seconds=call.timeout_seconds))
    value = pkgutil.resolve_name(call.target)(
        lambda text: pipe.send(("told", text)), **call.arguments
    )
    if dist.is_initialized():
        # Rank 0 hosts the store: it must not leave while others still ask it something.
        dist.barrier()
    return value


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it was gone before it could be noticed


if __name__ == "__main__":
    main()
