"""A small disk that fills, or becomes read-only, at any moment of a save, and is good again later.

Read-only is a second, read-only view of the disk that is mounted over it: so it may happen while files
are open, and is over when it is unmounted.

    test_failing_disks.py -> FailingDisk -> moments.py -> Trouble.begin ... Trouble.end
"""

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.crash.moments import ActingDisk, Moment
from tests.unit_tests.small_disk import fill, small_disk


@dataclass(frozen=True)
class Trouble:
    """What happens to ``disk``."""

    disk: Path
    view: Path | None
    """A read-only view of it, to be mounted over it; None fills it."""

    def begin(self) -> None:
        if self.view is None:
            fill(self.disk)
        else:
            subprocess.run(["mount", "--bind", str(self.view), str(self.disk)], check=True)

    def end(self) -> None:
        if self.view is None:
            (self.disk / "ballast").unlink()
        else:
            uncover(self.disk)


@contextmanager
def disk_with_view(folder: Path) -> Generator[tuple[Path, Path]]:
    """A small disk and a read-only view of it; skips the test where nothing can be mounted."""
    view = folder / "view"
    view.mkdir()
    with small_disk(folder / "disk", 4096) as disk:
        subprocess.run(["mount", "--bind", str(disk), str(view)], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(view)], check=True)
            yield disk, view
        finally:
            if os.statvfs(disk).f_flag & os.ST_RDONLY:  # a test that failed meanwhile
                uncover(disk)
            subprocess.run(["umount", "--lazy", str(view)], check=True)


def uncover(disk: Path) -> None:
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


class FailingDisk(ActingDisk):
    """Lets the trouble begin at its one moment."""

    def __init__(
        self, marks: Path, rank: int, pids: tuple[int, ...], moment: Moment, trouble: Trouble
    ) -> None:
        super().__init__(marks, rank, pids, {0: moment})
        self._trouble = trouble

    def act(self, number: int) -> None:
        self._trouble.begin()
