import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torchtitan.components.checkpointer.errors import error_of_system
from torchtitan.distributed.failure import is_echo, PeerFailureWatch
from torchtitan.launch import last_words
from torchtitan.tools.signals import StopRequested


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
    assert "the run failed, at step 4: " in caplog.text
    watch.close()


def test_a_single_rank_has_nobody_to_lose(caplog: pytest.LogCaptureFixture) -> None:
    PeerFailureWatch(dist.HashStore(), 0, 1).publish(RuntimeError("Connection refused"))
    assert "the run failed: " in caplog.text and "killed" not in caplog.text


def test_the_launcher_finds_the_first_error_and_no_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    PeerFailureWatch(dist.HashStore(), 0, 1).publish(StopRequested(signal.SIGTERM), step=4)
    assert not path.exists()
    watch = PeerFailureWatch(dist.HashStore(), 0, 1)
    watch.publish(ValueError("no"), step=4)
    watch.publish(OSError("what closing led to"), step=4)
    # As torchrun itself reads it.
    found = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert last_words(ChildFailedError("train", {0: found})) == (
        "the run failed, at step 4: ValueError: no"
    )
    assert abs(found.timestamp - time.time()) < 60
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("exit_codes", "words"),
    [
        ((-9, -15, 1), "rank 0 was ended by SIGKILL."),  # the launcher has ended rank 1
        ((-11, 0, -9), "rank 0 was ended by SIGSEGV.\nrank 2 was ended by SIGKILL."),
        ((-15, 143, 2), "rank 2 failed with exit code 2; why stands in what it printed."),
    ],
)
def test_of_ranks_that_left_no_word_those_are_named_that_were_killed(
    exit_codes: tuple[int, ...], words: str
) -> None:
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
        for rank, code in enumerate(exit_codes)
        if code
    }
    assert last_words(ChildFailedError("train", failures)) == words


def test_of_ranks_that_left_no_word_and_were_not_killed_the_one_that_failed_first_is_named() -> (
    None
):
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=rank + 1, error_file="")
        for rank in (2, 0, 1)
    }
    for rank, seconds in ((0, 30), (1, 20), (2, 20)):
        failures[rank].timestamp = seconds
    assert last_words(ChildFailedError("train", failures)).startswith(
        "rank 2 failed with exit code 3"
    )


def test_a_disk_that_takes_no_word_for_the_launcher_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    failure = PeerFailureWatch(dist.HashStore(), 0, 1).publish(ValueError("no"))
    assert failure.reason == "ValueError: no"
