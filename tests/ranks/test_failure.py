import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torchtitan.config import CommConfig
from torchtitan.distributed.failure import PeerFailureWatch
from torchtitan.distributed.utils import init_distributed, job_store
from torchtitan.tools.logging import init_logger
from torchtitan.tools.signals import StopRequested

from tests.ranks.pool import end_of_ranks, RankEnd

pytestmark = pytest.mark.ranks


def _start(
    grace_seconds: float = 20.0, echo_seconds: float = 10.0, poll_seconds: float = 0.1
) -> tuple[int, PeerFailureWatch]:
    init_logger()
    world_size = init_distributed(CommConfig())
    store = job_store()
    assert store is not None
    watch = PeerFailureWatch(
        store,
        dist.get_rank(),
        world_size,
        grace_seconds=grace_seconds,
        poll_seconds=poll_seconds,
        echo_seconds=echo_seconds,
    )
    return dist.get_rank(), watch


def _wait_for_ever() -> None:
    threading.Event().wait()


def _one_raises_while_others_reduce(failing: int) -> None:
    rank, watch = _start()
    try:
        if rank == failing:
            raise ValueError("row 7 is broken")
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        watch.publish(error, step=12)
        raise


def _one_raises_while_the_other_is_stuck() -> None:
    rank, watch = _start(grace_seconds=1.0)
    if rank == 0:
        _wait_for_ever()
    watch.publish(ValueError("row 7 is broken"))
    raise SystemExit(1)


def _one_is_stopped_while_the_other_closes() -> None:
    rank, watch = _start(grace_seconds=0.0)
    if rank == 0:
        watch.publish(StopRequested(signal.SIGTERM), step=4)
    else:
        assert watch.wait(20.0) is not None
        # Longer than the watch would leave it after a failure.
        watch._thread.join(20.0)
        assert not watch._thread.is_alive()
    watch.close()


def _host_of_the_store_is_killed() -> None:
    rank, watch = _start(grace_seconds=1.0)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_for_ever()


def _peer_is_killed() -> None:
    rank, watch = _start(echo_seconds=0.5)
    try:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        watch.publish(error, step=3)
        raise


def _echo_before_the_cause() -> str:
    rank, watch = _start()
    if rank == 1:
        echo = RuntimeError(
            "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]"
        )
        return watch.publish(echo).reason
    # Long enough for rank 1 to have published, if it did not wait.
    assert watch.wait(1.0) is None
    return watch.publish(OSError("no space left")).reason


def _all_fail_at_once() -> tuple[int, str]:
    rank, watch = _start()
    dist.barrier()
    first = watch.publish(ValueError(f"of rank {rank}"))
    return first.rank, first.reason


def _rank_0_leaves_before_rank_2_has_looked() -> tuple[int, str]:
    rank, watch = _start(poll_seconds=2.0 if int(os.environ["RANK"]) == 2 else 0.05)
    dist.barrier()
    if rank == 0:
        assert watch.wait(10.0) is not None  # of rank 1, which failed first
    if rank == 2:
        first = watch.wait(10.0)
        assert first is not None
    else:
        first = watch.publish(ValueError(f"of rank {rank}"))
    return first.rank, first.reason


def _normal_end_one_after_the_other() -> None:
    rank, watch = _start(grace_seconds=0.0)
    if rank == 1:
        assert watch.wait(1.0) is None
    watch.close()
    watch.close()
    dist.destroy_process_group()


def _seconds(ends: list[RankEnd]) -> float:
    return max(end.seconds for end in ends)


@pytest.mark.parametrize("failing", [0, 1])
def test_the_first_error_is_in_every_log_and_all_ranks_end(failing: int) -> None:
    ends = end_of_ranks(2, _one_raises_while_others_reduce, failing, init=False, settle_seconds=30)
    for end in ends:
        assert end.how == "raised"
        assert f"rank {failing} failed first, at step 12: Traceback" in end.log
        assert "_one_raises_while_others_reduce" in end.log
        assert "ValueError: row 7 is broken" in end.log
        assert end.log.count("failed first") == 1
    assert _seconds(ends) < 40


def test_a_rank_that_is_stuck_logs_the_error_and_is_ended_after_the_grace() -> None:
    ends = end_of_ranks(2, _one_raises_while_the_other_is_stuck, init=False, settle_seconds=30)
    assert ends[0].exit_code == 1
    assert "rank 1 failed first" in ends[0].log
    assert "did not end within 1 s" in ends[0].log
    assert "_wait_for_ever" in ends[0].detail + ends[0].log
    assert _seconds(ends) < 30


def test_a_rank_that_is_asked_to_stop_is_no_failure_and_sets_the_others_no_limit() -> None:
    ends = end_of_ranks(2, _one_is_stopped_while_the_other_closes, init=False)
    for end in ends:
        assert end.how == "returned", end
        assert "rank 0 was stopped, at step 4: SIGTERM" in end.log
        assert "failed" not in end.log and "Traceback" not in end.log


def test_the_loss_of_the_store_ends_the_ranks_that_are_left() -> None:
    ends = end_of_ranks(2, _host_of_the_store_is_killed, init=False, settle_seconds=30)
    assert ends[0].exit_code == -signal.SIGKILL
    assert ends[1].exit_code == 1
    assert "the store of the job does not answer any more" in ends[1].log
    assert _seconds(ends) < 30


def test_after_a_killed_rank_the_others_say_that_they_lost_it() -> None:
    ends = end_of_ranks(3, _peer_is_killed, init=False, settle_seconds=30)
    for end in (ends[0], ends[2]):
        assert end.how == "raised"
        assert (
            "lost its connection to another rank, at step 3, which was probably killed" in end.log
        )
        assert "failed first" not in end.log
        assert "dist.all_reduce" in end.log
    assert _seconds(ends) < 40


def test_an_error_that_is_only_an_echo_waits_for_the_cause() -> None:
    ends = end_of_ranks(2, _echo_before_the_cause, init=False)
    assert [end.value for end in ends] == ["OSError: no space left"] * 2
    assert "rank 0 failed first: " in ends[1].log and "closed by peer" not in ends[1].log


def test_ranks_that_fail_at_once_agree_on_one_failure() -> None:
    ends = end_of_ranks(3, _all_fail_at_once, init=False)
    answers = {end.value for end in ends}
    assert len(answers) == 1
    rank, reason = answers.pop()
    assert reason == f"ValueError: of rank {rank}"


def test_the_rank_that_hosts_the_store_stays_until_the_slowest_has_read_who_was_first() -> None:
    ends = end_of_ranks(3, _rank_0_leaves_before_rank_2_has_looked, init=False, settle_seconds=30)
    assert [end.value for end in ends] == [(1, "ValueError: of rank 1")] * 3


def test_a_normal_end_is_no_failure_whoever_leaves_first() -> None:
    ends = end_of_ranks(2, _normal_end_one_after_the_other, init=False)
    assert [end.how for end in ends] == ["returned"] * 2
    assert all("store" not in end.log and "failed" not in end.log for end in ends)
