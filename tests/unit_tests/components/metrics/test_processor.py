"""What a run says about itself, and that none of it is made up."""

import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from torchtitan.components.metrics import (
    ensure_pp_loss_visible,
    format_duration,
    MetricsProcessor,
    processor as processor_module,
    ResidentMemoryMonitor,
)
from torchtitan.tools.utils import Color, NoColor

from tests.unit_tests.components.metrics.doubles import Clock, dims, Recorder


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(processor_module, "time", clock)
    return clock


def processor(folder: Path, **kwargs: Any) -> tuple[MetricsProcessor, Recorder]:
    settings = kwargs.pop("settings", {})
    built = MetricsProcessor.Config(**settings).build(
        parallel_dims=kwargs.pop("parallel_dims", dims()), dump_folder=str(folder), **kwargs
    )
    recorder = Recorder()
    built.logger.add_logger(recorder)
    return built, recorder


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "step: " in r.getMessage()]


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.mark.parametrize("log_freq", [0, -3])
def test_a_log_frequency_that_is_not_positive_is_an_error(log_freq: int) -> None:
    with pytest.raises(ValueError, match="metrics.log_freq must be greater than 0"):
        MetricsProcessor.Config(log_freq=log_freq)


def test_the_first_step_and_every_nth_are_logged(tmp_path: Path) -> None:
    built, _ = processor(tmp_path, settings={"log_freq": 4})
    assert [step for step in range(1, 13) if built.should_log(step)] == [1, 4, 8, 12]


def test_counts_become_rates_and_start_anew(tmp_path: Path, clock: Clock) -> None:
    built, recorder = processor(tmp_path)
    built.checkpointer = SimpleNamespace(
        blocked_seconds=7.0,  # before the loop began
        checkpoint_age=lambda step: SimpleNamespace(steps=step - 25, seconds=90.0),
    )
    built.start_step = 20
    built.num_flops_per_token = 10**9
    clock.seconds += 50
    built.ntokens_since_last_log += 4000
    built.data_loading_times += [1.0, 2.0]
    built.checkpointer.blocked_seconds += 3.0
    built.validation_seconds_since_last_log += 10.0
    built.log(30, 5.0, 6.0, 0.5, extra_metrics={"lr/AdamW": 0.1})
    ((step, found),) = recorder.logged
    assert step == 30
    for name in ("memory/resident(GiB)", "memory/resident(%)"):
        assert found.pop(name) > 0
    assert found == {
        "loss_metrics/global_avg_loss": 5.0,
        "loss_metrics/global_max_loss": 6.0,
        "grad_norm": 0.5,
        "throughput(tps)": 100.0,  # validation took 10 of the 50 seconds
        "tflops": pytest.approx(0.1),
        "time_metrics/end_to_end(s)": 5.0,
        "time_metrics/data_loading(s)": 1.5,
        "time_metrics/data_loading(%)": 6.0,
        "time_metrics/checkpoint(s)": 3.0,
        "time_metrics/checkpoint(%)": 6.0,
        "time_metrics/validation(s)": 10.0,
        "checkpoint/age(steps)": 5,
        "checkpoint/age(s)": 90.0,
        "lr/AdamW": 0.1,
    }
    clock.seconds += 10
    built.checkpointer.checkpoint_age = lambda step: None  # it saves nothing
    built.log(40, 5.0, 6.0, 0.5)
    again = recorder.logged[1][1]
    assert again["throughput(tps)"] == 0 and again["time_metrics/end_to_end(s)"] == 1.0
    assert again["time_metrics/checkpoint(s)"] == again["time_metrics/data_loading(s)"] == 0
    assert not {"time_metrics/validation(s)", "checkpoint/age(s)"} & set(again)


def test_peaks_of_the_memory_are_those_since_the_last_line(tmp_path: Path) -> None:
    built, _ = processor(tmp_path)
    monitor = MagicMock(wraps=built.device_memory_monitor)
    built.device_memory_monitor = monitor
    built.log_validation(3.0, 5)  # reads only: its line is no line of the training
    built.log(10, 1.0, 1.0, 1.0)
    names = [name for name, _, _ in monitor.mock_calls]
    assert names == ["get_peak_stats", "get_peak_stats", "reset_peak_stats"]


def test_ranks_that_share_a_batch_share_its_tokens(tmp_path: Path, clock: Clock) -> None:
    # Of four ranks, two each hold a half of every layer: both count the tokens of their batch.
    built, recorder = processor(tmp_path, parallel_dims=dims(tp=2, world_size=4))
    built.num_flops_per_token, built.peak_flops = 1000, 1e6
    clock.seconds += 10
    built.ntokens_since_last_log = 4000
    built.log(1, 1.0, 1.0, 1.0)
    ((_, found),) = recorder.logged
    assert found["throughput(tps)"] == 200
    assert found["mfu(%)"] == pytest.approx(20)


