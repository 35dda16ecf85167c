import pytest
import torch.distributed as dist
from torchtitan.components.checkpointer.errors import error_of_system
from torchtitan.distributed.failure import is_echo, PeerFailureWatch


def _caused_by(cause: Exception) -> Exception:
    error = ValueError("cannot save")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[gloo/pair.cc:547] Connection closed by peer [::1]:1"), True),
        (RuntimeError("Timed out waiting 1000ms for recv operation to complete"), True),
        (dist.DistNetworkError("Failed to recv, got 0 bytes"), True),
        (RuntimeError("possibly due to a network error or a remote process exiting"), True),
        (_caused_by(RuntimeError("Connection reset by peer")), True),
        (RuntimeError("loss is not finite"), False),
        (BrokenPipeError(32, "Broken pipe"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_only_errors_of_the_connection_may_be_echoes(error: Exception, expected: bool) -> None:
    assert is_echo(error) is expected


@pytest.mark.timeout(30)
def test_errors_that_are_each_other_s_cause_are_looked_at_once() -> None:
    error = RuntimeError("loss is not finite")
    error.__cause__ = _caused_by(error)
    assert not is_echo(error)
    assert error_of_system(error) is None


def test_a_single_rank_logs_its_failure_and_needs_no_store(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = PeerFailureWatch(dist.HashStore(), 0, 1, grace_seconds=0.0)
    assert watch.first_failure() is None
    failure = watch.publish(ValueError("no"), step=4)
    assert (failure.rank, failure.step, failure.reason) == (0, 4, "ValueError: no")
    assert watch.first_failure() == failure
    assert "rank 0 failed first, at step 4" in caplog.text
    watch.close()


def test_a_single_rank_has_nobody_to_lose(caplog: pytest.LogCaptureFixture) -> None:
    PeerFailureWatch(dist.HashStore(), 0, 1).publish(RuntimeError("Connection refused"))
    assert "rank 0 failed first" in caplog.text and "killed" not in caplog.text
