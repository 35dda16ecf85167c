"""run_train.sh with the real trainer behind it, as short as it goes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit_tests.structure.sources import ROOT


def train(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "run_train.sh", f"--dump_folder={folder}", *arguments],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )


@pytest.mark.slow
def test_one_of_two_ranks_can_be_tried_in_one_process(tmp_path: Path) -> None:
    run = train(tmp_path, COMM_MODE="fake_backend", NGPU="2", RANK="1")
    assert run.returncode == 0, run.stdout
    assert "dp_shard 2" in run.stdout


def test_settings_that_cannot_be_used_end_with_code_two_and_no_rank(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    degree = "--parallelism.tensor_parallel_degree=2"
    run = train(folder, "--training.num_tokens_per_train_step=1", degree, NGPU="2")
    assert run.returncode == 2, run.stdout
    assert "num_tokens_per_train_step" in run.stdout
    assert "tensor_parallel_degree" in run.stdout
    assert "[rank0]" not in run.stdout
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.torchrun
def test_a_rank_that_fails_gives_the_command_its_exit_code(tmp_path: Path) -> None:
    """An import that works in the preflight and not where torchrun starts the ranks."""
    (tmp_path / "fails_in_ranks.py").write_text(
        "import os\n"
        "from torchtitan.models.llama3.config_registry import llama3_jargon as recipe\n"
        "assert 'TORCHELASTIC_RUN_ID' not in os.environ, 'planted failure'\n"
    )
    module = ["--module", "fails_in_ranks", "--config", "recipe"]
    run = train(tmp_path, *module, NGPU="1", PYTHONPATH=str(tmp_path))
    assert run.returncode not in (0, 2), run.stdout
    assert "planted failure" in run.stdout
