"""Start again from what a crash has left, and see whether all that was promised is kept.

    a tree and what is owed -> lay out -> load -> is it owed, bit for bit? is all that is owed there?
      -> save once, and close -> is the folder clean? -> load again -> is it what was saved?

One rank, in this process, with saves that training waits for: it is started thousands of times.
"""

import gc
import shutil
import time
from collections.abc import Generator, Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torchtitan.components.checkpointer.in_flight import FAILURES

from tests.crash.holdings import look_at
from tests.crash.listening import Lines
from tests.crash.operations import note
from tests.crash.promises import ACKNOWLEDGED, BEGUN, facts, LOADED, Promises, Saved
from tests.crash.small_run import SmallRun
from tests.crash.tree import lay_out, read_tree, Tree
from tests.unit_tests.components.checkpointer.ways import DISABLED, TC_WAITING, Way

AGAIN = "again"
"""The name of the run that starts after the crash."""

KEEP = 2
LIMIT_SECONDS = 20
"""For a start with its save; it takes a twentieth of a second, and any wait for somebody ten."""


class PromiseBrokenError(AssertionError):
    """A start did not do what was promised."""


@dataclass(frozen=True)
class Checker:
    """Checks the checkpoints of one back end."""

    way: Way
    place: Path
    """A directory for the folders of runs; each is deleted when it has been checked."""

    @classmethod
    def of(cls, way: Way, place: Path) -> "Checker":
        """What checks that which was saved in this ``way``, or in any other one of its back end."""
        return cls(DISABLED if way.format is DISABLED.format else TC_WAITING, place)

    def check(self, tree: Tree, promises: Promises) -> None:
        """Raises PromiseBrokenError, which shows the tree, what was logged and what was found."""
        folder = self.place / "folder"
        shutil.rmtree(folder, ignore_errors=True)
        lay_out(tree, folder)
        with Lines() as lines:
            try:
                # By chance the step whose save has died, which clears its own way, or one past it.
                self.check_folder(folder, promises, steps=1 + tree.digest[0] % 2)
            except FAILURES as error:
                raise PromiseBrokenError(
                    f"{type(error).__name__}: {error}\n\nowed: {_told(promises.owed)}\nmay be loaded: "
                    f"{_told(promises.may_load)}\n\nafter the crash:\n{tree}\n\nnow:\n{read_tree(folder)}"
                    f"\n\nlogged:\n{lines}"
                ) from error
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                # A manager holds itself, and with it sockets and threads.
                gc.collect()

    def check_folder(self, folder: Path, promises: Promises, *, steps: int = 1) -> None:
        """The same of what lies in ``folder`` already, with a save after ``steps``. Raises whatever is met."""
        started_at = time.monotonic()
        with self._running(folder) as run:
            found = run.found() if run.load() else None
            _require_owed(found, promises)
            self._require_all_there(folder, promises)
            step = steps if found is None else found.step + steps
            run.save(step, by=AGAIN)
        self._require_clean(folder, _after_saving(promises, found, step))
        with self._running(folder) as run:
            wanted = Saved(step, AGAIN)
            assert run.load() and run.found() == wanted, f"{wanted} was saved, {run.found()} loaded"
        seconds = time.monotonic() - started_at
        assert seconds < LIMIT_SECONDS, f"this took {seconds:.1f} s"

    def _run(self, folder: Path) -> SmallRun:
        # No crash damages what counts, so nothing is to be passed over.
        settings = {"on_damaged": "fail", "lock_timeout_seconds": 10}
        return SmallRun(folder, self.way, by=AGAIN, keep=KEEP, **settings)

    @contextmanager
    def _running(self, folder: Path) -> Generator[SmallRun]:
        run = self._run(folder)
        try:
            yield run
        except BaseException:
            # Else it would still have the lock when the next point is checked, in a folder of this name.
            with suppress(*FAILURES):
                run.manager.close()
            raise
        run.close()

    def _require_all_there(self, folder: Path, promises: Promises) -> None:
        held = look_at(folder, self.way)
        assert not held.damaged, f"taken for checkpoints, and damaged: {', '.join(held.damaged)}"
        for each in sorted(promises.counting):
            assert each in held.counting | held.replaced, f"{each} is gone: {held}"
        for each in sorted(promises.left):
            assert each in held.everywhere, f"{each}, which was put aside, is gone: {held}"

    def _require_clean(self, folder: Path, promises: Promises) -> None:
        held = look_at(folder, self.way)
        assert not held.litter, f"left behind: {', '.join(held.litter)}"
        assert (
            held.counting >= promises.counting
        ), f"{_told(promises.counting)} have to be in {held}"
        more = held.counting - promises.counting - promises.unsure
        more = {each for each in more if each.step not in held.pinned}
        assert not more, f"{_told(more)} should be gone"
        assert held.everywhere >= promises.left, f"{_told(promises.left)} have to be in {held}"


def _require_owed(found: Saved | None, promises: Promises) -> None:
    if found is None:
        assert promises.may_begin_anew, "nothing was loaded"
    else:
        assert found in promises.may_load, f"{found} was loaded"


def _after_saving(promises: Promises, found: Saved | None, step: int) -> Promises:
    """What is owed after a run has loaded what it has ``found`` and has saved ``step``."""
    loaded, by = (0, "") if found is None else (found.step, found.by)
    return promises.after(
        [
            note(0, LOADED, loaded, facts(by=by)),
            note(0, BEGUN, step, facts(by=AGAIN, keep=KEEP)),
            note(0, ACKNOWLEDGED, step, facts(by=AGAIN)),
        ]
    )


def _told(saved: AbstractSet[Saved]) -> str:
    return ", ".join(map(str, sorted(saved))) or "nothing"
