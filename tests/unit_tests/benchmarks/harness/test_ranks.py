"""Ranks return what they computed or tell their story, and nothing of them lives on."""

import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from benchmarks.harness import ranks
from benchmarks.harness.models import all_ranks, Run, SIZES
from benchmarks.harness.rank import Call
from benchmarks.harness.ranks import RanksFailedError

pytestmark = pytest.mark.ranks
Tell = Callable[[str], None]


def look_around(tell: Tell, *, folder: str) -> Any:
    """What a rank is, and what a state in it looks like."""
    tell("started")
    assert all_ranks(True) and not all_ranks(dist.get_rank() == 0)
    run = Run(SIZES["tiny"], folder)
    before, num_bytes = run.sums(), sum(tensor.nbytes for tensor in run.tensors())
    run.clear()
    return dist.get_rank(), os.environ["CUDA_VISIBLE_DEVICES"], before, run.sums(), num_bytes


def end_badly(tell: Tell, *, pids: str) -> None:
    """Rank 1 dies, and leaves a process in a session of its own; rank 0 waits for it."""
    if dist.get_rank() == 1:
        stray = subprocess.Popen([sys.executable, "-c", "input()"], start_new_session=True)
        Path(pids).write_text(f"{os.getpid()} {stray.pid}")
        os._exit(7)
    dist.barrier()


def refuse(tell: Tell) -> None:
    raise ValueError("the reason")


def test_values_come_back_by_rank_and_a_state_is_as_large_as_is_said(tmp_path: Path) -> None:
    told: list[str] = []
    found = ranks.run(
        2,
        Call(target=f"{__name__}:look_around", arguments={"folder": str(tmp_path)}),
        log_folder=tmp_path,
        timeout_seconds=200,
        tell=told.append,
    )
    assert told == ["started"]
    assert [rank for rank, *_ in found] == [0, 1]
    for _, devices, before, cleared, _ in found:
        assert devices == "" and before == found[0][2]
        assert min(before) > 0 and cleared == [0.0, 0.0]
    num_bytes = sum(size for *_, size in found)
    assert abs(num_bytes - SIZES["tiny"].state_bytes) < 1000


def test_a_death_is_told_and_nothing_lives_on(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    call = Call(target=f"{__name__}:end_badly", arguments={"pids": str(pids)})
    with pytest.raises(RanksFailedError, match="rank 1: it ended with exit code 7 without a word"):
        ranks.run(2, call, log_folder=tmp_path, timeout_seconds=200)
    for pid in pids.read_text().split():
        assert not Path(f"/proc/{pid}/cmdline").exists() or is_zombie(pid)


class Told:
    """Stands for a rank of which one message comes."""

    reply: Any = None

    def __init__(self, rank: int, story: str, then: "Told | None" = None) -> None:
        self.rank, self._story, self._then = rank, story, then
        self.pipe, self._theirs = Pipe()

    def speak(self) -> None:
        self._theirs.send(self._story)

    def receive(self, tell: Tell) -> None:
        self.reply = "raised", self.pipe.recv()
        if self._then is not None:
            self._then.speak()

    def story(self, how: str) -> str:
        return f"rank {self.rank}: {how}"


def test_a_death_is_told_also_when_a_peer_has_felt_it_first() -> None:
    dead = Told(1, "it ended without a word")
    peer = Told(0, "RuntimeError: Connection reset by peer", then=dead)
    peer.speak()
    with pytest.raises(RanksFailedError, match="rank 1: it ended without a word"):
        ranks._await_all([peer, dead], 60.0, lambda text: None)  # type: ignore[list-item]: stand-ins


def test_an_error_is_told_with_its_traceback(tmp_path: Path) -> None:
    call = Call(target=f"{__name__}:refuse", joins_group=False)
    with pytest.raises(RanksFailedError, match="(?s)rank 0: .*in refuse.*ValueError: the reason"):
        ranks.run(1, call, log_folder=tmp_path, timeout_seconds=200)


def test_a_rank_that_is_late_is_ended(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="rank 0: not done after 0 s"):
        ranks.run(1, Call(target=f"{__name__}:refuse"), log_folder=tmp_path, timeout_seconds=0.1)


def is_zombie(pid: str) -> bool:
    """Whether it is dead, and only waits for whoever inherited it to take note."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("State:")) == "Z"
