"""Start a command, follow what it prints, stop it in the ways a run is stopped.

Torchrun gives each rank a session of its own, so the process group of the command is torchrun
alone, and its end says nothing about the ranks. They are found by a mark in their environment, which
every process below the command inherits.

    Launched -> reader thread -> lines -> until("wanted line") -> interrupt | kill -> finish
"""

import os
import queue
import select
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# Generous: on a loaded machine everything takes several times as long as on a quiet one.
DEADLINE_SECONDS = 240.0
_MARK = "LAUNCHED_FOR_TEST"


class Launched:
    """A command in a process group of its own, ended with everything below it when the block ends."""

    def __init__(self, command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str]) -> None:
        self.output = ""
        """Everything that was read so far, stdout and stderr in one."""
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._is_read_to_the_end = False
        name, value = self._mark.split("=")
        self._process = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            env={**os.environ, **env, name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # As a shell does for the job in the foreground; Ctrl-C goes to this group.
            process_group=0,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill(*self.processes())
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def until(self, wanted: str, *, seconds: float = DEADLINE_SECONDS) -> str:
        """Read on until a line with ``wanted`` and return it; fail when the command ends first."""
        deadline = time.monotonic() + seconds
        while (line := self._next_line(deadline)) is not None:
            if wanted in line:
                return line
        raise AssertionError(f"the command ended without {wanted!r}:\n{self.output}")

    def finish(self, *, seconds: float = DEADLINE_SECONDS) -> int:
        """Read to the end and return the exit code, negative for a signal."""
        deadline = time.monotonic() + seconds
        while not self._is_read_to_the_end:
            self._next_line(deadline)
        # The output ends with the last process that holds it, which need not be the command.
        return self._process.wait(max(1.0, deadline - time.monotonic()))

    def wait_until_all_are_gone(self, *, seconds: float = DEADLINE_SECONDS) -> None:
        """Wait for the end of every process that came from the command; fail when one stays."""
        deadline = time.monotonic() + seconds
        for pid in self.processes():
            try:
                watched = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                remaining = max(0.0, deadline - time.monotonic())
                assert select.select([watched], [], [], remaining)[0], f"process {pid} is left"
            finally:
                os.close(watched)

    def signal_group(self, number: int) -> None:
        """Signal the command and what shares its group, as a terminal does for Ctrl-C."""
        os.killpg(self.pid, number)

    def signal(self, number: int) -> None:
        """Signal the command alone, as a scheduler may do."""
        self._process.send_signal(number)

    def processes(self) -> list[int]:
        """Every process that came from this command and still runs, in whatever session."""
        return sorted(pid for pid, environment in _environments() if self._mark in environment)

    @staticmethod
    def kill(*pids: int) -> None:
        """SIGKILL: nothing in the process sees it coming."""
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _next_line(self, deadline: float) -> str | None:
        try:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"not done in time; output so far:\n{self.output}") from None
        if line is None:
            self._is_read_to_the_end = True
        else:
            self.output += line
        return line

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)


def _environments() -> Iterator[tuple[int, list[str]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue  # it ended meanwhile, or it is somebody else's
            if environment:
                yield int(entry.name), environment.split("\0")
