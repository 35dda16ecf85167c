"""Plant known bugs in a copy of the tree, one at a time, and see whether the crash tests notice.

    python -m scripts.seeded_bugs                          # all of them
    python -m scripts.seeded_bugs --only manifest-in-place
    python -m scripts.seeded_bugs --list

A test that nothing turns red proves nothing. Red means that a test has failed, in time, in a copy that is
green without the bug. A copy in which the tests cannot even begin says nothing about them, and counts as
little as a green one. The tree itself stays as it is.

    bug_list.BUGS -> planted in a copy -> pytest -x -> Outcome -> a table, also in docs/reliability.md
"""

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from xml.etree import ElementTree

from scripts.bug_kinds import Bug
from scripts.bug_list import BUGS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reliability.md"
COMMAND = "python -m scripts.seeded_bugs"

_FILES = ("crash_points", "faults", "killed_then_cut", "object_store")
_TESTS = (
    *(f"tests/crash/test_{name}.py" for name in _FILES),
    # It is about the tests themselves, and would have all be recorded before the first crash.
    "--deselect=tests/crash/test_crash_points.py::test_nothing_happens_past_the_disk_that_is_recorded",
)
"""What plans its crashes; what comes at random would notice a bug now and then."""

_JUDGES = (
    "test_a_start_after_a_crash",
    "test_a_fault_costs",
    "test_what_a_run_goes_on_from",
    "test_what_an_object_store_refuses",
    "test_no_order_has_a_rank",
)
"""Those of them that look for a promise that is broken; what else fails has another reason."""

_TOO_SLOW = re.compile(r"this took [\d.]+ s|Waiting up to|Timeout|timed out|CheckpointInUse")
"""What a machine that is busy leads to as well."""

_NEEDED = ("pytest", "torch")
_LIMIT_SECONDS = 900
_BEGIN, _END = "<!-- seeded bugs -->\n", "<!-- end of seeded bugs -->\n"
_MOST_LETTERS = 240
_CUT = "full report in element text]"
_PLACE = re.compile(r"/\S*/checked/[^/\s]+/")
"""Where the tests have laid out what a crash has left: another place each time."""
_TAIL_LINES = 15


class Color(StrEnum):
    """What the tests have made of a copy."""

    RED = "red"
    """A test has failed."""

    GREEN = "green"
    """All have passed."""

    BROKEN = "broken"
    """They could not run."""

    ODD = "red for another reason"
    """What has failed says nothing about the bug."""

    HUNG = "hung"
    """They were not over in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The end of one run of the tests."""

    color: Color
    seconds: float
    test: str = ""
    """The first one that has failed."""
    said: str = ""
    """The beginning of what it failed with."""
    tail: str = ""
    """The end of all that was printed."""

    def __str__(self) -> str:
        told = f": {self.test}: {self.said}" if self.test else ""
        return f"{self.color} after {self.seconds:.0f} s{told}"


def missing_packages() -> str:
    """That the tests cannot run in this Python, and what to type; nothing if they can."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    return (
        f"{sys.executable} has no {' and no '.join(missing)}, which the tests need. Type "
        "`scripts/setup_env.sh dev`, then `. .venv/bin/activate`, then the same command again."
    )


def misfits(bug: Bug, tree: Path) -> list[str]:
    """Why ``bug`` cannot be planted in ``tree``; nothing if it can."""
    found = []
    for edit in bug.edits:
        path = tree / edit.path
        times = path.read_text().count(edit.old) if path.is_file() else 0
        if times != 1:
            found.append(
                f"{bug.name}: {edit.path} should hold this text once and holds it {times} times:\n{edit.old}"
            )
    return found


def plant(bug: Bug, tree: Path) -> None:
    """Put ``bug``, which fits, into ``tree``."""
    for edit in bug.edits:
        path = tree / edit.path
        path.write_text(path.read_text().replace(edit.old, edit.new))


def copy_tree(source: Path, target: Path) -> None:
    """Copy what belongs to the tree: no history, no caches, no outputs."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (source / name).is_file():  # one that is deleted may still be listed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


