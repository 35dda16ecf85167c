"""run_train.sh and run_tests.sh: what they start, with which settings, and how they end.

The scripts are the real ones. Their environment is a recorder that stands in for Python and writes
down how it was called, so that no run has to start to see how one would be started.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit_tests.structure.sources import ROOT

RECORDER = """#!{python}
import json, os, sys

if sys.argv[1] == "-c":
    # The question for the number of GPUs, asked where there is a device file.
    print(os.environ.get("GPUS", "0"))
    sys.exit()
with open(os.environ["RECORD"], "a") as record:
    json.dump({{"arguments": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd()}}, record)
    record.write("\\n")
exits = json.loads(os.environ.get("EXITS", "{{}}"))
print("said by", sys.argv[2])
sys.exit(exits.get(sys.argv[2], 0))
"""
TORCHRUN, TRAIN, PREFLIGHT = "torchtitan.launch", "torchtitan.train", "torchtitan.preflight"
HAS_DEVICE_FILE = any(
    Path("/dev", name).exists() for name in ("nvidia0", "kfd", "dxg", "dri/renderD128")
)


@dataclass(kw_only=True, slots=True)
class Outcome:
    code: int
    output: str
    calls: list[dict]
    """One entry for each start of the interpreter, in order."""

    def arguments(self, module: str) -> list[str]:
        """Arguments of the call of ``module``, without ``-m`` and its name."""
        (call,) = [c for c in self.calls if c["arguments"][:2] == ["-m", module]]
        return call["arguments"][2:]

    def modules(self) -> list[str]:
        return [call["arguments"][1] for call in self.calls]


class Launcher:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a clone"
        (self.folder / "scripts").mkdir(parents=True)
        for name in ("run_train.sh", "run_tests.sh", "scripts/phases.sh", "scripts/check.sh"):
            shutil.copy(ROOT / name, self.folder / name)
        python = self.folder / "python"
        python.write_text(RECORDER.format(python=sys.executable))
        stub = self.folder / "scripts" / "setup_env.sh"
        stub.write_text(f"#!/bin/sh\necho \"$1\" >'{self.folder}/group'\necho '{python}'\n")
        for path in (python, stub):
            path.chmod(0o755)

    def __call__(self, script: str, *arguments: str, **environment: str) -> Outcome:
        record = self.folder / "record"
        record.write_text("")
        clean = {"PATH": os.environ["PATH"], "RECORD": str(record), "HOME": str(self.folder)}
        finished = subprocess.run(
            [self.folder / script, *arguments],
            # From elsewhere: the script finds its repository itself.
            cwd="/",
            env=clean | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        calls = [json.loads(line) for line in record.read_text().splitlines()]
        return Outcome(code=finished.returncode, output=finished.stdout, calls=calls)


@pytest.fixture
def launch(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


def test_the_bare_command_trains_the_default_recipe_on_two_cpu_ranks(launch: Launcher) -> None:
    outcome = launch("run_train.sh")
    assert outcome.code == 0, outcome.output
    assert (launch.folder / "group").read_text() == "runtime\n"
    recipe = ["--module", "llama3", "--config", "llama3_jargon"]
    assert outcome.arguments(PREFLIGHT) == recipe
    expected = "--nnodes=1 --nproc_per_node=2 --rdzv_backend c10d --rdzv_endpoint=localhost:0 "
    expected += "--local-ranks-filter 0 --role rank --tee 3 -m torchtitan.train"
    assert outcome.arguments(TORCHRUN) == [*expected.split(), *recipe]
    environment = outcome.calls[-1]["environment"]
    assert environment["OMP_NUM_THREADS"] == "1"
    assert (environment["NGPU"], environment["NNODES"]) == ("2", "1")


def test_the_default_recipe_is_not_looked_for_in_another_module(launch: Launcher) -> None:
    for arguments, environment in ((["--module=mine"], {}), ([], {"MODULE": "mine"})):
        asked = launch("run_train.sh", *arguments, **environment).arguments(PREFLIGHT)
        assert "mine" in " ".join(asked) and "--config" not in asked
        asked = launch("run_train.sh", *arguments, CONFIG="notes", **environment).arguments(
            PREFLIGHT
        )
        assert asked[asked.index("--config") + 1] == "notes"


@pytest.mark.skipif(not HAS_DEVICE_FILE, reason="no accelerator: torch is not asked")
def test_the_bare_command_trains_on_all_gpus(launch: Launcher) -> None:
    outcome = launch("run_train.sh", GPUS="5")
    assert "--nproc_per_node=5" in outcome.arguments(TORCHRUN)
    assert "OMP_NUM_THREADS" not in outcome.calls[-1]["environment"]


def test_every_process_gets_the_settings_that_runs_need(launch: Launcher) -> None:
    for call in launch("run_train.sh", PYTHONPATH="/mine").calls:
        assert call["cwd"] == str(launch.folder)
        environment = call["environment"]
        assert environment["PYTHONPATH"] == f"{launch.folder}:/mine"
        assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
        assert environment["LOG_RANK"] == "0"


def test_settings_of_the_user_are_kept(launch: Launcher) -> None:
    mine = {"OMP_NUM_THREADS": "3", "PYTORCH_ALLOC_CONF": "backend:native", "LOG_RANK": "0,1"}
    outcome = launch("run_train.sh", NGPU="4", TORCHRUN_ARGS="--max-restarts 3  --nnodes 1", **mine)
    assert mine.items() <= outcome.calls[-1]["environment"].items()
    arguments = outcome.arguments(TORCHRUN)
    assert "--nproc_per_node=4" in arguments
    assert arguments[arguments.index("--local-ranks-filter") + 1] == "0,1"
    module = arguments.index("-m")
    assert arguments[module - 4 : module] == ["--max-restarts", "3", "--nnodes", "1"]


def test_every_process_knows_on_how_many_machines_the_run_is(launch: Launcher) -> None:
    outcome = launch("run_train.sh", NGPU="4", NNODES="2")
    assert [call["environment"]["NNODES"] for call in outcome.calls] == ["2", "2"]
    arguments = outcome.arguments(TORCHRUN)
    assert arguments[:2] == ["--nnodes=2", "--nproc_per_node=4"]


def test_arguments_reach_the_trainer_untouched(launch: Launcher) -> None:
    odd = ["--a", "two  words", "--b='quoted'", '--c="x"', "", "*", "$HOME", "--d=\\n", "new\nline"]
    outcome = launch("run_train.sh", *odd)
    assert outcome.arguments(TORCHRUN)[-len(odd) :] == odd
    assert outcome.arguments(PREFLIGHT)[-len(odd) :] == odd


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--module", "x"], ["--config", "b", "--module", "x"]),
        (["--module=x", "--config=y"], ["--module=x", "--config=y"]),
        (["--config", "y"], ["--module", "a", "--config", "y"]),
        (["--modules"], ["--module", "a", "--config", "b", "--modules"]),
    ],
)
def test_a_recipe_among_the_arguments_wins_over_the_environment(
    launch: Launcher, arguments: list[str], expected: list[str]
) -> None:
    outcome = launch("run_train.sh", *arguments, MODULE="a", CONFIG="b")
    assert outcome.arguments(PREFLIGHT) == expected
    assert outcome.arguments(TORCHRUN)[-len(expected) :] == expected


@pytest.mark.parametrize(
    "subcommand", [[], ["activation-checkpoint:full"], ["activation-checkpoint:selective", "--y=2"]]
)
def test_a_fake_backend_runs_one_step_in_one_process(
    launch: Launcher, subcommand: list[str]
) -> None:
    mine = ["--x", "a/b:c", "--training.steps", "9"]
    outcome = launch("run_train.sh", *mine, *subcommand, COMM_MODE="fake_backend", NGPU="8")
    # Behind a subcommand only its own flags are understood; of a repeated flag the last one counts.
    expected = ["--module", "llama3", "--config", "llama3_jargon", *mine]
    expected += ["--comm.mode=fake_backend", "--training.steps", "1", *subcommand]
    assert outcome.modules() == [PREFLIGHT, TRAIN]
    assert outcome.arguments(TRAIN) == outcome.arguments(PREFLIGHT) == expected
    environment = outcome.calls[-1]["environment"]
    assert {"LOCAL_RANK": "0", "NGPU": "8"}.items() <= environment.items()


def test_ranks_that_another_launcher_counted_are_none_of_ours(launch: Launcher) -> None:
    for call in launch("run_train.sh", WORLD_SIZE="16").calls[:1]:
        assert call["arguments"][1] == PREFLIGHT
        assert "WORLD_SIZE" not in call["environment"]


def test_refused_settings_end_the_command_before_any_rank_starts(launch: Launcher) -> None:
    outcome = launch("run_train.sh", EXITS=json.dumps({PREFLIGHT: 2}))
    assert outcome.code == 2
    assert outcome.modules() == [PREFLIGHT]


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_said_once_and_starts_nothing(launch: Launcher, flag: str) -> None:
    outcome = launch("run_train.sh", "--checkpoint.enable", flag)
    assert (outcome.code, outcome.modules()) == (0, [PREFLIGHT])


@pytest.mark.parametrize("environment", [{}, {"COMM_MODE": "fake_backend"}])
def test_the_exit_code_is_that_of_the_run(launch: Launcher, environment: dict[str, str]) -> None:
    exits = json.dumps({TORCHRUN: 7, TRAIN: 7})
    assert launch("run_train.sh", EXITS=exits, **environment).code == 7


def test_a_dry_run_prints_both_commands_and_runs_neither(launch: Launcher) -> None:
    outcome = launch("run_train.sh", "--a", "two words", TORCHTITAN_DRY_RUN="1", NGPU="1")
    assert (outcome.code, outcome.calls) == (0, [])
    preflight, run = outcome.output.splitlines()
    for line, module in ((preflight, PREFLIGHT), (run, TRAIN)):
        assert line.rstrip().endswith(
            f"-m {module} --module llama3 --config llama3_jargon --a two\\ words"
        )


def test_a_run_is_told_what_the_user_typed(launch: Launcher) -> None:
    odd = ["two words", "it's", "", "*", "$HOME", "new\nline", "&", "\\"]
    outcome = launch("run_train.sh", *odd, NGPU="4", NNODES="1", TORCHRUN_ARGS="--max-restarts 3")
    typed = shlex.split(outcome.calls[-1]["environment"]["TORCHTITAN_COMMAND"])
    assert typed[:3] == ["NGPU=4", "NNODES=1", "TORCHRUN_ARGS=--max-restarts 3"]
    assert typed[3:] == [str(launch.folder / "run_train.sh"), *odd]


def test_a_link_to_the_script_finds_the_repository(launch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(launch.folder / "run_train.sh")
    assert launch("../linked", NGPU="1").calls[-1]["cwd"] == str(launch.folder)


def test_the_test_command_runs_every_phase_and_passes_arguments_on(launch: Launcher) -> None:
    outcome = launch("run_tests.sh", "-k", "a or b")
    assert outcome.code == 0, outcome.output
    assert outcome.modules() == ["ufmt", "flake8", "pyrefly", "pytest"]
    assert outcome.arguments("pytest") == ["-k", "a or b"]
    assert (launch.folder / "group").read_text() == "dev\n"
    lines = [line for line in outcome.output.splitlines() if line.startswith("== ")]
    names = [line.split()[1] for line in lines]
    assert names == ["format:", "lint:", "types:", "tests:", "all"]


@pytest.mark.parametrize("tool", ["ufmt", "flake8", "pyrefly", "pytest"])
def test_a_failing_phase_stops_no_other_and_fails_the_command(launch: Launcher, tool: str) -> None:
    outcome = launch("run_tests.sh", EXITS=json.dumps({tool: 3}))
    assert outcome.code == 1
    assert outcome.modules() == ["ufmt", "flake8", "pyrefly", "pytest"]
    phase = {"ufmt": "format", "flake8": "lint", "pyrefly": "types", "pytest": "tests"}[tool]
    assert f"== {phase}: FAILED (exit code 3)" in outcome.output
    assert f"== failed: {phase}" in outcome.output


def test_the_check_script_stops_before_the_tests(launch: Launcher) -> None:
    assert launch("scripts/check.sh").modules() == ["ufmt", "flake8", "pyrefly"]
    assert launch("scripts/check.sh", EXITS=json.dumps({"flake8": 1})).code == 1
