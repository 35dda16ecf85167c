"""The side that is measured without digests takes none, and the other one does."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from benchmarks.harness.models import Run, SIZES
from benchmarks.saving.cases import DIGEST_CASES
from benchmarks.saving.sides import FIRST_STEP
from torchtitan.components.checkpointer.integrity.digests import Hasher

from tests.ranks.pool import run_on_ranks


def count_digested_bytes(folder: Path, case: str) -> dict[str, int]:
    """What each side hashes in one save; the modes write in this process."""
    run, variants, take = Run(SIZES["tiny"], str(folder)), DIGEST_CASES[case], Hasher.update
    counts: dict[str, int] = {}
    for name in variants.sides:
        side = variants.build(name, run, folder)
        counts[name] = 0

        def update(self: Hasher, buffer: Any, name: str = name) -> None:
            counts[name] += memoryview(buffer).nbytes
            take(self, buffer)

        with mock.patch.object(Hasher, "update", update):
            side.save(FIRST_STEP)
        variants.check(name, side.path_of(FIRST_STEP))
        side.close()
    return counts


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["dcp-disabled", "tc-sync"])
def test_without_digests_nothing_is_hashed(case: str, tmp_path: Path) -> None:
    (counts,) = run_on_ranks(1, count_digested_bytes, tmp_path, case, timeout_seconds=120)
    assert counts["without"] == 0
    assert counts["with"] > SIZES["tiny"].state_bytes
