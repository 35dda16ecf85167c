"""Snapshots of the allocator's memory: when they are taken, where they lie. On a stand-in for CUDA's."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.tools import profiler as module
from torchtitan.tools.profiler import Profiler

FOLDER = "profiling/memory_snapshot"


class Allocator:
    """Records what is asked of it; its snapshots are numbered."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.num_snapshots = 0

    def _record_memory_history(self, **settings: Any) -> None:
        self.asked.append(settings)

    def _snapshot(self) -> dict[str, int]:
        self.num_snapshots += 1
        return {"number": self.num_snapshots}


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    stand_in = Allocator()
    monkeypatch.setattr(module, "_allocator", stand_in)
    monkeypatch.setattr(module, "_has_allocator", lambda: True)
    return stand_in


def profile(folder: Path, steps: range, *, error: Exception | None = None, **settings: Any) -> None:
    """Run ``steps`` under a profiler that starts before the first of them, then raise ``error``."""
    config = Profiler.Config(enable_memory_snapshot=True, **settings)
    places = {"base_folder": str(folder), "leaf_folder": "leaf"}
    with config.build(global_step=steps.start - 1, **places) as profiler:
        for _ in steps:
            profiler.step()
        if error is not None:
            raise error


def snapshots(folder: Path) -> dict[str, int]:
    """The number of each snapshot by its path."""
    return {
        str(path.relative_to(folder)): pickle.loads(path.read_bytes())["number"]
        for path in sorted(folder.rglob("*.pickle"))
    }


def test_a_snapshot_is_taken_every_so_many_steps_of_the_whole_run(
    tmp_path: Path, allocator: Allocator
) -> None:
    # Resumed after step 3.
    profile(tmp_path, range(4, 11), memory_snapshot_freq=5, memory_snapshot_max_entries=77)
    assert snapshots(tmp_path) == {
        f"{FOLDER}/step_000000000005/leaf/000000_step_5.pickle": 1,
        f"{FOLDER}/step_000000000010/leaf/000000_step_10.pickle": 2,
    }
    # Recorded from the beginning, and no longer than the profiler lives.
    assert allocator.asked == [{"max_entries": 77}, {"enabled": None}]


def test_without_a_frequency_of_their_own_they_follow_that_of_traces(
    tmp_path: Path, allocator: Allocator
) -> None:
    profile(tmp_path, range(1, 9), profile_freq=4, save_memory_snapshot_folder="mine")
    assert [path.split("/")[:2] for path in snapshots(tmp_path)] == [
        ["mine", "step_000000000004"],
        ["mine", "step_000000000008"],
    ]


def test_memory_that_runs_out_leaves_a_snapshot_of_its_own(
    tmp_path: Path, allocator: Allocator
) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="mine"):
        profile(tmp_path, range(1, 4), error=torch.OutOfMemoryError("mine"))
    path = f"{FOLDER}/step_000000000003_exit/leaf/000000_step_3.pickle"
    assert snapshots(tmp_path) == {path: 1}
    assert allocator.asked[-1] == {"enabled": None}


def test_another_error_ends_the_recording_without_a_snapshot(
    tmp_path: Path, allocator: Allocator
) -> None:
    with pytest.raises(RuntimeError, match="mine"):
        profile(tmp_path, range(1, 4), error=RuntimeError("mine"))
    assert snapshots(tmp_path) == {} and allocator.asked[-1] == {"enabled": None}


def test_a_snapshot_that_cannot_be_written_is_one_warning(
    tmp_path: Path, allocator: Allocator, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / FOLDER
    in_the_way.parent.mkdir()
    in_the_way.write_text("a file where the folder should be")
    profile(tmp_path, range(1, 9), memory_snapshot_freq=2)
    found = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(found) == 1 and "Could not write the memory snapshot" in found[0]
    assert allocator.asked[-1] == {"enabled": None}
