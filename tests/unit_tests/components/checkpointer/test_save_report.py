import threading
from concurrent.futures import Future
from unittest.mock import MagicMock, patch

import pytest
from torchtitan.components.checkpointer import save_report
from torchtitan.components.checkpointer.save_report import SaveReport

from tests.unit_tests.components.checkpointer.fakes import folder_of

SCALAR = "train.checkpoint_write.native_dcp.execute.{}_total.latency_ms"


def report(
    *, background: bool = True, is_speaker: bool = True, due_at: float | None = None
) -> SaveReport:
    storage = folder_of("step-7")
    return SaveReport(
        7, "/run/step-7", storage, background=background, is_speaker=is_speaker, due_at=due_at
    )


def finished(error: Exception | None = None) -> "Future[None]":
    future: Future[None] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future


def test_whoever_is_first_reports_and_the_others_are_silent() -> None:
    one, future = report(), finished()
    with patch.object(save_report, "logger") as logger, patch.object(save_report, "sl") as sl:
        threads = [threading.Thread(target=one.completed, args=(future,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    logger.info.assert_called_once()
    (duration,), (others,) = [call.args for call in sl.log_trace_scalar.call_args_list]
    assert list(duration) == [SCALAR.format("async")]
    # The step first: it tells a reader whose values follow.
    assert list(others) == [
        "checkpoint/step",
        "checkpoint/blocked(s)",
        "checkpoint/durable(s)",
        "checkpoint/size(MiB)",
    ]
    assert others["checkpoint/step"] == 7 and min(*duration.values(), *others.values()) >= 0


def test_a_save_that_was_over_at_once_is_not_told_again_when_its_future_ends() -> None:
    one = report()
    with patch.object(save_report, "logger") as logger, patch.object(save_report, "sl"):
        one.completed_now()
        one.completed(finished())
    logger.info.assert_called_once()


def test_a_failure_names_step_path_and_error_and_counts_no_time() -> None:
    with patch.object(save_report, "logger") as logger, patch.object(save_report, "sl") as sl:
        report().completed(finished(OSError("disk full")))
    (text,) = logger.error.call_args.args
    assert "step 7" in text and "/run/step-7" in text and "disk full" in text
    logger.info.assert_not_called()
    sl.log_trace_scalar.assert_called_once_with({"checkpoint/step": 7, "checkpoint/failed": 1})


@pytest.mark.parametrize("is_speaker", [True, False])
def test_every_rank_measures_and_one_speaks(is_speaker: bool) -> None:
    with patch.object(save_report, "logger") as logger, patch.object(save_report, "sl") as sl:
        report(background=False, is_speaker=is_speaker).completed_now()
    first, *others = [call.args[0] for call in sl.log_trace_scalar.call_args_list]
    assert list(first) == [SCALAR.format("sync")]
    assert len(others) == int(is_speaker)
    for scalars in others:
        assert scalars["checkpoint/blocked(s)"] == scalars["checkpoint/durable(s)"]
    assert logger.info.call_count == int(is_speaker)


@pytest.mark.parametrize("is_over", [True, False])
def test_whatever_training_waits_for_is_counted_from_when_the_save_was_due(
    is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MagicMock()
    clock.monotonic.return_value = 1000.0

    def pass_seconds(seconds: float) -> None:
        clock.monotonic.return_value += seconds

    monkeypatch.setattr(save_report, "time", clock)
    one = report(due_at=990.0)  # ten seconds for the save before this one
    pass_seconds(1)
    one.dispatched()
    pass_seconds(2)
    one.handed_over()
    pass_seconds(100)  # forward and backward
    with patch.object(save_report, "logger") as logger, patch.object(save_report, "sl") as sl:
        with one.training_waits():
            pass_seconds(4)
            if not is_over:
                one.completed(finished())
        pass_seconds(8)
        one.completed(finished())
    scalars = sl.log_trace_scalar.call_args.args[0]
    assert scalars["checkpoint/blocked(s)"] == 10 + 1 + 2 + 4
    assert scalars["checkpoint/durable(s)"] == 10 + 1 + 2 + 100 + 4 + 8 * is_over
    (text,) = logger.info.call_args.args
    assert f" in {2 + 100 + 4 + 8 * is_over}.00 s, training waited 17.00 s" in text


def test_a_checkpoint_that_is_gone_already_has_no_size_and_is_no_error() -> None:
    one = report()
    with patch.object(one._storage, "size_bytes", side_effect=FileNotFoundError("gone")):
        with patch.object(save_report, "logger") as logger, patch.object(save_report, "sl") as sl:
            one.completed(finished())
    assert "unknown size" in logger.info.call_args.args[0]
    assert "checkpoint/size(MiB)" not in sl.log_trace_scalar.call_args.args[0]
