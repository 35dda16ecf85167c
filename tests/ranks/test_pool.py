import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks.pool import end_of_ranks, RanksFailed, run_on_ranks

pytestmark = pytest.mark.ranks


def _sum_of_ranks(offset: int, *, factor: int = 1) -> int:
    value = torch.tensor(dist.get_rank() * factor + offset)
    dist.all_reduce(value)
    return int(value)


def _environment() -> tuple[int, bool, str, str]:
    return (
        int(os.environ["RANK"]),
        dist.is_initialized(),
        os.environ["OMP_NUM_THREADS"],
        os.environ["POOL_TEST_VALUE"],
    )


def _raise_on_rank_one() -> None:
    print(f"rank {dist.get_rank()} was here")
    if dist.get_rank() == 1:
        raise ValueError("the reason of rank one")
    dist.all_reduce(torch.ones(1))


def _hang_on_rank_one(pid_folder: str) -> int:
    rank = int(os.environ["RANK"])
    Path(pid_folder, str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        _sleep_for_ever()
    return rank


def _sleep_for_ever() -> None:
    while True:
        time.sleep(10)


def _die() -> None:
    os.kill(os.getpid(), 9)


def _big_tensor() -> torch.Tensor:
    return torch.full((3_000_000,), float(os.environ["RANK"]))


def test_values_come_back_by_rank_with_arguments_passed_on() -> None:
    torch.ones(8, requires_grad=True).sum().backward()  # plain fork would hang after this
    assert run_on_ranks(2, _sum_of_ranks, 5, factor=3) == [13, 13]


def test_each_rank_has_the_launcher_environment_and_the_caller_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POOL_TEST_VALUE", "set later than the server")
    ends = run_on_ranks(2, _environment, init=False)
    assert ends == [(rank, False, "1", "set later than the server") for rank in range(2)]


def test_a_value_larger_than_a_pipe_arrives() -> None:
    values = run_on_ranks(2, _big_tensor, init=False)
    assert [float(value.mean()) for value in values] == [0.0, 1.0]


def test_an_exception_ends_in_one_error_with_every_rank_s_traceback_and_log() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(2, _raise_on_rank_one)
    message = str(caught.value)
    assert "the reason of rank one" in message and "_raise_on_rank_one" in message
    assert "--- rank 0: raised" in message and "all_reduce" in message
    assert "rank 1 was here" in message


def test_a_hang_is_killed_and_shows_where_the_rank_stood(tmp_path: Path) -> None:
    ends = end_of_ranks(2, _hang_on_rank_one, str(tmp_path), init=False, timeout_seconds=2)
    assert [end.how for end in ends] == ["returned", "hung"]
    assert "_sleep_for_ever" in ends[1].detail
    for pid_file in tmp_path.iterdir():
        # Gone entirely: not running, and no zombie either.
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)


def test_a_rank_that_dies_silently_is_named_with_its_signal() -> None:
    ends = end_of_ranks(1, _die, init=False)
    assert (ends[0].how, ends[0].exit_code) == ("died", -9)


def test_a_value_that_cannot_travel_is_reported_by_the_rank() -> None:
    with pytest.raises(RanksFailed, match="pickle"):
        run_on_ranks(1, _returns_a_lock, init=False)


def _returns_a_lock() -> object:
    return threading.Lock()
