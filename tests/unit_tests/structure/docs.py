"""The code blocks of the documentation, and the file tree at the end of the README.

A ``python`` or ``bash`` block is executed as it stands. Two things are done to make that possible:

- blocks run in a copy of the repository (``Workspace``), so that what they write stays there;
- ``./run_train.sh`` gets ``--training.steps`` right behind it, unless the block says the number
  itself or asks for help, so that a run of minutes takes seconds. Everything else is real.

A comment right before a block says when something else is done:

- ``<!-- docs-test: file NAME -->``: the reader saves this Python file; a test of its own runs it;
- ``<!-- docs-test: dry run -->``: for machines that are not here. ``./run_train.sh`` only prints the
  line that would start the ranks, and that line is read as torchrun and the trainer read it;
- ``<!-- docs-test: skip, REASON -->``: cannot be executed.

    README.md, docs/*.md -> blocks_of -> problem_with | Workspace.run
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.ranks.pool import end_of_ranks
from tests.unit_tests.scripts.launch_line import launch_in
from tests.unit_tests.structure.forked import run_block
from tests.unit_tests.structure.sources import ROOT, tracked_files

TRAINING_STEPS = 4
EXECUTED = ("python", "bash")
# Labels of what is shown, not run. A shell block cannot hide behind another name for bash.
SHOWN = ("text", "json", "toml", "yaml", "ini", "diff")
_SKIP = re.compile(r"<!-- docs-test: skip, (?P<reason>.+) -->")
_FILE = re.compile(r"<!-- docs-test: file (?P<name>\w+\.py) -->")
_DRY_RUN = "<!-- docs-test: dry run -->"
_TRAIN = re.compile(r"(?<!\S)\./run_train\.sh(?!\S)")


@dataclass(kw_only=True, slots=True, frozen=True)
class Block:
    """One fenced block of a Markdown file."""

    path: str
    line: int
    language: str
    text: str
    skip_reason: str | None
    file_name: str | None = None
    """Where the reader saves it; None for a block that runs as it stands."""
    is_dry: bool = False

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"


def blocks_of(path: str, markdown: str) -> Iterator[Block]:
    """The fenced blocks in order. A fence may be indented, as in a list."""
    fence, start, body, previous = None, 0, [], ""
    for number, line in enumerate(markdown.splitlines(), start=1):
        stripped = line.strip()
        if fence is None:
            if stripped.startswith("```"):
                fence, start, body = line, number, []
            elif stripped:
                previous = stripped
        elif stripped == "```":
            indent = len(fence) - len(fence.lstrip())
            skip, file = _SKIP.fullmatch(previous), _FILE.fullmatch(previous)
            yield Block(
                path=path,
                line=start,
                language=fence.strip().removeprefix("```"),
                text="".join(f"{text[indent:]}\n" for text in body),
                skip_reason=skip["reason"] if skip else None,
                file_name=file["name"] if file else None,
                is_dry=previous == _DRY_RUN,
            )
            fence, previous = None, ""
        else:
            body.append(line)
    if fence is not None:
        yield Block(path=path, line=start, language="unclosed", text="", skip_reason=None)


def problem_with(block: Block) -> str | None:
    """Why ``block`` cannot stay as it is; None when it is executed, shown or rightly skipped."""
    if block.language not in (*EXECUTED, *SHOWN):
        return f"{block.place}: language {block.language!r}; use one of {(*EXECUTED, *SHOWN)}"
    if block.is_dry and "./run_train.sh" not in block.text:
        return (
            f"{block.place}: a dry run of nothing; only ./run_train.sh can print what it would do"
        )
    if block.file_name is not None and block.language != "python":
        return f"{block.place}: {block.file_name} is Python, the block is {block.language}"
    if block.skip_reason is not None and len(block.skip_reason.split()) < 3:
        return f"{block.place}: skipped without a reason that a reader could judge"
    return None


def shortened(script: str) -> str:
    """``script`` with runs of ``TRAINING_STEPS`` steps where it does not say how many."""
    lines = []
    for line in re.sub(r"\s*\\\n\s*", " ", script).splitlines():
        if not re.search(r"--training[.-]steps|--help", line):
            line = _TRAIN.sub(f"./run_train.sh --training.steps {TRAINING_STEPS}", line)
        lines.append(line)
    return "\n".join(lines) + "\n"


class Workspace:
    """A copy of the files of the repository, with the environment of the running tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for path in tracked_files():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)

    def run(self, block: Block, timeout_seconds: float) -> None:
        """Execute ``block``; AssertionError with its output when it fails."""
        if block.language == "python":
            self._run_python(block, timeout_seconds)
        else:
            self._run_shell(block, timeout_seconds)

    def _run_python(self, block: Block, timeout_seconds: float) -> None:
        (end,) = end_of_ranks(
            1, run_block, block.text, str(self.folder), init=False, timeout_seconds=timeout_seconds
        )
        assert end.how == "returned", f"{block.place} {end.how}:\n{end.log}\n{end.detail}"

    def _run_shell(self, block: Block, timeout_seconds: float) -> None:
        dry_run = {"TORCHTITAN_DRY_RUN": "1"} if block.is_dry else {}
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        # A block says `python`; that is the interpreter the reader's set-up made.
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        environment |= {"PYTHON": sys.executable, "PYTHONPATH": str(self.folder)} | dry_run
        finished = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", shortened(block.text)],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
        )
        tail = "\n".join(finished.stdout.splitlines()[-40:])
        assert finished.returncode == 0, f"{block.place} exits {finished.returncode}:\n{tail}"
        if block.is_dry:
            launch_in(finished.stdout)


