"""On a network file system a rank may see later what rank 0 has chosen: it waits, or all fail alike.

The ranks of a test are on one machine, so the one that is behind gets a storage that is, and says that it is
the first rank of a machine.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchtitan.components.checkpointer.errors import CheckpointReadError

from tests.ranks.pool import run_on_ranks
from tests.unit_tests.components.checkpointer.runs import build_run
from tests.unit_tests.components.checkpointer.ways import DISABLED, over, TC_WAITING, Way

pytestmark = pytest.mark.ranks

LATE, NEVER = 3, 1 << 30


class Behind:
    """A storage that shows step 2 as it is from the given look on."""

    def __init__(self, storage: Any, until: int, what: str) -> None:
        self._real, self._until, self._what, self.looks = storage, until, what, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _is_behind(self, path: str) -> bool:
        self.looks += path.endswith("step-2")
        return path.endswith("step-2") and self.looks <= self._until

    def file_sizes(self, path: str, names: Iterable[str]) -> dict[str, int]:
        found = self._real.file_sizes(path, names)
        if not self._is_behind(path):
            return found
        if self._what == "error":
            raise OSError(116, "Stale file handle")
        return {} if self._what == "missing" else {name: size // 2 for name, size in found.items()}


def load_behind(folder: Path, way: Way, until: int, what: str) -> tuple[int, str, int]:
    """The step that was loaded, the error, and how often the rank that is behind has looked."""
    run = build_run(folder, timeout_seconds=600 if until < NEVER else 2, **way.settings)
    storage = None
    if dist.get_rank() == 1:
        os.environ["LOCAL_RANK"] = "0"
        storage = run.manager._storage = Behind(run.manager._storage, until, what)
    error = ""
    try:
        run.manager.load()
    except CheckpointReadError as caught:
        error = f"{type(caught).__name__}: {caught}"
    # Neither rank goes on alone.
    dist.all_reduce(torch.ones(1))
    run.manager.close()
    return run.step, error, 0 if storage is None else storage.looks


def save_two(folder: Path, way: Way) -> None:
    run = build_run(folder, **way.settings)
    run.train(2)
    run.manager.close()


def load_behind_in_each_way(folder: Path, way: Way) -> dict[str, tuple[int, str, int]]:
    save_two(folder, way)
    return {what: load_behind(folder, way, LATE, what) for what in ("missing", "short", "error")}


def load_what_is_never_seen(folder: Path, way: Way) -> tuple[int, str, int]:
    save_two(folder, way)
    return load_behind(folder, way, NEVER, "missing")


BOTH = over(DISABLED, TC_WAITING)


@BOTH
def test_a_rank_waits_until_it_sees_what_rank_0_sees(tmp_path: Path, way: Way) -> None:
    first, second = run_on_ranks(2, load_behind_in_each_way, tmp_path, way)
    assert set(first.values()) == {(2, "", 0)}
    for what, (step, error, looks) in second.items():
        assert (step, error) == (2, "") and looks > LATE, what


@BOTH
def test_all_ranks_fail_alike_when_one_never_sees_it_and_nothing_older_is_loaded(
    tmp_path: Path, way: Way
) -> None:
    first, second = run_on_ranks(2, load_what_is_never_seen, tmp_path, way)
    assert first[:2] == second[:2] and first[0] == 0
    assert first[1].startswith("CheckpointReadError: After 1 s not all machines see")
    assert (
        f"rank 1 on host {os.uname().nodename} does not see {tmp_path}/checkpoint/step-2"
        in first[1]
    )
    assert "manifest.json is missing" in first[1] and "that all of them share" in first[1]
