"""Traces of the chosen steps, at the promised places."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.tools.profiler import Profiler

from tests.unit_tests.small_disk import fill, small_disk


def profile(folder: Path, steps: range, **settings: Any) -> None:
    """Run ``steps`` under a profiler that starts before the first of them."""
    config = Profiler.Config(enable_profiling=True, **settings)
    with config.build(global_step=steps.start - 1, base_folder=str(folder)) as profiler:
        for _ in steps:
            torch.ones(4, 4) @ torch.ones(4, 4)
            profiler.step()


def traces(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.json.gz"))


def test_each_cycle_ends_in_a_trace_that_chrome_can_read(tmp_path: Path) -> None:
    seen: list[str] = []
    profile(
        tmp_path, range(1, 9), profile_freq=4, profiler_warmup=1, trace_post_processor=seen.append
    )
    folder = "profiling/traces"
    assert traces(tmp_path) == [f"{folder}/iteration_{n}/rank0_trace.json.gz" for n in (4, 8)]
    assert seen == [str(tmp_path / path) for path in traces(tmp_path)]
    with gzip.open(seen[0]) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    # One traced step, with one product in it.
    assert names.count("aten::matmul") == 1


def test_a_resumed_run_traces_the_steps_of_the_whole_run(tmp_path: Path) -> None:
    profile(tmp_path, range(6, 10), profile_freq=4, profiler_warmup=1)
    assert [path.split("/")[2] for path in traces(tmp_path)] == ["iteration_8"]


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_cycles_can_be_limited_and_put_off(tmp_path: Path) -> None:
    profile(
        tmp_path,
        range(1, 10),
        profile_freq=3,
        profiler_warmup=0,
        profiler_repeat=1,
        profiler_skip_first=2,
    )
    assert [path.split("/")[2] for path in traces(tmp_path)] == ["iteration_5"]


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_other_places_can_be_named_for_each_use(tmp_path: Path) -> None:
    config = Profiler.Config(enable_profiling=True, profile_freq=1, profiler_warmup=0)
    profiler = config.build()
    with profiler.active(global_step=9, base_folder=str(tmp_path), leaf_folder="leaf") as active:
        assert active is profiler and profiler.torch_profiler is not None
        profiler.step()
    assert traces(tmp_path) == ["profiling/traces/iteration_10/leaf/rank0_trace.json.gz"]
    assert profiler.torch_profiler is None


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_full_disk_costs_the_traces_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", 256) as disk:
        ballast = fill(disk)
        config = Profiler.Config(enable_profiling=True, profile_freq=2, profiler_warmup=1)
        with config.build(base_folder=str(disk)) as profiler:
            for step in range(1, 9):
                if step == 7:
                    ballast.unlink()
                profiler.step()
        assert [path.split("/")[2] for path in traces(disk)] == ["iteration_8"]
    (warning,) = warnings_in(caplog)
    assert "Could not write the trace" in warning and "No space left" in warning


def test_a_post_processor_that_fails_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def upload(path: str) -> None:
        raise ConnectionError(f"no network for {path}")

    settings = {"profile_freq": 2, "profiler_warmup": 1, "trace_post_processor": upload}
    profile(tmp_path, range(1, 9), **settings)
    assert len(traces(tmp_path)) == 4
    (warning,) = warnings_in(caplog)
    assert "upload" in warning and "no network for" in warning


def test_nothing_is_recorded_unasked(tmp_path: Path) -> None:
    with Profiler.Config().build(base_folder=str(tmp_path)) as profiler:
        assert profiler.torch_profiler is None and profiler.memory_profiler is None
        profiler.step()
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_an_error_passes_and_ends_the_recording(tmp_path: Path) -> None:
    config = Profiler.Config(enable_profiling=True, profile_freq=1, profiler_warmup=0)
    with pytest.raises(RuntimeError, match="mine"):
        with config.build(base_folder=str(tmp_path)):
            assert torch.autograd._profiler_enabled()
            raise RuntimeError("mine")
    assert not torch.autograd._profiler_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory snapshots work here")
def test_memory_snapshots_without_cuda_are_one_warning(tmp_path: Path, caplog) -> None:
    config = Profiler.Config(enable_memory_snapshot=True)
    with config.build(base_folder=str(tmp_path)) as profiler:
        for _ in range(20):
            profiler.step()
    assert len([r for r in caplog.records if "no CUDA device" in r.getMessage()]) == 1
    assert not list(tmp_path.iterdir())


def test_a_cycle_shorter_than_its_parts_is_an_error() -> None:
    with pytest.raises(ValueError, match="profile_freq is 3.*Set it to 4 or more"):
        Profiler.Config(enable_profiling=True, profile_freq=3)
    Profiler.Config(profile_freq=3)
    Profiler.Config(enable_profiling=True, profile_freq=4)


@pytest.mark.parametrize(
    "settings", [{"profile_freq": 0}, {"profiler_active": 0}, {"memory_snapshot_freq": 0}]
)
def test_an_impossible_setting_is_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"profiler.{next(iter(settings))} is 0"):
        Profiler.Config(**settings)
