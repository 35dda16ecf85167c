"""The tool settings of this repository find planted errors."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from scripts.setup_env import read_pins

from tests.unit_tests.structure.sources import ROOT, tracked_files

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """An empty project with our settings."""
    for name in ("pyproject.toml", ".flake8"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("torchtitan", "tests", "scripts", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "good.py").write_text("value: int = 1\n")
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True
    )


@pytest.mark.parametrize("package", ["torchtitan", "tests", "scripts", "benchmarks"])
def test_pyrefly_finds_a_wrong_type_in_every_folder(planted: Path, package: str) -> None:
    check = ("pyrefly", "check", "--python-interpreter-path", sys.executable)
    assert run(planted, *check).returncode == 0
    source = "def twice(x: int) -> int:\n    return x + x\n\n\ntwice('a').upper()\n"
    (planted / package / "bad.py").write_text(source)
    found = run(planted, *check)
    assert found.returncode == 1
    assert "bad-argument-type" in found.stdout
    assert "missing-attribute" in found.stdout


def test_flake8_finds_planted_slips_and_leaves_names_of_mathematics(planted: Path) -> None:
    bad = {
        "F401": "import os\n",
        "F821": "print(undefined)\n",
        "F841": "def f():\n    unused = 1\n",
        "B006": "def f(x=[]):\n    return x\n",
        "B904": "try:\n    f = 1\nexcept ValueError:\n    raise KeyError()\n",
        "E501": f"x = {'a' * 120!r}\n",
        "E722": "try:\n    f = 1\nexcept:\n    pass\n",
        "N801": "class lower:\n    pass\n",
        "TOR103": "from functorch import vmap\n\n\nprint(vmap)\n",
    }
    for code, source in bad.items():
        (planted / "torchtitan" / f"{code}.py").write_text(source)
    good = "def f(logits_TV, W):\n    K = logits_TV @ W\n    return K[1 : 1 + 1]\n"
    (planted / "torchtitan" / "good.py").write_text(good)
    found = run(planted, "flake8", "torchtitan").stdout
    for code in bad:
        assert re.search(rf"{code}\.py:\d+:\d+: {code}", found), (code, found)
    assert "good.py" not in found


def test_ufmt_finds_unsorted_imports_and_long_lines(planted: Path) -> None:
    assert run(planted, "ufmt", "check", "torchtitan").returncode == 0
    (planted / "torchtitan" / "bad.py").write_text("import sys\nimport os\nx=[1,2]\n")
    assert run(planted, "ufmt", "check", "torchtitan").returncode == 1


def test_no_tool_is_told_to_look_away() -> None:
    settings = PYPROJECT["tool"]["pyrefly"]
    assert set(settings) == {"project-includes", "python-version"}
    assert "per-file-ignores" not in (ROOT / ".flake8").read_text()
    checked = {path.split("/")[0] for path in tracked_files("*.py")}
    assert checked <= set(settings["project-includes"])


def test_every_dependency_is_pinned_once_to_one_release() -> None:
    names = []
    for path in ("requirements.txt", "requirements-dev.txt"):
        lines = [
            line for line in (ROOT / path).read_text().splitlines() if line[:1] not in ("#", "")
        ]
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", line) for line in lines)
        names += read_pins(ROOT / path)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("can_install", [True, False])
def test_continuous_integration_runs_the_test_command_with_or_without_a_browser(
    tmp_path: Path, can_install: bool
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    commands = {"id": "echo 0", "apt-get": f'echo "apt-get $*" >> log; exit {1 - can_install}'}
    commands |= {"run_tests.sh": 'echo "tests $*" >> log; exit 7'}
    for name, command in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "dirname", "timeout", "sh"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    done = subprocess.run(
        [tmp_path / "bash", tmp_path / ".ci/run"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 7, done.stderr
    log = (tmp_path / "log").read_text().splitlines()
    assert "apt-get -qq update" in log and log[-1].strip() == "tests"
    assert ("will be skipped" in done.stdout) == (not can_install)


def test_the_commit_hook_is_the_lint_script() -> None:
    found = run(ROOT, "pre_commit", "validate-config", ".pre-commit-config.yaml")
    assert found.returncode == 0, found.stdout
    assert "entry: scripts/check.sh" in (ROOT / ".pre-commit-config.yaml").read_text()
