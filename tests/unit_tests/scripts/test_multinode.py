"""multinode_trainer.slurm, with stand-ins for the two commands of Slurm, up to the start of the ranks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit_tests.scripts.launch_line import launch_in
from tests.unit_tests.structure.sources import ascii_violations, ROOT

SCRIPT = ROOT / "multinode_trainer.slurm"
LINES = SCRIPT.read_text().splitlines()
# Runs the command as srun would on each machine, and leaves a note of how it was asked to.
SRUN = """#!/bin/sh
echo "$@" >"$SRUN_RECORD"
while case "$1" in --*) true ;; *) false ;; esac do shift; done
exec "$@"
"""


def submit(
    folder: Path, *arguments: str, submit_dir: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the script as Slurm does: a copy in another folder, and variables that say where it is."""
    tools = folder / "tools"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\nprintf 'node-a\\nnode-b\\n'\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    clean = {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "PYTHON": sys.executable,
        "SRUN_RECORD": str(folder / "srun"),
        "TORCHTITAN_DRY_RUN": "1",
        "SLURM_SUBMIT_DIR": str(submit_dir),
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "4123456",
        "SLURM_CPUS_ON_NODE": "96",
    }
    return subprocess.run(
        ["bash", shutil.copy(SCRIPT, folder / "slurm_script"), *arguments],
        cwd=folder,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_each_machine_starts_a_launcher_that_meets_the_others_at_the_first_one(
    tmp_path: Path,
) -> None:
    flags = ["--parallelism.data_parallel_replicate_degree", "2"]
    finished = submit(tmp_path, *flags, NGPU="8", TORCHRUN_ARGS="--max-restarts 3")
    assert finished.returncode == 0, finished.stderr
    launch = launch_in(finished.stdout)
    options = launch.torchrun
    assert (options.nnodes, options.nproc_per_node, options.rdzv_backend) == ("2", "8", "c10d")
    assert (options.rdzv_endpoint, options.rdzv_id) == ("node-a:23456", "4123456")
    assert options.max_restarts == 3
    assert launch.config.parallelism.data_parallel_replicate_degree == 2
    asked = (tmp_path / "srun").read_text()
    assert asked.startswith("--ntasks-per-node=1 --cpus-per-task=96 --kill-on-bad-exit=1 ")


def test_a_job_submitted_from_elsewhere_says_where_it_belongs(tmp_path: Path) -> None:
    finished = submit(tmp_path, submit_dir=tmp_path)
    assert finished.returncode == 2
    assert "submit this file from the root of the repository" in finished.stderr


def test_a_start_without_slurm_says_how_to_submit(tmp_path: Path) -> None:
    finished = submit(tmp_path, SLURM_SUBMIT_DIR="")
    assert finished.returncode == 1
    assert "submit this file with sbatch" in finished.stderr


def test_slurm_reads_all_directives() -> None:
    # It stops at the first line that is neither empty nor a comment.
    first_command = next(i for i, line in enumerate(LINES) if line and not line.startswith("#"))
    directives = [i for i, line in enumerate(LINES) if line.startswith("#SBATCH ")]
    assert len(directives) >= 8 and max(directives) < first_command
    assert {"#SBATCH --ntasks-per-node=1", "#SBATCH --requeue"} <= set(LINES)


def test_the_script_is_executable_plain_text() -> None:
    assert LINES[0] == "#!/usr/bin/env bash" and os.access(SCRIPT, os.X_OK)
    assert not ascii_violations(SCRIPT.name, SCRIPT.read_text())


@pytest.mark.parametrize("output", ["", "python -m torchtitan.preflight\n"])
def test_a_dry_run_that_starts_nothing_is_noticed(output: str) -> None:
    with pytest.raises(AssertionError, match="no line that starts ranks"):
        launch_in(output)


def test_a_flag_that_torchrun_does_not_know_is_noticed() -> None:
    line = "python -m torchtitan.launch --no-such-option=1 -m torchtitan.train --module llama3"
    with pytest.raises(SystemExit):
        launch_in(line)
