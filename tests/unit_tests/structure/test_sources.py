"""Limits and habits of source files, on the real tree and on planted violations."""

import os

import pytest

from tests.unit_tests.structure import sources
from tests.unit_tests.structure.sources import ROOT, tracked_files

PYTHON_FILES = {path: (ROOT / path).read_text() for path in tracked_files("*.py")}
SHELL_FILES = [*tracked_files("*.sh"), ".ci/run"]


@pytest.mark.parametrize(
    "check",
    [sources.size_violations, sources.ascii_violations, sources.suppression_violations],
    ids=["size", "ascii", "suppressions"],
)
def test_every_python_file_keeps_to(check) -> None:
    found = [line for path, source in PYTHON_FILES.items() for line in check(path, source)]
    assert not found, "\n".join(found)


def test_no_file_is_larger_than_the_limit() -> None:
    sizes = {path: (ROOT / path).stat().st_size for path in tracked_files()}
    large = {path for path, size in sizes.items() if size > sources.MAX_FILE_BYTES}
    assert large <= sources.LARGE_FILES


def test_every_script_can_be_executed_and_is_ascii() -> None:
    for path in SHELL_FILES:
        text = (ROOT / path).read_text()
        assert not sources.ascii_violations(path, text)
        # A file without a first line of its own is sourced by others.
        assert os.access(ROOT / path, os.X_OK) == text.startswith("#!"), path


def function_of(num_lines: int) -> str:
    return "@decorated\ndef long():\n" + "    pass\n" * (num_lines - 2)


def test_the_longest_allowed_file_and_function_pass() -> None:
    assert sources.size_violations("a.py", "x = 1\n" * 399) == []
    assert sources.size_violations("a.py", function_of(59)) == []


def test_a_file_and_a_function_one_line_too_long_are_found() -> None:
    assert sources.size_violations("a.py", "x = 1\n" * 400) == ["a.py: 400 lines, at most 399"]
    source = "class A:\n" + function_of(60).replace("@", " @").replace("def", " def")
    assert sources.size_violations("a.py", source) == ["a.py:2: long has 60 lines, at most 59"]


def test_a_letter_outside_ascii_is_found() -> None:
    (found,) = sources.ascii_violations("a.py", 'ok = 1\nname = "caf\u00e9"\n')
    assert found.startswith("a.py:2:")


@pytest.mark.parametrize(
    "comment",
    ["noqa", "type: ignore", "noqa: F401", "type: ignore[arg-type]", "pyrefly: ignore[x] ok"],
)
def test_a_silenced_check_without_a_reason_is_found(comment: str) -> None:
    (found,) = sources.suppression_violations("a.py", f"a = 1\nimport b  # {comment}\n")
    assert found.startswith("a.py:2:")


@pytest.mark.parametrize(
    "source",
    [
        "import b  # noqa: F401 names for other modules\n",
        "# The stub of b lacks this call.\nb.c()  # type: ignore[attr-defined]\n",
        "b.c()  # pyrefly: ignore[missing-attribute]: added at run time\n",
        's = "# noqa"\n',
    ],
)
def test_a_silenced_check_with_a_reason_passes(source: str) -> None:
    assert sources.suppression_violations("a.py", source) == []
