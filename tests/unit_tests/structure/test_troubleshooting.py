"""docs/troubleshooting.md has every error class, and no message that nothing says any more."""

import re
from collections.abc import Iterator

import pytest

from tests.unit_tests.structure.messages import error_classes, is_said, phrases, words_of
from tests.unit_tests.structure.sources import ROOT, tracked_files

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
PARTS = ("torchtitan/", "scripts/", "benchmarks/")
SOURCES = [(ROOT / path).read_text() for path in tracked_files("*.py") if path.startswith(PARTS)]
SHELL = ("run_train.sh", "multinode_trainer.slurm", "scripts/setup_env.sh")
# Said by others: the system, tyro, torchrun, gloo.
FOREIGN = {
    "Permission denied",
    "Stale file handle",
    "No space left on device",
    "Connection refused",
    "Unrecognized options",
    "RendezvousTimeoutError",
    "RendezvousConnectionError",
    "Gloo connectFullMesh failed",
}


def messages() -> Iterator[str]:
    """What the entries begin with, as far as it is printed by a program."""
    for paragraph in re.split(r"\n\s*\n", PAGE):
        if symptom := re.match(r"\*\*(.+?)\*\*", paragraph, re.DOTALL):
            for quoted in re.findall(r"`([^`]+)`", symptom[1]):
                yield " ".join(quoted.split())


def test_every_error_class_has_its_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \| \S.* \| \S.* \|$", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(error_classes(SOURCES)), (
        "docs/troubleshooting.md, By the name of the error: each class has one row with its cause and "
        "what to do"
    )


def test_every_message_is_one_that_the_code_can_say() -> None:
    said = [words for source in SOURCES for words in phrases(source)]
    said += [words_of(line) for path in SHELL for line in (ROOT / path).read_text().splitlines()]
    # A flag or a setting stands for itself; another test says whether it exists.
    asked = [m for m in messages() if m not in FOREIGN and not m.startswith("--")]
    unsaid = [m for m in asked if not any(is_said(words_of(m), words) for words in said)]
    assert len(asked) > 50
    assert not unsaid, "nothing says this: " + "\n".join(unsaid)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("rank 1 failed first, at step N", True),
        ("failed first, at step 7", True),
        ("rank 1 broke first, in step 7", False),
        ("at step N failed first", False),
        ("the first of some other words", False),
    ],
)
def test_a_message_is_found_where_it_is_said(message: str, expected: bool) -> None:
    (phrase,) = phrases('say(f"rank {rank} failed first{where}, at step {step}: {why}")')
    assert is_said(words_of(message), phrase) == expected


def test_values_alone_say_nothing() -> None:
    phrase, *_ = phrases('f"{path}: {reason}"')
    assert not is_said(words_of("no such thing"), phrase)


def test_classes_are_errors_over_any_number_of_steps() -> None:
    sources = [
        "class B(A): ...\nclass A(x.y.OSError, Named): ...",
        "class C(B): ...\nclass D(Named): ...\nclass Named: ...\nclass StopNow(KeyboardInterrupt): ...",
    ]
    assert error_classes(sources) == {"A", "B", "C", "StopNow"}
