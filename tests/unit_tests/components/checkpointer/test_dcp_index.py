import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, HealthCheck, settings, strategies as st
from torchtitan.components.checkpointer.dcp_index import kind_of, read_index, read_outline
from torchtitan.components.checkpointer.discovery import Kind
from torchtitan.components.checkpointer.errors import CheckpointReadError
from torchtitan.components.checkpointer.matching import require_match
from torchtitan.components.checkpointer.storage import FilesystemStorage

OTHERS = {"optimizer", "train_state"}


def write(path: Path, state: dict[str, Any]) -> str:
    dcp.save(state, checkpoint_id=str(path), no_dist=True)
    return str(path)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("intact") / "step-1"
    write(path, {"weight": torch.ones(3), "optimizer": {"step": 1}})
    return (path / ".metadata").read_bytes()


@given(data=st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_damaged_index_is_unreadable_and_never_another_error(
    data: st.DataObject, intact: bytes, tmp_path: Path
) -> None:
    cut = data.draw(st.integers(0, len(intact)))
    damaged = bytearray(intact[:cut])
    for _ in range(data.draw(st.integers(0, 3)) if damaged else 0):
        position = data.draw(st.integers(0, len(damaged) - 1))
        # Memo and size bytes may ask for gigabytes; that is a MemoryError, caught as well.
        damaged[position] ^= data.draw(st.integers(1, 255))
    (tmp_path / ".metadata").write_bytes(bytes(damaged))
    assert kind_of(FilesystemStorage(), str(tmp_path), OTHERS) in set(Kind)


@pytest.mark.parametrize(
    "content", [b"", b"junk", pickle.dumps({"a": 1}), b"cno_such_module\nName\n.", b"0.", b"h\x07."]
)
def test_an_index_that_dcp_did_not_write_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointReadError, match=f"{tmp_path}/.metadata"):
        read_index(str(tmp_path))


def test_kinds_are_told_apart_by_what_lies_beside_the_model(tmp_path: Path) -> None:
    storage = FilesystemStorage()
    full = write(tmp_path / "full", {"weight": torch.ones(1), "optimizer": {"step": 1}})
    bare = write(tmp_path / "bare", {"weight": torch.ones(1)})
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "model.safetensors.index.json").touch()
    kinds = [kind_of(storage, str(path), OTHERS) for path in (full, bare, hf)]
    assert kinds == [Kind.FULL, Kind.MODEL_ONLY, Kind.MODEL_ONLY]
    assert kind_of(storage, bare, set()) is Kind.FULL


@pytest.mark.parametrize("index", [None, b"junk"])
def test_an_index_that_cannot_be_read_is_an_error_of_its_own(
    tmp_path: Path, index: bytes | None
) -> None:
    if index is not None:
        (tmp_path / ".metadata").write_bytes(index)
    with pytest.raises(CheckpointReadError, match="step-N directory"):
        read_outline(str(tmp_path))


def test_what_dcp_flattens_is_what_is_compared(tmp_path: Path) -> None:
    state = {
        "nested": {"deep": {"x": torch.ones(1), "none": None}, 3: "three"},
        "empty": {},
        "pair": (1, 2),
        "list": [1, 2],
        "tensors": [torch.ones(1), torch.ones(2)],
        "flag": True,
    }
    path = write(tmp_path / "step-1", {"train_state": state, "w": torch.ones(1)})
    wanted = {"train_state": state, "w": torch.ones(1)}
    require_match(path, wanted, other_keys=OTHERS, outline=read_outline(path))
