"""How torch_checkpointing lives beside training, crashes and other jobs, and that none of it is felt.

what it does if left alone                         what shows that it does not reach a user
-------------------------------------------------  -----------------------------------------------
two jobs on a host share the barrier at one port   test_two_jobs_on_one_host_never_wait_for_each...
a program without a main guard hangs in a save     test_a_program_without_a_main_guard_saves_beside...
each tensor takes a descriptor                     the same, with 256 of them for 1,500 tensors
a function in the state ends the saver for good    the same: the next save goes to the same process
its process gives up after 30 s of starting        test_a_save_does_not_wait_for_its_writer_to_start
it needs room in /dev/shm, and leaves things there test_pinned_mode.py: memory without a name
a dead trainer's writer goes on                    the same: no ending leaves a writer behind
a failure is raised again by every later save      test_checkpointer_failures.py
an arrival of a failed save counts in the next     the same: three failures, each before a good save
other ranks report what rank 0 has not named yet   unit_tests: tc/test_commit.py
a failure of one rank is a timeout for the others  test_checkpointer_failures.py
what a larger run left is committed with the rest  test_what_larger_and_earlier_runs_left_is_no_part...
a step that is there already fails the save        the same
O_DIRECT fails on most disks, nothing is synced    unit_tests: tc/test_storage.py
metadata is gathered with CUDA                     every test here: there is none
only the first synchronous save has metadata       the same
close() waits for ever, and raises an old error    unit_tests: test_torch_checkpointing_ending.py
prewarming twice raises                            unit_tests: test_torch_checkpointing_saving.py
torch warns of each mesh of each save              test_traps_contents.py, and unit_tests: tc/test_events.py
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torchtitan.components.checkpointer.tc import writer_main
from torchtitan.components.checkpointer.tc.defaults import (
    DEFAULT_TORCH_CHECKPOINTING_BARRIER_TCPSTORE_PORT as SHARED_PORT,
)

from tests.ranks import slow_writer
from tests.ranks.pinned_runs import PATIENCE
from tests.ranks.pool import run_on_ranks
from tests.ranks.processes import await_end
from tests.ranks.steering import BEFORE_DATA, Hold, Steering
from tests.ranks.traps import run_with
from tests.unit_tests.components.checkpointer.runs import build_run, names
from tests.unit_tests.components.checkpointer.ways import stager_of, TC

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]


def as_one_of_two_jobs(folder: Path) -> Any:
    """Ranks 0 and 1 are one job, 2 and 3 another, with the same settings but for their folders.

    The first job has a writer that is held in its first save until the second job is through.
    """
    job, rank = divmod(int(os.environ["RANK"]), 2)
    store = dist.FileStore(str(folder / f"store-{job}"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    # A name of this host that only the second job uses, as if its first rank were elsewhere.
    os.environ["MASTER_ADDR"] = f"127.0.0.{job + 1}"
    steering = Steering(TC)
    run = build_run(folder / f"job-{job}", keep_latest_k=0, **steering.settings)
    hold = Hold(folder, "job-0")
    if (job, rank) == (0, 1):
        steering.set(BEFORE_DATA, hold.stop_here)
    run.train(1)
    if job == 1:
        run.train(3)
        run.manager.maybe_wait_for_saving()
        dist.barrier()
        if rank == 0:
            hold.await_reached()
            (folder / "of job 0").write_text(json.dumps(names(folder / "job-0")))
            hold.let_go()
    run.manager.maybe_wait_for_saving()
    steering.stop()
    stager = stager_of(run.manager)
    assert stager is not None and stager.meeting is not None
    meeting = stager.meeting
    run.manager.close()
    other = build_run(folder / f"job-{job}", seed=9, load_only=True, **TC.settings)
    assert other.manager.load()
    assert other.snapshot() == run.snapshot()
    dist.barrier()
    return meeting.host, meeting.port, names(folder / f"job-{job}")


def test_two_jobs_on_one_host_never_wait_for_each_other(tmp_path: Path) -> None:
    Hold(tmp_path, "job-0").make()
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # somebody else has it, which is as good
            # The port that the configuration names: the first of two jobs would have it.
            taken.bind(("", SHARED_PORT))
            taken.listen()
        ends = run_on_ranks(4, as_one_of_two_jobs, tmp_path, init=False, **PATIENCE)
    # While it was held, the other job has saved three times, and nothing of it counted here.
    assert json.loads((tmp_path / "of job 0").read_text()) == ["tmp_step-1"]
    assert [found for _, _, found in ends] == [["step-1"]] * 2 + [
        ["step-1", "step-2", "step-3"]
    ] * 2
    assert [host for host, _, _ in ends] == ["127.0.0.1"] * 2 + ["127.0.0.2"] * 2
    assert len({port for _, port, _ in ends} | {SHARED_PORT}) == 3


def save_before_the_writer_is_up(folder: Path) -> Any:
    gate = folder / "gate"
    with (
        patch.object(writer_main, "PROGRAM", slow_writer.PROGRAM),
        patch.dict(os.environ, {slow_writer.GATE: str(gate)}),
    ):
        run = build_run(folder, keep_latest_k=0, **TC.settings)
        run.train(1)
    saved = run.snapshot()
    future = run.manager.save_future
    run.train(3, save=False)
    is_pending = not future.done()
    gate.open("w").close()  # once the process is there
    run.manager.close()
    other = build_run(folder, seed=9, load_only=True, **TC.settings)
    assert other.manager.load()
    return is_pending, other.snapshot() == saved


def test_a_save_does_not_wait_for_its_writer_to_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    [end] = run_on_ranks(1, save_before_the_writer_is_up, tmp_path, **PATIENCE)
    assert end == (True, True)


def test_a_program_without_a_main_guard_saves_beside_training(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.ranks.script_without_guard", str(tmp_path)]
    end = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert end.returncode == 0, end.stderr
    found = json.loads(end.stdout.splitlines()[-1])
    await_end([found.pop("writer")])
    assert (tmp_path / "runs of the program").read_text() == "one\n"
    assert "the state extra cannot be saved" in found.pop("message")
    assert found == {
        "saves in the background": [True, True],
        "step": 4,
        "same": True,
        "many": [1499, -1499],
        "own": 3,
    }
    # What only this program knows cannot go to another process; it is said, and saved by this one.
    assert "of the program that was started" in end.stderr
    assert "From now on training waits for each save" in end.stderr
    assert names(tmp_path) == ["step-1", "step-3", "step-4"]


def save_steps(folder: Path, first: int, last: int) -> Any:
    run = run_with(folder)
    run.train(first - 1, save=False)
    run.train(first, last_step=first)  # the saves after it are made by this thread too
    run.train(last)
    run.manager.close()
    other = run_with(folder, seed=9)
    assert other.manager.load(last)
    return other.snapshot() == run.snapshot()


def test_what_larger_and_earlier_runs_left_is_no_part_of_a_save(tmp_path: Path) -> None:
    run_on_ranks(4, save_steps, tmp_path, 3, 3)
    for name in ("tmp_step-1", "step-2"):
        left = tmp_path / "checkpoint" / name
        left.mkdir()
        for file in ("model_0.pt", "model_3.pt", "dataloader_1.pt", "gone_0.pt"):
            (left / file).write_bytes(b"of a run that was killed")
    assert run_on_ranks(2, save_steps, tmp_path, 1, 3) == [True, True]
    assert names(tmp_path) == ["step-1", "step-2", "step-3", "superseded"]
    shared = {"dataloader_0.pt", "lr_scheduler_0.pt", "train_state_0.pt"}
    shared |= {"metadata.pkl", "manifest.json"}
    own = {f"{item}_{rank}.pt" for item in ("model", "optimizer") for rank in (0, 1)}
    for step in (1, 2, 3):
        files = (tmp_path / f"checkpoint/step-{step}").iterdir()
        assert {file.name for file in files} == shared | own
    [kept] = (tmp_path / "checkpoint/superseded").iterdir()
    assert (kept / "model_3.pt").exists()
