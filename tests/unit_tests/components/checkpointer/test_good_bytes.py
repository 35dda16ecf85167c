"""Bytes that have passed their digest are not damaged: no older checkpoint is taken in their place."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torchtitan.components.checkpointer import dcp_reader
from torchtitan.components.checkpointer.dcp_reader import PlainLoadPlanner, reading_through
from torchtitan.components.checkpointer.errors import CheckpointDamagedError, CheckpointReadError
from torchtitan.components.checkpointer.integrity.checked_file import CheckedFile
from torchtitan.components.checkpointer.integrity.digests import digest_of
from torchtitan.components.checkpointer.integrity.verification import Verification, Verify
from torchtitan.components.checkpointer.screening import load_index, load_plain
from torchtitan.components.checkpointer.tc.checked_storage import CheckedStorage
from torchtitan.components.checkpointer.tc.faults import fault
from torchtitan.components.checkpointer.tc.storage import DurableStorageConfig

from tests.unit_tests.components.checkpointer.runs import build_run
from tests.unit_tests.components.checkpointer.test_dcp_reader import (
    DATA,
    MANIFEST,
    save_alone,
    verification_of,
)
from tests.unit_tests.components.checkpointer.test_screening import Harmful, INDEX, Own, saved

index = pytest.fixture(lambda: pickle.dumps(Metadata({}, None, {})))


def checked(content: bytes) -> Any:
    return CheckedFile(io.BytesIO(content), "entry", digest_of(content))


@pytest.mark.parametrize(
    "content", [saved({"rows": [Own(3)]}), b"no archive"], ids=["class", "junk"]
)
def test_what_this_program_does_not_take_is_not_damaged(content: bytes) -> None:
    for load in (
        lambda: load_plain(content, "entry", is_checked=True),
        lambda: load_plain(checked(content), "entry"),
    ):
        with pytest.raises(CheckpointReadError, match="it is not damaged") as failed:
            load()
        assert type(failed.value) is CheckpointReadError
        assert "add_safe_globals" in str(failed.value)
    with pytest.raises(CheckpointDamagedError):
        load_plain(content, "entry")


@pytest.mark.parametrize(
    "value", [print, range(3), Harmful(Path("/trace")), os.path.join], ids=["1", "2", "3", "4"]
)
def test_what_asks_for_code_is_damage_all_the_same(value: Any) -> None:
    with pytest.raises(CheckpointDamagedError, match="it asks for .* holds data, not programs"):
        load_plain(saved([value]), "entry", is_checked=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"c__builtin__\neval\n(S'1'\ntR.", "__builtin__.eval"),
        (b"(S'1'\nios\nsystem\n.", "os.system"),
        (b"cbuiltins\ngetattr\n(ctorch\nSize\nS'x'\ntR.", "something else than an encoding"),
        (
            b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'__init__'\nI1\nstb.",
            "changes Metadata",
        ),
    ],
)
def test_so_is_an_index_that_does(content: bytes, said: str) -> None:
    with pytest.raises(CheckpointDamagedError, match=said):
        load_index(content, INDEX, is_checked=True)


def _outside(index: Any) -> None:
    info = torch_dcp.filesystem._StorageInfo("../step-2/__0_0.distcp", 0, 10)
    index.storage_data = {MetadataIndex("weight"): info}


def test_so_is_an_index_that_leads_elsewhere(index: bytes) -> None:
    plain = pickle.loads(index)
    _outside(plain)
    with pytest.raises(CheckpointDamagedError, match="file outside of the checkpoint"):
        load_index(pickle.dumps(plain), INDEX, is_checked=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it.state_dict_metadata.update(weight=3),
        lambda it: it.state_dict_metadata.update(weight=Own(3)),
        lambda it: setattr(it, "planner_data", {"weight": "w"}),
    ],
    ids=["value", "class", "way"],
)
def test_an_index_of_another_version_is_not_damaged(
    index: bytes, change: Callable[[Any], None]
) -> None:
    plain = pickle.loads(index)
    change(plain)
    with pytest.raises(CheckpointReadError, match="it is not damaged") as failed:
        load_index(pickle.dumps(plain), INDEX, is_checked=True)
    assert type(failed.value) is CheckpointReadError and INDEX in str(failed.value)


def test_an_index_that_the_memory_does_not_hold_is_not_damaged(index: bytes) -> None:
    with patch("torchtitan.components.checkpointer.screening._IndexUnpickler") as unpickler:
        unpickler.return_value.load.side_effect = MemoryError("full")
        with pytest.raises(MemoryError, match="full"):
            load_index(index, INDEX, is_checked=True)


def error_of_dcp(path: Path, wanted: dict[str, Any]) -> CheckpointReadError:
    reading = reading_through(verification_of(path))
    with pytest.raises(torch_dcp.CheckpointException) as told:
        torch_dcp.load(wanted, checkpoint_id=str(path), no_dist=True, **reading)
    return dcp_reader.read_error(str(path), told.value)


def test_a_class_that_is_no_longer_allowed_stops_a_load_through_dcp(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Own]):
        path = save_alone(tmp_path / "step-1", {"own": Own(4)})
    error = error_of_dcp(path, {"own": Own(0)})
    assert type(error) is CheckpointReadError
    assert f"The entry own of {path}/{DATA}" in str(error) and "Own" in str(error)
    (path / MANIFEST).unlink()
    assert isinstance(error_of_dcp(path, {"own": Own(0)}), CheckpointDamagedError)


@pytest.mark.usefixtures("one_rank")
def test_an_error_of_this_program_makes_no_run_fall_back(tmp_path: Path) -> None:
    run = build_run(tmp_path)
    run.train(1)
    run.train(2)
    run.manager.close()
    other = build_run(tmp_path, seed=3)
    bug = patch.object(PlainLoadPlanner, "resolve_tensor", side_effect=KeyError("a bug"))
    with bug, pytest.raises(CheckpointReadError, match="a bug.*not damaged") as failed:
        other.manager.load()
    assert type(failed.value) is CheckpointReadError
    assert f"checkpoint/step-2/{DATA}" in str(failed.value)
    other.manager.close()


@pytest.mark.parametrize(
    ("verify", "kind"),
    [(Verify.FULL, CheckpointReadError), (Verify.OFF, CheckpointDamagedError)],
)
def test_the_same_holds_for_what_is_read_through_a_checked_storage(
    tmp_path: Path, verify: Verify, kind: type
) -> None:
    path = save_alone(tmp_path / "step-1", {"w": torch.ones(3)})
    known = verification_of(path)
    verification = Verification(str(path), known.manifest, verify)
    storage = CheckedStorage(DurableStorageConfig().create_storage(), verification)
    found = fault(KeyError("layers.0.weight"), f"{path}/{DATA}", storage)
    assert type(found) is kind and f"{path}/{DATA}" in str(found)
    assert isinstance(fault(FileNotFoundError(2, "gone"), "x", storage), CheckpointDamagedError)
