"""Where a run starts from is the same on every rank, and a finished run leaves everything as it is."""

import hashlib
import logging
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torchtitan.components.checkpointer.storage import FilesystemStorage
from torchtitan.tools.logging import logger

from tests.ranks.pool import run_on_ranks
from tests.ranks.tiny_run import make_config, run
from tests.unit_tests.components.checkpointer.runs import build_run, names
from tests.unit_tests.components.checkpointer.ways import DISABLED, over, TC_WAITING, Way

pytestmark = pytest.mark.ranks


class Lines(logging.Handler):
    """The messages of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "root":
            self.said.append(record.getMessage())

    def start(self) -> list[str]:
        return [line for line in self.said if line.startswith("Loading") or "fresh" in line]


@contextmanager
def listening() -> Generator[Lines]:
    lines, level = Lines(), logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """Digest and time of change of everything below the checkpoint folder."""
    entries = sorted((folder / "checkpoint").rglob("*"))
    return {
        str(path.relative_to(folder)): (
            hashlib.sha1(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.stat().st_mtime_ns,
        )
        for path in entries
    }


def start_again(folder: Path, name: str, steps: int, **checkpoint: Any) -> Any:
    """(the step it resumed from, what it said) of one more start of the run ``name``."""
    config = make_config(folder, name, interval=5, **checkpoint)
    config.training.steps = steps
    with listening() as lines:
        trace = run(config)
    return (trace.resumed_from if trace.samples else None), lines.said


def finished_runs(folder: Path, way: Way) -> dict[str, Any]:
    found: dict[str, Any] = {}
    export = {"last_save_model_only": True}
    for name, options in (("full", {}), ("export", export)):
        start_again(folder, name, 7, **options, **way.settings)
        before = contents(folder / name)
        found[name] = start_again(folder, name, 7, **options, **way.settings)
        found[f"{name} is untouched"] = contents(folder / name) == before
    exported = contents(folder / "export")
    found["longer"] = start_again(folder, "export", 9, **export, **way.settings)
    moved = contents(folder / "export")
    found["the export is kept"] = all(
        moved[path.replace("step-7", "superseded/step-7")][0] == digest
        for path, (digest, _) in exported.items()
        if "step-7" in path
    )
    return found


class Behind(FilesystemStorage):
    """A disk on which one entry has not arrived yet."""

    def __init__(self, missing: str) -> None:
        self.missing = missing

    def listdir(self, path: str) -> list[str]:
        return [name for name in super().listdir(path) if name != self.missing]


def start_at(
    way: Way, path: Path, step: int, initial: Path | None, rank_behind: int | None = None
) -> tuple[str, str, int]:
    """What a start from the checkpoint folder ``path`` says, the error it ends with, and its step.

    ``rank_behind`` does not see step 2.
    """
    settings: dict[str, Any] = {} if initial is None else {"initial_load_path": str(initial)}
    begun = build_run(path.parent, **settings, **way.settings)
    if rank_behind == dist.get_rank():
        begun.manager._storage = Behind("step-2")
    error = ""
    with listening() as lines:
        try:
            begun.manager.load(step)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
    begun.manager.close()
    return "|".join(lines.start()), error, begun.step


def start_everywhere(folder: Path, way: Way) -> dict[str, tuple[str, str, int]]:
    full, died, nowhere = (folder / name / "checkpoint" for name in ("full", "died", "none"))
    run_of_two = build_run(full.parent, keep_latest_k=0, **way.settings)
    run_of_two.train(2)
    run_of_two.manager.close()
    if dist.get_rank() == 0:
        for step in (1, 2):
            shutil.copytree(full / f"step-{step}", died / way.unfinished(step))
            for name in (way.format.marker, "manifest.json"):  # which come last
                (died / way.unfinished(step) / name).unlink()
    dist.barrier()
    given = full / "step-1"
    return {
        "fresh": start_at(way, nowhere, -1, None),
        "died": start_at(way, died, -1, None),
        "given": start_at(way, died, -1, given),
        "own": start_at(way, full, -1, nowhere),
        "rank 0 is behind": start_at(way, full, -1, nowhere, rank_behind=0),
        "rank 1 is behind": start_at(way, full, -1, nowhere, rank_behind=1),
        "step 1": start_at(way, full, 1, nowhere),
        "step 7": start_at(way, full, 7, given),
        "bad path": start_at(way, died, -1, nowhere),
        "folder": start_at(way, died, -1, full),
    }


@over(DISABLED, TC_WAITING)
def test_every_rank_says_the_same_one_line_or_ends_with_the_same_error(
    tmp_path: Path, way: Way
) -> None:
    first, second = run_on_ranks(2, start_everywhere, tmp_path, way)
    assert first == second
    full, died, nowhere = (tmp_path / name / "checkpoint" for name in ("full", "died", "none"))
    ignored = (
        f"ignored, as the run has checkpoints of its own: --checkpoint.initial_load_path {nowhere}"
    )
    leftovers = f"{way.unfinished(1)}, {way.unfinished(2)}"
    dead = f" In {died} these do not count: {leftovers} (saves that did not finish)."

    def newest(step: int) -> tuple[str, str]:
        return f"Loading the checkpoint {full}/step-{step} (newest full checkpoint; {ignored}).", ""

    initial = "ValueError: --checkpoint.initial_load_path names"
    fresh = "No checkpoint was provided, this is a fresh start."
    expected = {
        "fresh": (fresh, ""),
        "died": (fresh + dead, ""),
        "given": (
            f"Loading the checkpoint {full}/step-1 (--checkpoint.initial_load_path, weights only)."
            + dead,
            "",
        ),
        "own": newest(2),
        "rank 0 is behind": newest(1),
        "rank 1 is behind": newest(2),
        "step 1": (
            f"Loading the checkpoint {full}/step-1 (--checkpoint.load_step=1; {ignored}).",
            "",
        ),
        "step 7": ("", "CheckpointNotFoundError: --checkpoint.load_step=7 was asked for"),
        "bad path": ("", f"{initial} {nowhere}, which is not a directory"),
        "folder": ("", f"{initial} {full}, which is not a checkpoint but a folder around"),
    }
    assert set(first) == set(expected)
    loaded = {"own": 2, "rank 0 is behind": 1, "rank 1 is behind": 2, "step 1": 1}
    for case, (line, error, step) in first.items():
        assert step == loaded.get(case, 0), case
        assert line == expected[case][0], case
        assert error.startswith(expected[case][1]) and bool(error) == bool(expected[case][1]), error


@over(DISABLED, TC_WAITING)
def test_a_finished_run_touches_nothing_and_a_longer_one_keeps_the_export(
    tmp_path: Path, way: Way
) -> None:
    found, other = run_on_ranks(2, finished_runs, tmp_path, way, init=False)
    for name, text in (
        ("full", "Step 7 is the last one already"),
        ("export", "The weights after step 7 or later are saved already; nothing to do."),
    ):
        resumed_from, said = found[name]
        assert resumed_from is None and any(text in line for line in said), said
        assert found[f"{name} is untouched"]
    resumed_from, said = found["longer"]
    assert resumed_from == 5 == other["longer"][0]
    line = f"{tmp_path}/export/checkpoint/step-5 (newest full checkpoint; passed over: step-7 (weights only))"
    assert any(line in each for each in said), said
    assert any("Moved a checkpoint that this run does not build on" in each for each in said)
    assert found["the export is kept"]
    assert names(tmp_path / "export") == ["step-5", "step-9", "superseded"]
