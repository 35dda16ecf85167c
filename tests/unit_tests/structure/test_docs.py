"""Every code block of the documentation runs, and the README names every file."""

import contextlib
from pathlib import Path

import pytest
from scripts import flags_page
from torchtitan.config.manager import EARLY_FLAGS

from tests.unit_tests.structure import docs
from tests.unit_tests.structure.docs import Block, blocks_of, Workspace
from tests.unit_tests.structure.sources import ROOT, tracked_files

PAGES = [path for path in tracked_files("*.md") if path.count("/") == 0 or path[:5] == "docs/"]
TEXTS = {path: (ROOT / path).read_text() for path in PAGES}
BLOCKS = [block for path, text in TEXTS.items() for block in blocks_of(path, text)]
EXECUTED = [
    block
    for block in BLOCKS
    if block.language in docs.EXECUTED and block.skip_reason is None and block.file_name is None
]
# What they name is not for the reader to type.
NOT_TYPED_FROM = ("docs/flags.md", "CHANGELOG.md")
# Each skipped block is a promise that nothing checks. Raise this only with a reason.
MAX_SKIPPED = 5
# Two set-ups of ranks and a few steps on a loaded machine of two cores.
TIMEOUT_SECONDS = 280


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("docs") / "torchtitan")


@pytest.mark.slow
@pytest.mark.docs
@pytest.mark.parametrize("block", EXECUTED, ids=lambda block: block.place)
def test_the_block_runs(block: Block, workspace: Workspace) -> None:
    workspace.run(block, TIMEOUT_SECONDS)


def test_every_block_is_executed_shown_or_skipped_for_a_reason() -> None:
    assert not [problem for block in BLOCKS if (problem := docs.problem_with(block))]


def test_files_to_save_are_on_the_page_whose_test_runs_them() -> None:
    # tests/ranks/test_extend.py trains with each of them.
    assert {block.path for block in BLOCKS if block.file_name} <= {"docs/extend.md"}


def test_few_blocks_are_skipped() -> None:
    skipped = [f"{block.place}: {block.skip_reason}" for block in BLOCKS if block.skip_reason]
    assert len(skipped) <= MAX_SKIPPED, "\n".join(skipped)


@pytest.mark.parametrize("path", [path for path in PAGES if path not in NOT_TYPED_FROM])
def test_a_page_that_says_python_says_which_one(path: str) -> None:
    # Where only `./run_train.sh` was typed there is no other with the packages.
    typed = docs.typed_with_the_environment(TEXTS[path])
    assert not typed or ". .venv/bin/activate" in TEXTS[path], typed


def test_what_is_typed_with_the_environment_is_found() -> None:
    text = (
        "`python -m a.b --c`, ./run_train.sh\n```bash\npython scripts/d.py\nX=1 torchrun --e\n```"
    )
    assert docs.typed_with_the_environment(text) == [
        "python -m a.b",
        "python scripts/d.py",
        "torchrun --e",
    ]
    assert not docs.typed_with_the_environment(
        "python is fine, torchrun too; `.venv/bin/python -m a`"
    )


def test_every_flag_in_the_text_exists() -> None:
    # Most commands stand in the running text, where nothing executes them. The flags of the page
    # of all flags are those of the help, see test_flags_page.py.
    names = [flag.name for section in flags_page.all_sections() for flag in section.flags]
    known = {flag.name for flag in EARLY_FLAGS}
    for name in names:
        start, _, last = name.replace("_", "-").rpartition(".")
        known |= {f"--{start}.{last}", f"--{start}.no-{last}"}
    named = {flag: path for path, text in TEXTS.items() for flag in docs.flags_in(text)}
    assert len(named) > 100
    assert not sorted(f"{path}: {flag}" for flag, path in named.items() if flag not in known)


def test_every_link_leads_to_a_file_or_a_heading() -> None:
    broken = [link for path in PAGES for link in docs.broken_links(path, TEXTS)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("link", "complaint"),
    [
        ("[a](config.md)", None),
        ("[a](../README.md#train)", None),
        ("[a](https://example.org/none)", None),
        ("# A `title`, it *is*\n[a](#a-title-it-is)", None),
        ("[a](none.md)", "no such file"),
        ("[a](config.md#none)", "no such heading"),
        ("[a](#none)", "no such heading"),
        ("```text\n# none\n```\n[a](#none)", "no such heading"),
    ],
)
def test_a_link_into_the_void_is_found(link: str, complaint: str | None) -> None:
    found = docs.broken_links("docs/new.md", TEXTS | {"docs/new.md": link})
    assert [line.rpartition(": ")[2] for line in found] == ([complaint] if complaint else [])


def test_flags_are_found_in_either_spelling() -> None:
    text = "`--checkpoint.keep_latest_k 2`, --a.no-b=c; --help, TORCHRUN_ARGS='--max-restarts 1'"
    assert docs.flags_in(text) == {"--checkpoint.keep-latest-k", "--a.no-b"}


def test_the_readme_names_every_file_once_and_no_other() -> None:
    files = [
        path
        for path in tracked_files()
        if not (path.endswith("__init__.py") and (ROOT / path).stat().st_size == 0)
    ]
    readme = ROOT / "README.md"
    assert readme.exists(), "README.md is missing"
    assert not (found := docs.tree_violations(readme.read_text(), files)), "\n".join(found)