def run_tests(
    tree: Path, arguments: Sequence[str], *, scratch: Path, limit_seconds: float
) -> Outcome:
    """What pytest makes of ``tree``; it stops at the first failure.

    Args:
        scratch: an empty folder for what the tests write.
    """
    report = scratch / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", f"--basetemp={scratch / 'tmp'}", *arguments]
    # First on the path, also of the processes that tests start.
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.monotonic()
    with open(scratch / "output", "w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
        output.seek(0)
        tail = "\n".join(output.read().splitlines()[-_TAIL_LINES:])
    seconds = time.monotonic() - began
    if code is None:
        return Outcome(color=Color.HUNG, seconds=seconds, tail=tail)
    test, said = _first_failure(report)
    color = Color.GREEN if code == 0 else Color.RED if code == 1 and test else Color.BROKEN
    return Outcome(color=color, seconds=seconds, test=test, said=said, tail=tail)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    # Ranks, servers of ranks and writer processes too, whether or not pytest came to its end.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _first_failure(report: Path) -> tuple[str, str]:
    """The test of ``report`` that has failed, and what it said first; nothing if none began."""
    if not report.is_file():
        return "", ""
    for case in ElementTree.parse(report).iter("testcase"):
        for found in case:
            message = found.get("message", "")
            # What cannot be imported is told as a failure as well.
            if found.tag in ("failure", "error") and message != "collection failure":
                where = case.get("classname", "").rpartition(".")[2]
                return f"{where}::{case.get('name')}", _beginning(message, found.text or "")
    return "", ""


def _beginning(message: str, report: str) -> str:
    # The crash tests say where the crash was in the first line, and what is wrong in the second.
    lines = [line.removeprefix("Failed: ").strip() for line in message.splitlines()]
    if lines and lines[-1].endswith(_CUT):
        lines.pop()
    if len(lines) == 1:
        # In the report it may come after what has led to it.
        lines += report.partition(f"{lines[0]}\n")[2].splitlines()
    text = _PLACE.sub("", " ".join(lines[:2]))
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


def try_bug(
    bug: Bug | None,
    *,
    arguments: Sequence[str] = (),
    source: Path = ROOT,
    limit_seconds: float = _LIMIT_SECONDS,
) -> Outcome:
    """What the tests make of a copy of ``source`` with ``bug`` in it, or with none.

    Args:
        arguments: for pytest; by default the crash tests.
    """
    with tempfile.TemporaryDirectory(prefix="seeded_bug_", ignore_cleanup_errors=True) as folder:
        tree, scratch = Path(folder, "tree"), Path(folder, "scratch")
        scratch.mkdir()
        copy_tree(source, tree)
        if bug is not None:
            if unfit := misfits(bug, tree):  # somebody has changed the sources meanwhile
                return Outcome(color=Color.BROKEN, seconds=0, tail="\n".join(unfit))
            plant(bug, tree)
        chosen = [*(arguments or (bug.tests if bug else ()) or _TESTS)]
        chosen += ["-k", bug.only] if bug is not None and bug.only and not arguments else []
        found = run_tests(tree, chosen, scratch=scratch, limit_seconds=limit_seconds)
    is_own = bool(arguments or (bug and bug.tests))
    return found if _tells(found, is_own, bug) else replace(found, color=Color.ODD)


def _tells(outcome: Outcome, is_own: bool, bug: Bug | None) -> bool:
    """Whether a red ``outcome`` is that of a promise that is broken; of tests that were asked for any is."""
    if outcome.color is not Color.RED or is_own:
        return True
    if _TOO_SLOW.search(outcome.said) and not (bug is not None and bug.may_wait):
        return False
    return outcome.test.partition("::")[2].startswith(_JUDGES)


def row(bug: Bug, outcome: Outcome) -> str:
    """The line of the table in the docs."""
    end = f"{outcome.color}, {outcome.seconds:.0f} s"
    if outcome.color is Color.RED:
        said = outcome.said.replace("|", "\\|").replace("`", "'")
        end = f"`{outcome.test.partition('[')[0]}`: `{said}`"
    return f"| `{bug.name}` | {bug.what} | {end} |"


def rows_of(page: str) -> dict[str, str]:
    """The lines of the table in ``page`` by the name of the bug."""
    region = page.partition(_BEGIN)[2].partition(_END)[0]
    lines = [line for line in region.splitlines() if line.startswith("| `")]
    return {line.split("`")[1]: line for line in lines}


def with_rows(page: str, new: Mapping[str, str]) -> str:
    """``page`` with these lines in its table; of bugs that were not tried the old ones stay."""
    before, _, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise SystemExit(f"{PAGE} should have a line {_BEGIN!r} and, below it, a line {_END!r}.")
    rows = {**rows_of(page), **new}
    head = "| Bug | What is wrong | Who noticed, and what it said |\n| --- | --- | --- |\n"
    table = "".join(f"{rows[bug.name]}\n" for bug in BUGS if bug.name in rows)
    return f"{before}{_BEGIN}\n{head}{table}\n{_END}{after}"


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").partition("\n")[0])
    names = [bug.name for bug in BUGS]
    parser.add_argument("--list", action="store_true", help="say which bugs there are, and end")
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help="may be given several times"
    )
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the tests without a bug first"
    )
    parser.add_argument("--limit-seconds", type=float, default=_LIMIT_SECONDS, metavar="N")
    parser.add_argument(
        "--write-docs", action="store_true", help=f"put the results into {PAGE.relative_to(ROOT)}"
    )
    parser.add_argument(
        "arguments", nargs="*", help="after --: for pytest, in the place of the crash tests"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if the tests have noticed every bug, 1 if not, 2 if that could not be tried."""
    options = _options(argv)
    chosen = [bug for bug in BUGS if not options.only or bug.name in options.only]
    if options.list:
        for bug in chosen:
            print(f"{bug.name:<32} {bug.what}")
        return 0
    if problems := missing_packages() or "\n".join(
        line for bug in chosen for line in misfits(bug, ROOT)
    ):
        print(problems, file=sys.stderr)
        return 2
    how = {"arguments": options.arguments, "limit_seconds": options.limit_seconds}
    if not options.no_baseline:
        print("without a bug:", end=" ", flush=True)
        print(outcome := try_bug(None, **how), flush=True)
        if outcome.color is not Color.GREEN:
            print(f"{outcome.tail}\nSo a failure would say nothing about a bug.", file=sys.stderr)
            return 2
    results: dict[str, Outcome] = {}
    for number, bug in enumerate(chosen, start=1):
        print(f"[{number}/{len(chosen)}] {bug.name}:", end=" ", flush=True)
        print(outcome := try_bug(bug, **how), flush=True)
        results[bug.name] = outcome
        if outcome.color is not Color.RED:
            print(outcome.tail, flush=True)
    if options.write_docs:
        new = {bug.name: row(bug, results[bug.name]) for bug in chosen}
        PAGE.write_text(with_rows(PAGE.read_text(), new))
    missed = [name for name, outcome in results.items() if outcome.color is not Color.RED]
    print(f"{len(results) - len(missed)} of {len(results)} bugs were noticed.")
    if missed:
        print(f"Not noticed: {', '.join(missed)}.")
    return 1 if missed else 0


if __name__ == "__main__":
    # As Ctrl-C does, it ends the tests as well and leaves no copy behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
