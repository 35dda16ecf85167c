"""The formats of all back ends: whose a checkpoint is, and what no run may take for a leftover."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.discovery import Kind
from torchtitan.components.checkpointer.errors import CheckpointReadError
from torchtitan.components.checkpointer.formats import (
    CheckpointFiles,
    DCP,
    finder,
    Format,
    FORMATS,
    MARKERS,
    other_finders,
    TORCH_CHECKPOINTING,
)
from torchtitan.config.backends import CHECKPOINT_BACKENDS

from tests.unit_tests.components.checkpointer.fakes import MemoryStorage
from tests.unit_tests.components.checkpointer.mixed_folders import finder_of, OTHER, put

both_back_ends = pytest.mark.parametrize("chosen", FORMATS, ids=lambda chosen: chosen.backend)


def test_every_back_end_that_can_be_typed_has_a_format_of_that_name() -> None:
    assert {each.backend for each in FORMATS} == set(CHECKPOINT_BACKENDS)
    assert CheckpointManager.FORMAT is DCP


def test_a_deletion_begins_with_the_commit_record_and_then_every_marker() -> None:
    assert MARKERS[0] == "manifest.json"
    assert set(MARKERS[1:]) == {".metadata", "metadata.pkl", "model.safetensors.index.json"}
    assert CheckpointFiles.markers == MARKERS


def test_a_format_that_nobody_knows_has_all_others_beside_it() -> None:
    storage = MemoryStorage()
    assert [each.backend for each in other_finders(None, storage, set())] == [
        "dcp",
        "torch_checkpointing",
    ]
    assert [each.backend for each in other_finders(DCP, storage, set())] == ["torch_checkpointing"]


@both_back_ends
def test_a_folder_of_both_is_told_apart_step_by_step(chosen: Format) -> None:
    storage = MemoryStorage("/run")
    put(storage, chosen, "/run", 1, "full")
    put(storage, OTHER[chosen], "/run", 2, "weights")
    put(storage, OTHER[chosen], "/run", 3, "full")
    put(storage, chosen, "/run", 4, "died")
    where = finder_of(chosen, storage)
    own = where.look_into("/run")
    other = OTHER[chosen].backend
    assert (own.backend, own.others) == (chosen.backend, {2: other, 3: other})
    assert own.step_paths == {step: f"/run/step-{step}" for step in (1, 2, 3)}
    kinds = [own.kind_of(path) for path in own.step_paths.values()]
    assert kinds == [Kind.FULL, Kind.MODEL_ONLY, Kind.FULL]
    assert set(own.unfinished.values()) == {4}
    owners = [where.owner_of(path) for path in own.step_paths.values()]
    assert [owner and owner.backend for owner in owners] == [chosen.backend, other, other]
    assert where.owner_of("/run") is None and not where.is_complete_for_any("/run")
    assert where.complete_steps("/run") == own.step_paths


@both_back_ends
def test_what_is_complete_for_both_is_one_s_own(chosen: Format) -> None:
    storage = MemoryStorage("/run")
    for each in FORMATS:
        put(storage, each, "/run", 1, "full")
    storage.add("/run/step-2/model.safetensors.index.json", b"{}")
    own = finder_of(chosen, storage).look_into("/run")
    assert sorted(own.step_paths) == [1, 2] and own.others == {}
    assert own.kind_of(own.step_paths[2]) is Kind.MODEL_ONLY


@both_back_ends
@pytest.mark.parametrize("marker", MARKERS)
def test_a_staging_name_is_nobody_s_checkpoint_whatever_it_holds(
    chosen: Format, marker: str
) -> None:
    storage = MemoryStorage("/run")
    storage.add(f"/run/tmp_step-7/{marker}", b"bytes")
    own = finder_of(chosen, storage).look_into("/run")
    assert own.step_paths == {}
    is_staging = chosen is TORCH_CHECKPOINTING
    assert (own.unfinished, own.foreign) == (
        ({"tmp_step-7": 7}, ()) if is_staging else ({}, ("tmp_step-7",))
    )


def test_each_format_reads_its_own_index_and_no_other(tmp_path: Path) -> None:
    path = str(tmp_path / "step-1")
    dcp.save({"weight": torch.ones(1)}, checkpoint_id=path, no_dist=True)
    DCP.read_index(path)
    with pytest.raises(CheckpointReadError, match="There is no index .*/metadata.pkl"):
        TORCH_CHECKPOINTING.read_index(path)
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps({"metadata": {}}))
    TORCH_CHECKPOINTING.read_index(str(tmp_path))
    with pytest.raises(CheckpointReadError, match="There is no index .*/.metadata"):
        DCP.read_index(str(tmp_path))


def test_each_format_is_found_on_a_disk_with_its_kind(tmp_path: Path) -> None:
    for step, state in {1: {"optimizer": {"step": 1}}, 2: {}}.items():
        path = str(tmp_path / f"step-{step}")
        dcp.save({"weight": torch.ones(1), **state}, checkpoint_id=path, no_dist=True)
    for step, names in {3: ("model_0.pt", "optimizer_0.pt"), 4: ("model_0.pt",)}.items():
        (tmp_path / f"step-{step}").mkdir()
        for name in (*names, "metadata.pkl"):
            (tmp_path / f"step-{step}" / name).write_bytes(b"bytes")
    full, weights = Kind.FULL, Kind.MODEL_ONLY
    for chosen in FORMATS:
        own = finder(chosen, CheckpointFiles(), {"optimizer"}).look_into(str(tmp_path))
        kinds = {step: own.kind_of(path) for step, path in sorted(own.step_paths.items())}
        assert kinds == {1: full, 2: weights, 3: full, 4: weights}
        assert set(own.others) == ({3, 4} if chosen is DCP else {1, 2})
