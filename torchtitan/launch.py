"""torchrun as run_train.sh starts it: the same options, and a tidy end when a signal stops it.

torchrun itself ends a stopped run with a traceback and exit code 1, and a signal that is repeated
tears it away from ranks that still close. Here the first signal goes to the ranks, the exit code is
128 + that signal, as shells and schedulers expect, and later ones do nothing, except for a second
Ctrl-C. When a rank fails, torchrun ends the others and prints a table; the error itself is said once
more below that, in the last line. Everything else is left to torchrun.

    run_train.sh -> launch -> torchrun -> ranks (each follows this process, see tools/signals.py)
"""

import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    # Ctrl-C during the seconds that the imports below take: the end, but no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from torchtitan.tools.lasting_output import fill_closed_descriptors, LastingOutput
from torchtitan.tools.signals import LAUNCHER_PID, StopRequested, StopSignals


class LauncherSignals(StopSignals):
    """Tells torchrun of the first signal in its own way, so that it passes it on and waits."""

    def stop_of(self, request: StopRequested) -> BaseException:
        return SignalException(str(request), sigval=signal.Signals(request.signal_number))

    def end_at_once(self) -> NoReturn:
        # Not SIGINT: a rank inside a collective would see it only when that returns.
        for rank in _children():
            try:
                os.killpg(rank, signal.SIGKILL)  # torchrun makes each rank the leader of a group
            except (ProcessLookupError, PermissionError):
                pass
        super().end_at_once()


def main() -> None:
    """Run torchrun with the arguments of this process."""
    fill_closed_descriptors()
    os.environ[LAUNCHER_PID] = str(os.getpid())
    # torchrun copies what the ranks print to its own output, which a pipe or a file would hold back
    # by the kilobyte: whoever follows a run through `tee` sees nothing for minutes.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    if sys.stdout is not None:
        # What copies ends at its first error, and the ranks go on unseen.
        sys.stdout = LastingOutput(sys.stdout)
    # What torchrun handles itself, ignored or not; the others are handled here.
    sys.argv.insert(1, "--signals-to-handle=SIGQUIT")
    with LauncherSignals():
        try:
            # Not its main(), which looks for another torchrun to hand the error on to.
            torchrun.run(torchrun.parse_args(None))
        except SignalException as stop:
            sys.exit(128 + stop.sigval)
        except ChildFailedError as failed:
            # Without the way through torchrun, which says nothing about the run.
            print(failed, last_words(failed), sep="\n", file=sys.stderr)
            sys.exit(1)


def last_words(failed: ChildFailedError) -> str:
    """Which rank failed first and why, as far as those of this machine have left word."""
    told = [
        (failure.timestamp, word["message"])
        for failure in failed.failures.values()
        if isinstance(word := failure.error_file_data["message"], dict)
    ]
    # torchrun ends the others by SIGTERM, which kills a rank that has only begun.
    ended = (-signal.SIGTERM, 128 + signal.SIGTERM)
    by_themselves = {
        rank: failure for rank, failure in failed.failures.items() if failure.exitcode not in ended
    }
    lines = [
        f"rank {rank} was ended by {failure.signal_name()}."
        for rank, failure in sorted(by_themselves.items())
        if failure.exitcode < 0
    ]
    if told:
        lines.append(min(told)[1])
    if not lines:
        # Of equal times the first is the one that torchrun has met first.
        rank, first = min(
            by_themselves.items(),
            key=lambda each: each[1].timestamp,
            default=failed.get_first_failure(),
        )
        lines = [
            f"rank {rank} failed with exit code {first.exitcode}; why stands in what it printed."
        ]
    return "\n".join(lines)


def _children() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                # pid (name) state parent ...; only the name may hold blanks or brackets.
                state = (entry / "stat").read_text().rpartition(")")[2]
            except OSError:
                continue  # it ended meanwhile
            if int(state.split()[1]) == os.getpid():
                yield int(entry.name)


if __name__ == "__main__":
    main()
