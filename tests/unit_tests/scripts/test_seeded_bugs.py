"""The seeded bugs fit the sources, and the script tells the four ends of a run apart."""

import subprocess
from pathlib import Path

import pytest
from scripts import seeded_bugs
from scripts.bug_kinds import Bug, Edit
from scripts.bug_list import BUGS
from scripts.seeded_bugs import Color, Outcome, ROOT, row, rows_of, try_bug, with_rows

ADD = Edit(path="calc.py", old="a + b", new="a - b")
WRONG = Bug(name="wrong", what="It subtracts.", edits=(ADD,))

TESTS = """
import pytest
import time
from pathlib import Path

from calc import add, is_slow

def test_the_copy_is_what_runs():
    import calc
    assert Path(calc.__file__).parent == Path.cwd()

def test_it_adds(tmp_path):
    assert not is_slow or time.sleep(600)
    assert add(1, 2) == 3, f"1 | 2\\nmore"

def test_it_subtracts():
    try:
        assert add(1, 2) == -1, "the cause\\nof it"
    except AssertionError as error:
        lost = "lost: /tmp/a/checked/f-1/step-2" + 600 * "."
        pytest.fail(f"point 7:\\n{lost}\\nand more", pytrace=False)

def test_never_reached():
    raise RuntimeError
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small repository with something that is ignored."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "calc.py").write_text("is_slow = False\n\ndef add(a, b):\n    return a + b\n")
    (folder / "test_calc.py").write_text(TESTS)
    (folder / ".gitignore").write_text("outputs/\n")
    (folder / "outputs").mkdir()
    (folder / "outputs/large").write_text("no part of the tree")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def outcome_of(
    tree: Path, *edits: Edit, limit_seconds: float = 60, chosen: str = "adds"
) -> Outcome:
    bug = Bug(name="a-bug", what="", edits=edits)
    arguments = ["test_calc.py", "-k", f"copy or {chosen}"]
    return try_bug(bug, arguments=arguments, source=tree, limit_seconds=limit_seconds)


def test_a_failing_test_is_red_and_told_with_what_it_said(tree: Path) -> None:
    before = (tree / "calc.py").read_text()
    outcome = outcome_of(tree, ADD)
    assert (outcome.color, outcome.test) == (Color.RED, "test_calc::test_it_adds")
    assert outcome.said == "AssertionError: 1 | 2 more"
    assert (tree / "calc.py").read_text() == before
    assert "red after" in str(outcome)


def test_of_a_long_failure_the_beginning_is_told_without_places_that_change(tree: Path) -> None:
    outcome = outcome_of(tree, chosen="subtracts")
    assert outcome.said.startswith("point 7: lost: step-2...") and len(outcome.said) < 300


def test_a_bug_that_nobody_notices_is_green(tree: Path) -> None:
    outcome = outcome_of(tree, Edit(path="calc.py", old="a + b", new="b + a"))
    assert outcome.color is Color.GREEN


@pytest.mark.parametrize(
    ("edit", "chosen"),
    [
        (Edit(path="calc.py", old="return", new="retur"), "adds"),
        (Edit(path="calc.py", old="no such text", new=""), "adds"),
        (Edit(path="calc.py", old="def add(", new="def plus("), "adds"),
        (Edit(path="calc.py", old="a + b", new="a - b"), "nothing_of_this_name and not test"),
    ],
)
def test_tests_that_could_not_begin_are_not_red(tree: Path, edit: Edit, chosen: str) -> None:
    arguments = ["test_calc.py", "-k", chosen]
    bug = Bug(name="a-bug", what="", edits=(edit,))
    outcome = try_bug(bug, arguments=arguments, source=tree, limit_seconds=60)
    assert outcome.color is Color.BROKEN
    assert outcome.tail


def test_tests_that_do_not_end_are_not_red(tree: Path) -> None:
    slow = Edit(path="calc.py", old="is_slow = False", new="is_slow = True")
    outcome = outcome_of(tree, slow, limit_seconds=3)
    assert outcome.color is Color.HUNG


@pytest.mark.parametrize(
    ("test", "said", "may_wait", "color"),
    [
        ("test_a_start_after_a_crash_goes_on", "AssertionError: nothing was loaded", False, "RED"),
        ("test_a_start_after_a_crash_goes_on", "AssertionError: this took 20.3 s", False, "ODD"),
        ("test_a_start_after_a_crash_goes_on", "Waiting up to 10 s", False, "ODD"),
        ("test_a_start_after_a_crash_goes_on", "Waiting up to 10 s", True, "RED"),
        ("test_a_start_after_a_crash_goes_on", "Failed: Timeout (>300.0s)", False, "ODD"),
        ("test_an_upload_that_is_given_up", "AssertionError", False, "ODD"),
    ],
)
def test_what_fails_for_another_reason_says_nothing_about_a_bug(
    tree: Path, monkeypatch: pytest.MonkeyPatch, test: str, said: str, may_wait: bool, color: str
) -> None:
    ends = Outcome(color=Color.RED, seconds=1, test=f"test_a::{test}[1]", said=said)
    monkeypatch.setattr(seeded_bugs, "run_tests", lambda *_, **__: ends)
    bug = Bug(name="a-bug", what="", edits=(ADD,), may_wait=may_wait)
    assert try_bug(bug, source=tree).color is Color[color]
    # Of tests that were asked for each counts.
    assert try_bug(bug, source=tree, arguments=["test_calc.py"]).color is Color.RED


def test_only_what_belongs_to_the_tree_is_copied(tree: Path, tmp_path: Path) -> None:
    seeded_bugs.copy_tree(tree, tmp_path / "copy")
    names = sorted(path.name for path in (tmp_path / "copy").iterdir())
    assert names == [".gitignore", "calc.py", "test_calc.py"]


def test_a_bug_that_fits_nowhere_or_twice_is_told(tree: Path) -> None:
    edits = (
        Edit(path="calc.py", old="a", new="b"),
        Edit(path="calc.py", old="no such text", new=""),
        Edit(path="none.py", old="a", new="b"),
        ADD,
    )
    found = seeded_bugs.misfits(Bug(name="lost", what="", edits=edits), tree)
    assert [line.splitlines()[0].rpartition(" it ")[2] for line in found] == [
        f"{(tree / 'calc.py').read_text().count('a')} times:",
        "0 times:",
        "0 times:",
    ]


def test_every_bug_fits_the_sources_exactly_once() -> None:
    assert not [line for bug in BUGS for line in seeded_bugs.misfits(bug, ROOT)]


def test_every_bug_leaves_python_behind(tmp_path: Path) -> None:
    for bug in BUGS:
        texts = {edit.path: (ROOT / edit.path).read_text() for edit in bug.edits}
        for edit in bug.edits:
            texts[edit.path] = texts[edit.path].replace(edit.old, edit.new)
        for path, text in texts.items():
            compile(text, f"{bug.name}: {path}", "exec")


def test_the_bugs_have_names_of_their_own_and_change_something() -> None:
    names = [bug.name for bug in BUGS]
    assert len(set(names)) == len(names) >= 12
    changes = [bug.edits for bug in BUGS]
    assert len(set(changes)) == len(changes)
    assert all(edit.old != edit.new for bug in BUGS for edit in bug.edits)


def test_the_docs_have_a_row_for_every_bug_and_no_other() -> None:
    rows = rows_of(seeded_bugs.PAGE.read_text())
    assert list(rows) == [bug.name for bug in BUGS]
    assert [bug.name for bug in BUGS if bug.what not in rows[bug.name]] == []


def test_rows_of_bugs_that_were_not_tried_stay() -> None:
    first, second, *_ = BUGS
    red = Outcome(color=Color.RED, seconds=9, test="test_a::test_b[1]", said="lost | step 4")
    green = Outcome(color=Color.GREEN, seconds=70)
    page = "before\n<!-- seeded bugs -->\n<!-- end of seeded bugs -->\nafter\n"
    page = with_rows(page, {first.name: row(first, green), second.name: row(second, red)})
    page = with_rows(page, {first.name: row(first, red), "gone": "| `gone` | | |"})
    assert page.startswith("before\n") and page.endswith("\nafter\n")
    assert list(rows_of(page)) == [first.name, second.name]
    assert rows_of(page)[first.name].endswith("| `test_a::test_b`: `lost \\| step 4` |")
    with pytest.raises(SystemExit, match="should have a line"):
        with_rows("no table", {})


def test_the_list_names_every_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert seeded_bugs.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [bug.name for bug in BUGS]


def test_a_python_without_the_packages_of_the_tests_is_told_what_to_type(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seeded_bugs.missing_packages() == ""
    monkeypatch.setattr(seeded_bugs, "_NEEDED", ("pytest", "no_such_package"))
    # With something that is over at once, should it begin.
    options = ["--no-baseline", "--only", BUGS[0].name, "--", "no_such_test.py"]
    assert seeded_bugs.main(options) == 2
    said = capsys.readouterr()
    assert "has no no_such_package," in said.err and "scripts/setup_env.sh dev" in said.err
    assert said.out == ""
