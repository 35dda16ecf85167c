"""Room is asked for before anything starts, and what a measurement writes is gone afterwards."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks.harness import limits, machine, usage
from benchmarks.harness.errors import RefusedError
from benchmarks.harness.limits import Limits

MIB = 2**20


def test_what_is_short_is_named_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as refused:
        machine.require_enough("It", memory_bytes=2**60, disk_bytes=2**60, folder=tmp_path)
    assert "GiB of memory, of which" in str(refused.value)
    assert "GiB of disk, of which" in str(refused.value)
    assert "--model" in str(refused.value) and "--work-folder" in str(refused.value)
    machine.require_enough("It", memory_bytes=MIB, disk_bytes=MIB, folder=tmp_path)


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_folder_is_gone_however_the_work_ends(
    tmp_path: Path, error: type[BaseException] | None
) -> None:
    try:
        with machine.work_folder(tmp_path / "work") as folder:
            (folder / "step-2").mkdir()
            (folder / "step-2/shard").write_text("x")
            if error is not None:
                raise error
    except (RuntimeError, KeyboardInterrupt, SystemExit):
        pass
    assert not list(tmp_path.iterdir())


def test_what_a_killed_measurement_left_is_removed_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("dead", "alive"):
        (tmp_path / f"torchtitan-benchmark-{name}").mkdir()
        (tmp_path / f"torchtitan-benchmark-{name}/owner.lock").touch()
    with (tmp_path / "torchtitan-benchmark-alive/owner.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with machine.work_folder(tmp_path):
            pass
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"mine", "torchtitan-benchmark-alive"}


def test_the_machine_is_described_without_a_name_or_a_date(tmp_path: Path) -> None:
    found = machine.describe(tmp_path)
    assert found.num_cores >= 1 and found.torch == torch.__version__
    assert machine.Machine(**found.as_dict()) == found
    words = found.in_words
    assert os.uname().nodename not in words and str(time.localtime().tm_year) not in words
    assert machine.file_system_of(Path("/proc/self")) == "proc"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_work_as_an_exception_does(number: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as end, machine.signals_end_in_order():
        os.kill(os.getpid(), number)
    assert end.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_the_limits_are_measured_on_all_bytes_and_leave_no_file(tmp_path: Path) -> None:
    barriers = []
    measured = Limits([torch.ones(3 * MIB // 4), torch.ones(5)], tmp_path, rank=1)
    assert measured.size_bytes == 3 * MIB + 20
    found = measured.sample(lambda: barriers.append(len(list(tmp_path.iterdir()))))
    assert set(found) <= set(limits.NAMES) and {"copy", "cached", "read"} <= set(found)
    assert all(value > 0 for value in found.values())
    assert len(barriers) == len(found)
    assert not list(tmp_path.iterdir())


GRANDCHILD = (
    "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(flush=True); input()'])"
)


def test_the_use_of_a_process_counts_all_below_it() -> None:
    alone = usage.read()
    child = subprocess.Popen(
        [sys.executable, "-c", GRANDCHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()  # Both are up, with all that they open.
        together = usage.read()
    finally:
        child.communicate()
    assert together.writer_bytes > 2 * MIB
    assert together.descriptors >= alone.descriptors + 6
    assert together.minus(alone).writer_bytes == together.writer_bytes - alone.writer_bytes


def test_a_peak_is_seen_and_freed_memory_is_given_back() -> None:
    usage.give_back_freed_memory()
    before = usage.read()
    with usage.PeakWatch() as watch:
        memory = torch.ones(16 * MIB)
        seen = usage.read()
        del memory
    assert seen.total_bytes - before.total_bytes > 63 * MIB
    assert watch.peak_total_bytes >= before.total_bytes
    assert watch.peak.own_bytes >= before.own_bytes - MIB
    usage.give_back_freed_memory()
    assert usage.read().total_bytes - before.total_bytes < 8 * MIB


def test_the_clocks_tell_time_own_work_and_that_of_all() -> None:
    before = usage.cpu_clocks()
    # The system counts in hundredths of a second, at moments of its own.
    while (found := usage.since(before))[1] < 0.3:
        sum(range(10_000))
    assert found[0] >= 0.2 and found[2] >= 0.2
