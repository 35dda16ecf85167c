"""What is in a file is told without torch.load as torch.load would tell it, or not at all."""

import io
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.components.checkpointer.contents import (
    _known,
    contents_of,
    named_tensors,
    StoredTensor,
    value_of,
)


def saved(tree: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(tree, stream)
    return stream


VALUES = [
    {"a": 1, "b": [1.5, "text", None, True], "c": {"d": (1, 2), 3: b"bytes \xff"}},
    OrderedDict(x=torch.Size([2, 3]), dtype=torch.bfloat16, big=2**70),
    [],
    5,
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_are_those_that_torch_loads(value: Any) -> None:
    found = contents_of(saved(value))
    assert found == value and type(found) is type(value)


def test_tensors_are_where_torch_finds_them() -> None:
    whole = torch.arange(24.0).view(4, 6)
    tree: dict[str, Any] = {
        "whole": whole,
        "part": whole[1:3, 2:],
        "turned": whole.t(),
        "few": [torch.tensor(3), torch.ones(5, dtype=torch.bfloat16), {"x": torch.zeros(3) > 0}],
        "none": torch.empty(0, 4),
    }
    stream = saved(tree)
    content = stream.getvalue()
    found = dict(named_tensors(contents_of(stream)))
    expected = {f"few.{at}": tree["few"][at] for at in (0, 1)} | {"few.2.x": tree["few"][2]["x"]}
    expected |= {name: tree[name] for name in ("whole", "part", "turned", "none")}
    assert found.keys() == expected.keys()
    for name, stored in found.items():
        tensor = expected[name]
        assert (stored.dtype, stored.size) == (tensor.dtype, tuple(tensor.shape)), name
        if tensor.numel():
            length = tensor.untyped_storage().nbytes()
            raw = bytearray(content[stored.begin_byte : stored.begin_byte + length])
            raw += bytes(-len(raw) % tensor.element_size())
            there = torch.frombuffer(raw, dtype=stored.dtype).as_strided(stored.size, stored.stride)
            assert torch.equal(there, tensor), name


class Asking:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def test_code_is_not_run(tmp_path: Path) -> None:
    assert contents_of(saved({"a": Asking(tmp_path / "ran")})) is None
    assert not (tmp_path / "ran").exists()


def with_pickle(content: bytes) -> io.BytesIO:
    """A file of torch.save with another pickle in it, beside one storage of three numbers."""
    stream = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(stream)
    for name, record in (
        ("data.pkl", content),
        ("byteorder", sys.byteorder.encode()),
        ("data/0", torch.ones(3).numpy().tobytes()),
    ):
        writer.write_record(name, record, len(record))
    writer.write_end_of_file()
    return stream


@pytest.mark.parametrize(
    "opcodes",
    [
        b"c__builtin__\neval\n.",
        b"ctorch\nserialization.os.mkdir\n.",
        # Gives a function of torch other defaults, and the list of what is known another entry.
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__K\x01s\x86b.",
        b"\x80\x02ctorch.distributed.device_mesh\nDeviceMesh\nN}X\x07\x00\x00\x00__new__K\x01s\x86b.",
        # What stands around a tensor is no value.
        b"\x80\x02ctorch.distributed.device_mesh\nDeviceMesh\n)\x81.",
        b"\x80\x02]ctorch.distributed.device_mesh\nDeviceMesh\n)\x81\x85a.",
        b"\x80\x02ctorch._utils\n_rebuild_wrapper_subclass\n.",
        b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x03tQ.",
    ],
)
def test_what_is_not_known_is_not_told(opcodes: bytes) -> None:
    stand_in = _known()["torch.distributed.device_mesh", "DeviceMesh"]
    before = torch._utils._rebuild_tensor_v2.__defaults__, dict(vars(stand_in))
    assert contents_of(with_pickle(opcodes)) is None
    assert (torch._utils._rebuild_tensor_v2.__defaults__, dict(vars(stand_in))) == before
    assert contents_of(with_pickle(pickle.dumps(4, 2))) == 4


def compressed(stream: io.BytesIO) -> io.BytesIO:
    other = io.BytesIO()
    with zipfile.ZipFile(stream) as old, zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return other


def unmarked(stream: io.BytesIO) -> io.BytesIO:
    """Packed anew, so that tensors lie elsewhere than where torch would put them."""
    other = io.BytesIO()
    with zipfile.ZipFile(stream) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return other


class Ahead(io.BytesIO):
    def seekable(self) -> bool:
        return False


@pytest.mark.parametrize(
    "change",
    [
        compressed,
        lambda it: io.BytesIO(it.getvalue()[:-9]),
        unmarked,
        lambda it: Ahead(it.getvalue()),
    ],
)
def test_what_torch_does_not_write_is_not_told(change: Callable[[io.BytesIO], io.BytesIO]) -> None:
    stream = saved({"a": torch.zeros(3)})
    assert contents_of(stream) is not None
    assert contents_of(change(stream)) is None


@pytest.mark.parametrize(
    "odd",
    [
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        nn.Parameter(torch.zeros(3)),
        torch.zeros(3).to(torch.float8_e4m3fn),
    ],
    ids=["conjugate", "sparse", "quantized", "parameter", "eight bits"],
)
def test_a_tensor_that_is_more_than_its_elements_is_left_to_torch(odd: torch.Tensor) -> None:
    assert contents_of(saved({"a": odd})) is None


def test_a_value_holds_no_tensor() -> None:
    assert value_of(saved({"a": [1, "b"]})) == {"a": [1, "b"]}
    assert value_of(saved(torch.zeros(3))) is None
    assert value_of(saved({"a": [torch.zeros(3)]})) is None


def described(storage: Any, *rest: Any) -> io.BytesIO:
    """A file with a tensor that is described like this."""
    stream = io.BytesIO()

    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Storage(), *rest, False, OrderedDict())

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return storage if isinstance(obj, Storage) else None

    Pickler(stream, protocol=2).dump(Tensor())
    return with_pickle(stream.getvalue())


STORAGE = ("storage", torch.FloatStorage, "0", "cpu", 3)


def test_a_tensor_is_told_as_far_as_its_storage_goes() -> None:
    found = contents_of(described(STORAGE, 1, (2,), (1,)))
    assert isinstance(found, StoredTensor) and found.size == (2,)
    assert contents_of(described(STORAGE, 1, (3,), (1,))) is None
    assert contents_of(described(STORAGE, 0, (2,), (3,))) is None
    assert contents_of(described(STORAGE, -1, (2,), (1,))) is None
    assert contents_of(described(STORAGE, 0, (-2, -1), (1, 1))) is None
    assert contents_of(described(STORAGE, 0, (2, 1), (1,))) is None
    assert contents_of(described((*STORAGE[:4], 2), 0, (2,), (1,))) is None
    assert contents_of(described((*STORAGE[:4], 4), 0, (2,), (1,))) is None
    assert contents_of(described(("other", *STORAGE[1:]), 0, (2,), (1,))) is None
    assert contents_of(described((*STORAGE[:2], "1", "cpu", 3), 0, (2,), (1,))) is None