def anchors_of(markdown: str) -> set[str]:
    """Where links to the headings of a page go, as Markdown viewers name them."""
    text = "".join(re.split(r"^```.*?^```", markdown, flags=re.DOTALL | re.MULTILINE))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: str, pages: Mapping[str, str]) -> list[str]:
    """Links of the page ``path`` to a file that is not there, or to a heading that is not in it.

    ``pages`` has the text of all pages by path.
    """
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", pages[path]):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = os.path.normpath(os.path.join(os.path.dirname(path), name)) if name else path
        if there not in pages and not (ROOT / there).exists():
            found.append(f"{path}: {target}: no such file")
        elif anchor and anchor not in anchors_of(pages.get(there, "")):
            found.append(f"{path}: {target}: no such heading")
    return found


def tree_of(readme: str) -> dict[str, str]:
    """Path -> description, from the last ``text`` block of the README; folders end in ``/``.

    One entry a line, two spaces of indentation a level, two spaces or more before the description.
    """
    blocks = [block for block in blocks_of("README.md", readme) if block.language == "text"]
    entries: dict[str, str] = {}
    parents: list[str] = []
    for line in blocks[-1].text.splitlines() if blocks else []:
        name, _, description = line.strip().partition("  ")
        level = (len(line) - len(line.lstrip())) // 2
        parents = [*parents[:level], name]
        entries["".join(parents)] = description.strip()
    return entries


def tree_violations(readme: str, files: Sequence[str]) -> list[str]:
    """Files that the tree does not name, entries that do not exist, entries without a description.

    A folder that is listed without content stands for all that is in it. Empty ``__init__.py``
    files need no line; the caller leaves them out of ``files`` .
    """
    entries = tree_of(readme)
    folders = {
        "".join(f"{part}/" for part in path.split("/")[:-1][:depth])
        for path in files
        for depth in range(1, path.count("/") + 1)
    }
    closed = [
        entry
        for entry in entries
        if entry.endswith("/")
        and not any(other != entry and other.startswith(entry) for other in entries)
    ]
    found = [
        f"{entry}: listed, does not exist"
        for entry in entries
        if entry not in folders and entry not in files and entry != "./"
    ]
    found += [
        f"{path}: exists, not listed"
        for path in files
        if path not in entries and not path.startswith(tuple(closed))
    ]
    found += [f"{entry}: no description" for entry, text in entries.items() if not text]
    return sorted(found)


def flags_in(text: str) -> set[str]:
    """The flags of a section (``--section.field``) in ``text``, spelled with dashes."""
    found = re.findall(r"--[a-z][a-z_-]*(?:\.[a-z0-9][a-z0-9_-]*)+", text)
    return {flag.replace("_", "-") for flag in found}


def typed_with_the_environment(text: str) -> list[str]:
    """The beginnings of the commands in ``text`` that need what the set-up has installed."""
    return re.findall(r"(?<![\w./-])(?:python (?:-m |scripts/)|torchrun -)[\w./-]+", text)