PAGE = """
Text
```bash
echo one
```
<!-- docs-test: skip, needs eight GPUs to run -->

- item
<!-- docs-test: skip, needs two machines -->
  ```python
  if True:
      x = 1
  ```
```sh
echo hidden
```
<!-- docs-test: file my_model.py -->
```python
x = 1
```
<!-- docs-test: dry run -->
```bash
NNODES=2 ./run_train.sh
```
"""


def test_blocks_keep_their_line_language_text_and_reason() -> None:
    first, second, third, file, dry = blocks_of("a.md", PAGE)
    assert (first.line, first.language, first.text) == (3, "bash", "echo one\n")
    assert first.skip_reason is None
    assert (second.text, second.skip_reason) == ("if True:\n    x = 1\n", "needs two machines")
    assert third.skip_reason is None
    assert (file.file_name, file.is_dry) == ("my_model.py", False)
    assert (dry.file_name, dry.is_dry) == (None, True)


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("```sh\necho\n```\n", "language 'sh'"),
        ("```\necho\n```\n", "language ''"),
        ("```bash\necho\n", "language 'unclosed'"),
        ("<!-- docs-test: dry run -->\n```bash\necho\n```\n", "a dry run of nothing"),
        ("<!-- docs-test: file a.py -->\n```bash\necho\n```\n", "a.py is Python"),
        ("<!-- docs-test: skip, slow -->\n```bash\necho\n```\n", "without a reason"),
    ],
)
def test_a_block_that_would_escape_is_found(page: str, complaint: str) -> None:
    (block,) = blocks_of("a.md", page)
    assert complaint in (docs.problem_with(block) or "")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("./run_train.sh", "./run_train.sh --training.steps 4"),
        ("NGPU=2 ./run_train.sh --a 1", "NGPU=2 ./run_train.sh --training.steps 4 --a 1"),
        ("./run_train.sh \\\n  --a 1", "./run_train.sh --training.steps 4 --a 1"),
        ("./run_train.sh --training.steps 9", "./run_train.sh --training.steps 9"),
        ("./run_train.sh --help", "./run_train.sh --help"),
        ("ls ./run_train.sh.bak", "ls ./run_train.sh.bak"),
    ],
)
def test_a_run_without_a_number_of_steps_is_shortened(script: str, expected: str) -> None:
    assert docs.shortened(script) == f"{expected}\n"


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("python", "raise RuntimeError('planted')"),
        ("bash", "echo planted; false\ntrue"),
        ("bash", "echo planted; echo $UNSET_NAME"),
        ("bash", "echo planted; false | true"),
    ],
)
def test_a_block_that_fails_is_found(workspace: Workspace, language: str, text: str) -> None:
    block = Block(path="a.md", line=7, language=language, text=text, skip_reason=None)
    with pytest.raises(AssertionError, match=r"(?s)a.md:7 (exits 1|raised):.*(planted|UNSET)"):
        workspace.run(block, TIMEOUT_SECONDS)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("NNODES=2 TORCHRUN_ARGS='--rdzv_endpoint=a:1' ./run_train.sh", None),
        ("TORCHRUN_ARGS='--no_such_option=1' ./run_train.sh", SystemExit),
        ("./run_train.sh --no.such-flag", SystemExit),
        ("true || ./run_train.sh", AssertionError),
    ],
)
def test_a_dry_run_is_held_to_what_torchrun_and_the_trainer_read(
    workspace: Workspace, text: str, error: type[BaseException] | None
) -> None:
    page = f"<!-- docs-test: dry run -->\n```bash\n{text}\n```\n"
    (block,) = blocks_of("a.md", page)
    with pytest.raises(error) if error else contextlib.nullcontext():
        workspace.run(block, TIMEOUT_SECONDS)


def test_a_block_sees_the_package_and_writes_outside_the_repository(workspace: Workspace) -> None:
    text = "import torchtitan, pathlib; pathlib.Path('new').write_text(torchtitan.__file__)"
    workspace.run(
        Block(path="a.md", line=1, language="python", text=text, skip_reason=None), TIMEOUT_SECONDS
    )
    assert Path((workspace.folder / "new").read_text()).is_relative_to(workspace.folder)
    assert not (ROOT / "new").exists()


TREE = """
```text
run.sh  starts it
lib/  the code
  a.py   first
  sub/   many small files
```
"""


def test_a_tree_that_names_everything_passes() -> None:
    assert (
        docs.tree_violations(TREE, ["run.sh", "lib/a.py", "lib/sub/x.py", "lib/sub/d/y.py"]) == []
    )


@pytest.mark.parametrize(
    ("readme", "files", "complaint"),
    [
        (TREE, ["run.sh", "lib/a.py", "lib/sub/x.py", "lib/b.py"], "lib/b.py: exists, not listed"),
        (TREE, ["run.sh", "lib/sub/x.py"], "lib/a.py: listed, does not exist"),
        (TREE, ["run.sh", "lib/a.py"], "lib/sub/: listed, does not exist"),
        ("```text\na.py\n```\n", ["a.py"], "a.py: no description"),
        ("no tree", ["a.py"], "a.py: exists, not listed"),
    ],
)
def test_a_slip_in_the_tree_is_found(readme: str, files: list[str], complaint: str) -> None:
    assert docs.tree_violations(readme, files) == [complaint]
