"""Pickles of a checkpoint: data comes back, everything else is refused and never runs."""

import errno
import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, HealthCheck, settings, strategies as st
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as EarlierProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torchtitan.components.checkpointer.errors import CheckpointDamagedError
from torchtitan.components.checkpointer.screening import (
    load_index,
    load_plain,
    require_plain,
    require_plain_content,
)

INDEX = "/run/step-1/.metadata"


class Harmful:
    """A pickle of it makes a directory when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@dataclass
class Own:
    """A class of the program that trains."""

    number: int


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.fixture
def index(tmp_path: Path) -> bytes:
    """The index of a small checkpoint."""
    state = {
        "weight": torch.ones(2, 3, dtype=torch.bfloat16),
        "some": {"list": [1, torch.zeros(())], "text": "x"},
    }
    dcp.save(state, checkpoint_id=tmp_path / "step-1", no_dist=True)
    return (tmp_path / "step-1" / ".metadata").read_bytes()


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=()))  # halves of surrogate pairs as well
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.float32, torch.Size([2, 3]), 2**1999, -(2**1999)]),
    lambda inner: st.lists(inner)
    | st.tuples(inner, inner)
    | st.dictionaries(st.text() | st.integers(), inner)
    | st.sets(st.integers())
    | st.frozensets(st.text()),
    max_leaves=8,
)


@given(value=PLAIN)
@settings(max_examples=150, deadline=None)
def test_plain_values_are_saved_and_come_back(value: Any) -> None:
    require_plain(value, "part.entry")
    require_plain_content(saved(value), "part.entry")
    assert load_plain(saved(value), "entry") == value


@pytest.mark.parametrize(
    "value",
    [OrderedDict(a=1), bytearray(b"xy"), bytearray(), b"", [torch.ones(2), {"a": torch.zeros(1)}]],
    ids=repr,
)
def test_so_are_values_that_torch_allows_anyway(value: Any) -> None:
    require_plain(value, "part.entry")
    assert repr(load_plain(saved(value), "entry")) == repr(value)


@pytest.mark.parametrize(
    ("value", "asked"),
    [
        (Own(3), f"{__name__}.Own"),
        ([{"a": (Own(3),)}], f"{__name__}.Own"),
        (np.arange(3), "numpy._core.multiarray._reconstruct"),
        (np.float64(0.5), "numpy._core.multiarray.scalar"),
        (timedelta(1), "datetime.timedelta"),
        (Path("/somewhere"), "pathlib.PosixPath"),
        (range(3), "range"),
        (2**5000, "Unsupported operand"),
        (print, "print"),
    ],
    ids=repr,
)
def test_what_no_load_would_take_is_refused_when_it_is_saved(value: Any, asked: str) -> None:
    for check, argument in ((require_plain, value), (require_plain_content, saved(value))):
        with pytest.raises(ValueError) as caught:
            check(argument, "dataloader.inner.cursor")
        text = str(caught.value)
        assert text.startswith("dataloader.inner.cursor cannot be saved, because no load would")
        assert asked in text
        assert "torch.from_numpy or .item()" in text
        assert "weights_only" not in text  # torch's advice to read the file in spite of it
    with pytest.raises(CheckpointDamagedError, match=asked):
        load_plain(saved(value), "entry")


def test_what_cannot_be_written_is_named_as_well() -> None:
    with pytest.raises(ValueError, match="^part.entry cannot be saved: .*lambda"):
        require_plain([lambda: None], "part.entry")


def test_what_was_refused_once_is_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="timedelta, and a checkpoint holds data"):
            require_plain_content(saved(timedelta(1)), "part.entry")


def test_a_program_may_allow_a_class_of_its_own() -> None:
    with torch.serialization.safe_globals([Own]):
        require_plain(Own(4), "part.entry")
        assert load_plain(saved(Own(4)), "entry") == Own(4)


def test_an_entry_that_would_run_something_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    content = saved({"epoch": 3, "other": Harmful(trace)})
    with pytest.raises(CheckpointDamagedError) as caught:
        load_plain(content, "part.entry in /run/step-1/__0_0.distcp")
    assert str(caught.value).startswith(
        "part.entry in /run/step-1/__0_0.distcp cannot be read: it asks for posix.mkdir, and a "
        "checkpoint holds data, not programs. Nothing of it was run."
    )
    assert not trace.exists()
    torch.load(io.BytesIO(content), weights_only=False)
    assert trace.exists()


def full_host() -> RuntimeError:
    """What torch raises for a tensor that does not fit into the memory of the host."""
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**50, dtype=torch.uint8)
    return failed.value


def torn(error: Exception) -> Any:
    class Torn(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            raise error

        def read(self, size: int | None = -1) -> bytes:
            raise error

    return Torn(saved(torch.ones(3)))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "disk"),
        MemoryError(),
        full_host(),
        torch.OutOfMemoryError("device"),
        torch.AcceleratorError("device"),
        CheckpointDamagedError("bytes 0..9: other"),
    ],
    ids=repr,
)
def test_what_the_file_itself_reports_is_handed_on_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        load_plain(torn(error), "entry")
    assert caught.value is error


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_entry_is_never_another_error(data: st.DataObject) -> None:
    content = bytearray(saved({"epoch": 3, "rows": [1, 2], "tensor": torch.arange(4)}))
    damage(content, data)
    try:
        load_plain(bytes(content), "entry")
    except CheckpointDamagedError as error:
        assert str(error).startswith("entry cannot be read: ")


def damage(content: bytearray, data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    for _ in range(data.draw(st.integers(0, 3)) if content else 0):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))


def test_an_index_of_dcp_comes_back_as_it_is(index: bytes) -> None:
    found, plain = load_index(index, INDEX), pickle.loads(index)
    assert found == plain
    assert found.storage_meta is not None and plain.storage_meta is not None
    assert found.storage_meta.checkpoint_id == plain.storage_meta.checkpoint_id
    tensor = found.state_dict_metadata["weight"]
    assert isinstance(tensor, TensorStorageMetadata)
    assert tensor.properties.dtype is torch.bfloat16
    assert tensor.properties.layout is torch.strided
    assert tensor.properties.memory_format is torch.contiguous_format
    assert found.planner_data["some.list.1"] == ("some", "list", 1)
    assert found.storage_data[MetadataIndex("weight", (0, 0))].relative_path == "__0_0.distcp"


def test_an_index_of_an_earlier_torch_is_read(index: bytes) -> None:
    plain: Metadata = pickle.loads(index)
    weight = plain.state_dict_metadata["weight"]
    assert isinstance(weight, TensorStorageMetadata)
    earlier: Any = EarlierProperties(dtype=torch.float16)
    weight.properties = earlier
    plain.storage_meta = None
    found = load_index(pickle.dumps(plain), INDEX).state_dict_metadata["weight"]
    assert isinstance(found, TensorStorageMetadata)
    assert found.properties == TensorProperties(dtype=torch.float16)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_index_that_would_run_something_is_refused_and_runs_nothing(
    index: bytes, tmp_path: Path, protocol: int
) -> None:
    trace = tmp_path / "trace"
    plain = pickle.loads(index)
    plain.version = Harmful(trace)
    content = pickle.dumps(plain, protocol)
    with pytest.raises(CheckpointDamagedError, match="holds data, not programs") as caught:
        load_index(content, INDEX)
    assert str(caught.value).startswith(f"The index {INDEX} cannot be read: it asks for ")
    assert not trace.exists()
    pickle.loads(content)
    assert trace.exists()


@pytest.mark.parametrize(
    ("content", "asked"),
    [
        (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"),
        (b"(S'1'\nios\nsystem\n.", "os.system"),
        # A name with a dot would be looked up inside of a class.
        (b"\x80\x04\x8c\x05torch\x8c\x0cSize.__new__\x93.", r"torch.Size.__new__"),
        (
            b"cbuiltins\ngetattr\n(ctorch\nSize\nS'__class__'\ntR.",
            "builtins.getattr of something else than an encoding",
        ),
        # Attributes for a class: (None, {"__init__": ...}) is given to what is on the stack.
        (
            b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'__init__'\nctorch\nSize\nstb.",
            "changes Metadata",
        ),
        (b"ctorch.distributed.checkpoint.metadata\nMetadata\n}S'a'\nI1\nsb.", "TypeError"),
        (b"ctorch\nSize\n(N}S'a'\nI1\nstb.", "TypeError"),
    ],
    ids=["eval", "inst", "dotted", "getattr", "slots of a class", "dict of a class", "torch.Size"],
)
def test_no_way_around_the_list_is_open(content: bytes, asked: str) -> None:
    before = dict(vars(Metadata))
    with pytest.raises(CheckpointDamagedError, match=asked):
        load_index(content, INDEX)
    assert dict(vars(Metadata)) == before


def _file(path: Any) -> Callable[[Metadata], None]:
    def change(index: Metadata) -> None:
        index.storage_data = {MetadataIndex("weight"): _StorageInfo(path, 0, 10)}

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_file("../step-2/__0_0.distcp"), "file outside of the checkpoint for 'weight'"),
        (_file("/etc/passwd"), "file outside of the checkpoint for 'weight'"),
        (_file(3), "a part is missing or of another type"),
        (lambda it: it.state_dict_metadata.update(weight=3), "'weight' is neither a tensor nor"),
        (lambda it: it.state_dict_metadata.update({3: BytesStorageMetadata()}), "entry 3 is"),
        (lambda it: setattr(it, "state_dict_metadata", [1]), "of another type"),
        (lambda it: setattr(it, "planner_data", {"weight": "w"}), "the place of 'weight' is none"),
        (lambda it: it.__dict__.pop("storage_data"), None),
        (lambda it: it.__dict__.pop("state_dict_metadata"), "a part is missing"),
        (lambda it: setattr(it.state_dict_metadata["weight"], "size", [2, 3]), "'weight' is neit"),
    ],
)
def test_an_index_of_plain_values_in_the_wrong_places_is_refused(
    index: bytes, change: Callable[[Any], None], problem: str | None
) -> None:
    plain = pickle.loads(index)
    change(plain)
    if problem is None:  # a class attribute stands in for it: an index without files
        assert load_index(pickle.dumps(plain), INDEX).storage_data is None
        return
    with pytest.raises(CheckpointDamagedError, match=f"^The index {INDEX} is not one.*{problem}"):
        load_index(pickle.dumps(plain), INDEX)


@pytest.mark.parametrize("content", [b"", b"junk", b"I1\n.", pickle.dumps({"a": 1})], ids=repr)
def test_what_is_no_index_is_named_with_the_file_and_what_to_do(content: bytes) -> None:
    with pytest.raises(CheckpointDamagedError) as caught:
        load_index(content, INDEX)
    assert INDEX in str(caught.value)
    assert "f it is damaged, move" in str(caught.value)


@given(data=st.data())
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_damaged_index_is_never_another_error(index: bytes, data: st.DataObject) -> None:
    content = bytearray(index)
    damage(content, data)
    try:
        assert isinstance(load_index(bytes(content), INDEX), Metadata)
    except CheckpointDamagedError:
        pass
