"""How signals and failures pass between run_train.sh, the launcher and its ranks.

The ranks here only wait, so that a start costs a second or two; test_interruptions.py has real ones.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from tests.integration_tests.launched import Launched
from tests.unit_tests.structure.sources import ROOT

RANK = """
import os, pathlib, sys, threading
from torchtitan.tools.signals import stop_with_launcher, StopRequested, StopSignals

task, folder = sys.argv[1:]
if task == "fail":
    raise SystemExit("planted failure")
if task == "raise on rank 1":
    import torch.distributed as dist
    from torchtitan.config import CommConfig
    from torchtitan.distributed.failure import PeerFailureWatch
    from torchtitan.distributed.utils import init_distributed, job_store

    world_size = init_distributed(CommConfig())
    watch = PeerFailureWatch(job_store(), dist.get_rank(), world_size)
    try:
        if dist.get_rank() == 1:
            raise ValueError("row 7 is broken")
        dist.barrier()
    except Exception as error:
        watch.publish(error, step=12)
        raise
if task == "kill rank 1":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    threading.Event().wait()
if task == "tell":
    for number in range(2000):
        print("line", number, "x" * 80, flush=True)
    (pathlib.Path(folder) / "done").touch()
    sys.exit()
with StopSignals():
    try:
        stop_with_launcher(poll_seconds=0.05)
        print("ready", flush=True)
        threading.Event().wait()
    except StopRequested as stop:
        print("closing after", stop, flush=True)
        while not (pathlib.Path(folder) / "go").exists():
            threading.Event().wait(0.02)
        print("closed", flush=True)
        sys.exit(stop.exit_code)
"""
HINT = "Press Ctrl-C again to end at once; the save in flight is then lost."
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def launch(task: str, folder: Path, *prefix: str, ranks: int = 1) -> Launched:
    script = folder / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torchtitan.launch", f"--nproc_per_node={ranks}", "--tee=3"]
    rendezvous = ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    # Tests under nohup ignore SIGHUP, which what they start would go on with.
    default = ["env", "--default-signal=HUP"]
    whole = [*default, *prefix, *command, *rendezvous, script, task, folder]
    return Launched(whole, cwd=ROOT, env=ENVIRONMENT)


@pytest.mark.torchrun
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ranks_close_in_peace_however_often_sigterm_is_repeated(
    tmp_path: Path, first: signal.Signals
) -> None:
    with launch("close", tmp_path) as run:
        run.until("ready")
        run.signal_group(first)
        run.until(f"closing after {first.name}")
        run.signal(signal.SIGTERM)
        if first != signal.SIGINT:
            # The first one of its kind. What it prints tells that the signal before it was seen.
            run.signal(signal.SIGINT)
            run.until(HINT)
        (tmp_path / "go").touch()
        assert run.finish() == 128 + first, run.output
        run.wait_until_all_are_gone()
    assert "closed" in run.output and HINT in run.output
    assert "Traceback" not in run.output


@pytest.mark.torchrun
def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    with launch("close", tmp_path, "nohup") as run:
        run.until("ready")
        for process in run.processes():
            os.kill(process, signal.SIGHUP)
        run.signal(signal.SIGTERM)
        # The first signal that anyone saw: an earlier one would give the exit code.
        run.until("closing after SIGTERM")
        assert run.finish() == 128 + signal.SIGTERM, run.output
        run.wait_until_all_are_gone()
    assert "SIGHUP" not in run.output


@pytest.mark.torchrun
def test_a_second_ctrl_c_ends_ranks_that_do_not_end_by_themselves(tmp_path: Path) -> None:
    with launch("close", tmp_path) as run:
        run.until("ready")
        run.signal_group(signal.SIGINT)
        run.until("closing after SIGINT")
        threading.Event().wait(2.1)  # Anything earlier counts as the same press.
        run.signal_group(signal.SIGINT)
        assert run.finish() == 130, run.output
        run.wait_until_all_are_gone()
    assert "closed" not in run.output and "Traceback" not in run.output


@pytest.mark.torchrun
def test_ranks_close_when_their_launcher_is_killed(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    with launch("close", tmp_path) as run:
        run.until("ready")
        run.kill(run.pid)
        run.finish()
        run.wait_until_all_are_gone()


@pytest.mark.torchrun
def test_a_rank_that_fails_gives_the_launcher_its_exit_code(tmp_path: Path) -> None:
    with launch("fail", tmp_path) as run:
        assert run.finish() not in (0, 2), run.output
    assert "planted failure" in run.output
    assert run.output.splitlines()[-1] == (
        "rank 0 failed with exit code 1; why stands in what it printed."
    )


@pytest.mark.torchrun
@pytest.mark.parametrize(
    ("task", "last_line"),
    [
        ("raise on rank 1", "rank 1 failed first, at step 12: ValueError: row 7 is broken"),
        ("kill rank 1", "rank 1 was ended by SIGKILL."),
    ],
)
def test_the_last_line_says_which_rank_failed_first_and_why(
    tmp_path: Path, task: str, last_line: str
) -> None:
    with launch(task, tmp_path, ranks=2) as run:
        assert run.finish() == 1, run.output
    assert run.output.splitlines()[-1] == last_line
    # The table of torchrun stands above it, and no traceback of the launcher.
    assert "Root Cause" in run.output and "in launch_agent" not in run.output
    assert "no error file defined" not in run.output


@pytest.mark.torchrun
@pytest.mark.parametrize("ending", ["| head -n 1", ">/dev/full"])
def test_a_run_whose_output_nobody_takes_goes_on_to_its_end(tmp_path: Path, ending: str) -> None:
    # The exit code is that of the launcher, not that of what reads.
    shell = ["bash", "-c", f'set -o pipefail; "$@" {ending}', "bash"]
    with launch("tell", tmp_path, *shell, "env", "-u", "PYTHONUNBUFFERED") as run:
        assert run.finish() == 0, run.output
    assert (tmp_path / "done").exists()
    assert run.output.count("lines of the log are lost") == 1 and "Traceback" not in run.output


@pytest.mark.parametrize("module", ["launch", "train"])
def test_ctrl_c_during_the_imports_leaves_no_traceback(module: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", f"torchtitan.{module}"]
    with Launched(command, cwd=ROOT, env=ENVIRONMENT) as run:
        run.until("torch._C")
        run.signal_group(signal.SIGINT)
        # Shells report the signal as exit code 130.
        assert run.finish() == -signal.SIGINT
    assert "Traceback" not in run.output and "usage" not in run.output


def test_settings_that_cannot_be_used_end_with_code_two_and_no_rank(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = [
        "--training.num_tokens_per_train_step=1",
        "--parallelism.context_parallel_degree=2",
    ]
    command = [ROOT / "run_train.sh", f"--dump_folder={folder}", *settings]
    with Launched(command, cwd=ROOT, env={"PYTHON": sys.executable, "NGPU": "2"}) as run:
        assert run.finish() == 2, run.output
    assert "num_tokens_per_train_step" in run.output
    assert "context_parallel_degree" in run.output
    assert "[rank0]" not in run.output
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_the_settings_are_checked_leaves_no_traceback(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [ROOT / "run_train.sh", f"--dump_folder={tmp_path / 'run'}"]
    environment = {"PYTHON": sys.executable, "PYTHONPROFILEIMPORTTIME": "1"}
    with Launched(command, cwd=ROOT, env=environment) as run:
        run.until("torch._C")
        run.signal_group(number)
        assert run.finish() == 128 + number, run.output
        run.wait_until_all_are_gone()
    assert "Traceback" not in run.output and "[rank0]" not in run.output
    assert not (tmp_path / "run").exists()