def test_model_flops_utilisation_needs_a_known_peak(tmp_path: Path, clock: Clock) -> None:
    built, recorder = processor(tmp_path)
    assert built.peak_flops is None  # no peak is known of a CPU
    built.num_flops_per_token = 1000
    for peak, expected in ((None, None), (1e6, 10.0)):
        built.peak_flops = peak
        clock.seconds += 1
        built.ntokens_since_last_log = 100
        built.log(1, 1.0, 1.0, 1.0)
        found = recorder.logged[-1][1].get("mfu(%)")
        assert found == (expected if expected is None else pytest.approx(expected))


def test_quantized_runs_have_no_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_module, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    assert processor(tmp_path)[0].peak_flops == 312e12
    assert processor(tmp_path, has_quantization=True)[0].peak_flops is None


def test_the_line_says_what_it_can(tmp_path: Path, clock: Clock, caplog) -> None:
    built, _ = processor(tmp_path)
    clock.seconds += 2
    built.ntokens_since_last_log = 5000
    built.log(1, 7.123456, 8.0, 1.25)
    built.total_steps, built.num_flops_per_token, built.peak_flops = 200, 10**10, 1e14
    clock.seconds += 100
    built.ntokens_since_last_log = 100_000
    built.log(41, 5.5, 8.0, 1.25)
    first, second = lines(caplog)
    memory = r"memory: \d+\.\d\dGiB\(\d+\.\d%\)"
    assert re.fullmatch(rf"step: 1  loss: 7.12346  grad_norm: 1.2500  {memory}  tps: 2,500", first)
    assert re.fullmatch(
        rf"step: 41/200  loss: 5.50000  grad_norm: 1.2500  {memory}  tps: 1,000  tflops: 10.00  "
        r"mfu: 10.00%  left: 6m 38s",
        second,
    )


def test_the_time_left_ignores_the_warm_up_and_follows_the_pace(
    tmp_path: Path, clock: Clock, caplog
) -> None:
    built, _ = processor(tmp_path)
    built.total_steps, built.start_step = 100, 50
    clock.seconds += 500  # the first steps of a process compile and allocate
    built.log(60, 1.0, 1.0, 1.0)
    clock.seconds += 10
    built.log(70, 1.0, 1.0, 1.0)
    clock.seconds += 30
    built.log(80, 1.0, 1.0, 1.0)
    clock.seconds += 20
    built.log(100, 1.0, 1.0, 1.0)
    found = [re.findall("left: (.*)", line) for line in lines(caplog)]
    assert found == [[], ["30s"], ["40s"], ["0s"]]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.4, "59s"), (83, "1m 23s"), (3720, "1h 02m"), (187_200, "2d 04h")],
)
def test_a_duration_shows_its_two_largest_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_validation_leaves_the_counts_of_the_training(tmp_path: Path, caplog) -> None:
    built, recorder = processor(tmp_path)
    built.ntokens_since_last_log = 7
    built.log_validation(3.0, 5, {"validation_metrics/throughput(tps)": 1234.0})
    assert built.ntokens_since_last_log == 7
    assert recorder.logged == [
        (5, {"validation_metrics/loss": 3.0, "validation_metrics/throughput(tps)": 1234.0})
    ]
    assert re.fullmatch("validation step: 5  loss: 3.00000  .*  tps: 1,234", lines(caplog)[0])


def test_colour_is_for_terminals_that_want_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(processor(tmp_path)[0].color, NoColor)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert isinstance(processor(tmp_path)[0].color, Color)
    settings = {"disable_color_printing": True}
    assert isinstance(processor(tmp_path, settings=settings)[0].color, NoColor)


def test_only_the_rank_with_the_loss_speaks(tmp_path: Path, caplog) -> None:
    pipeline = dims(pp=2, world_size=4)
    built, recorder = processor(tmp_path, parallel_dims=pipeline)
    built.log(1, 5.0, 6.0, 1.0)
    assert not lines(caplog) and len(recorder.logged) == 1
    v_shaped, _ = processor(tmp_path, parallel_dims=pipeline, pp_schedule="ZBVZeroBubble")
    v_shaped.log(1, 5.0, 6.0, 1.0)
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize(("shown", "warns"), [("0", True), ("0,2", False), ("", False)])
def test_a_hidden_loss_is_warned_of(shown: str, warns: bool, caplog, monkeypatch) -> None:
    monkeypatch.setenv("LOG_RANK", shown)
    ensure_pp_loss_visible(
        parallel_dims=dims(pp=2, world_size=4), pp_schedule="1F1B", color=NoColor()
    )
    assert ("only rank 2 knows the loss" in caplog.text) == warns


def test_memory_on_the_cpu_is_that_of_the_process() -> None:
    monitor = ResidentMemoryMonitor()
    stats = monitor.get_peak_stats()
    assert 0.01 < stats.metrics["memory/resident(GiB)"] < monitor.capacity_bytes / 1024**3
    assert stats.summary.startswith(f"{stats.metrics['memory/resident(GiB)']:.2f}GiB(")


def test_a_process_without_a_standard_output_has_metrics_without_colour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    built, _ = processor(tmp_path)
    assert isinstance(built.color, NoColor)
