import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, HealthCheck, settings, strategies as st
from torchtitan.components.checkpointer.dcp_index import kind_of, read_index, require_match
from torchtitan.components.checkpointer.discovery import Kind
from torchtitan.components.checkpointer.errors import CheckpointMismatchError, CheckpointReadError
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


def test_another_model_is_told_with_every_key_in_one_message(tmp_path: Path) -> None:
    saved = {"a": torch.ones(2), "b": torch.ones(3), "gone": torch.ones(1), "n": 4}
    path = write(tmp_path / "step-1", {**saved, "optimizer": {"state.a": torch.ones(2), "k": 1}})
    wanted = {
        "a": torch.ones(2),
        "b": torch.ones(4),
        "new": torch.ones(1),
        "n": torch.ones(1),
        "optimizer": {"state.a": torch.ones(5), "state.new": torch.ones(1)},
    }
    with pytest.raises(CheckpointMismatchError) as caught:
        require_match(path, wanted, other_keys=OTHERS)
    assert isinstance(caught.value, ValueError)
    text = str(caught.value)
    for part in (
        path,
        "2 missing: new, optimizer.state.new",
        "1 unexpected: gone",
        "3 of another shape: b (here [4], there [3]), n (here [1], there no tensor), "
        "optimizer.state.a (here [5], there [2])",
        "--config",
    ):
        assert part in text


def test_surplus_entries_of_other_parts_are_fine(tmp_path: Path) -> None:
    path = write(tmp_path / "step-1", {"a": torch.ones(2), "optimizer": {"k": 1}})
    require_match(path, {"a": torch.zeros(2)}, other_keys=OTHERS)


@pytest.mark.parametrize("index", [None, b"junk"])
def test_an_index_that_cannot_be_read_is_an_error_of_its_own(
    tmp_path: Path, index: bytes | None
) -> None:
    if index is not None:
        (tmp_path / ".metadata").write_bytes(index)
    with pytest.raises(CheckpointReadError, match="step-N directory"):
        require_match(str(tmp_path), {"a": torch.ones(1)}, other_keys=OTHERS)


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
    require_match(path, {"train_state": state, "w": torch.ones(1)}, other_keys=OTHERS)


def into(path: Path, saved: dict[str, torch.dtype], dtype: torch.dtype) -> str:
    write(path, {name: torch.ones(2, dtype=of) for name, of in saved.items()})
    require_match(str(path), {name: torch.ones(2, dtype=dtype) for name in saved}, other_keys=set())
    return str(path)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_load_that_loses_bits_is_one_warning_with_numbers_and_dtypes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    path = into(tmp_path / "step-1", {"a": f32, "b": f32, "c": f16, "d": bf16}, bf16)
    (text,) = warnings_in(caplog)
    assert path in text and "--training.dtype" in text
    # Of the same width, but the exponents of one and the mantissas of the other do not fit.
    assert "1 tensor of float16 into bfloat16, 2 tensors of float32 into bfloat16." in text


def test_a_load_that_widens_or_keeps_dtypes_is_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = {"a": torch.bfloat16, "b": torch.float16, "c": torch.float32}
    into(tmp_path / "step-1", saved, torch.float32)
    assert warnings_in(caplog) == []
