"""What every version of this package wrote is loaded, on as many ranks as before and on others."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torchtitan.components.checkpointer.integrity.verification import Verification

from tests.fixtures.make_checkpoints import build, extract, generators, MODEL_ONLY, WAYS
from tests.ranks.pool import run_on_ranks

VERSIONS = ["no_manifest", "schema_1", "schema_2", "schema_3"]
"""no_manifest: as it was before checkpoints had digests; then by the version of the manifest."""


def load_full(folder: Path) -> tuple[Any, str, bool]:
    """The state, the generators of this rank, and whether the files were checked."""
    run = build(folder, WAYS[folder.name.partition("_")[0]], seed=2, load_only=True)
    with patch.object(Verification, "_count", autospec=True) as counted:
        assert run.manager.load()
    run.manager.close()
    return run.values(), generators(), counted.called


def load_model_only(folder: Path, empty: Path) -> Any:
    path = str(folder / "checkpoint" / f"step-{MODEL_ONLY}")
    way = WAYS[folder.name.partition("_")[0]]
    run = build(empty, way, seed=2, load_only=True, initial_load_path=path)
    assert run.manager.load()
    run.manager.close()
    assert run.progress.values["step"] == 0
    return run.values(model_only=True)


def load_all(folders: list[Path], empty: Path) -> list[tuple[Any, str, bool, Any]]:
    """By folder: what ``load_full`` says, and the model."""
    return [(*load_full(folder), load_model_only(folder, empty)) for folder in folders]


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints_of_all_versions_still_load_bit_for_bit(
    tmp_path: Path, world_size: int
) -> None:
    folders = extract(tmp_path)
    kinds = ["dcp_1", "dcp_2", "tc_1", "tc_2"]
    assert [str(it.relative_to(tmp_path)) for it in folders] == [
        f"{version}/{kind}" for version in VERSIONS for kind in kinds
    ]
    ranks = run_on_ranks(world_size, load_all, folders, tmp_path / "empty", timeout_seconds=120)
    for number, folder in enumerate(folders):
        expected = json.loads((folder / "expected.json").read_text())
        for rank, found in enumerate(ranks):
            full, state, is_checked, model = found[number]
            assert is_checked == (folder.parent.name != "no_manifest"), (folder, rank)
            assert full == expected["full"], (folder, rank)
            assert model == expected["model_only"], (folder, rank)
            if len(expected["generators"]) == world_size:
                assert state == expected["generators"][rank], (folder, rank)
