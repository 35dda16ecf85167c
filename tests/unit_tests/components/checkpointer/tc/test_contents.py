"""What is in a file is told without torch.load as torch.load would tell it, or not at all."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_checkpointing.resharding import LoadPlan
from torchtitan.components.checkpointer.tc.contents import contents_of, named_tensors, StoredTensor
from torchtitan.components.checkpointer.tc.slices import read_into
from torchtitan.components.checkpointer.tc.storage import DurableStorageConfig


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
    """A file of torch.save with another pickle in it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(saved({"a": torch.zeros(3)})) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            if not name.startswith("archive/data/"):
                new.writestr(name, content if name.endswith("data.pkl") else old.read(name))
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
    before = torch._utils._rebuild_tensor_v2.__defaults__
    assert contents_of(with_pickle(opcodes)) is None
    assert torch._utils._rebuild_tensor_v2.__defaults__ == before
    assert contents_of(with_pickle(pickle.dumps(4, 2))) == 4


def compressed(stream: io.BytesIO) -> io.BytesIO:
    other = io.BytesIO()
    with zipfile.ZipFile(stream) as old, zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return other


def longer(stream: io.BytesIO) -> io.BytesIO:
    """A record that is not as long as the storage that it should hold."""
    content = stream.getvalue()
    return io.BytesIO(content.replace(b"K\x03tq", b"K\x02tq"))


class Ahead(io.BytesIO):
    def seekable(self) -> bool:
        return False


@pytest.mark.parametrize(
    "change",
    [
        compressed,
        lambda it: io.BytesIO(it.getvalue()[:-9]),
        longer,
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


def plan(offsets: Any, src_offsets: Any, sizes: Any) -> LoadPlan:
    return LoadPlan(
        offsets=offsets,
        sizes=sizes,
        src_rank=0,
        src_fqn="a",
        src_offsets=src_offsets,
        src_sizes=sizes,
    )


@pytest.mark.parametrize(
    "source,target",
    [
        (torch.arange(24.0).view(4, 6), torch.zeros(4, 6)),
        (torch.arange(24.0).view(6, 4).t(), torch.zeros(4, 6)),
        (torch.arange(24.0).view(4, 6), torch.zeros(6, 4).t()),
        (torch.arange(24.0).view(4, 6), torch.zeros(4, 6, dtype=torch.float64)),
        (torch.arange(48.0).view(4, 12)[:, ::2], torch.zeros(4, 12)[:, ::2]),
        (torch.arange(24.0).view(6, 4).t(), torch.zeros(6, 4).t()),
    ],
    ids=["alike", "turned there", "turned here", "another dtype", "gaps", "turned both"],
)
@pytest.mark.parametrize(
    "place",
    [
        ((0, 0), (0, 0), (4, 6)),
        ((1, 0), (2, 0), (2, 6)),
        ((1, 2), (2, 1), (2, 3)),
        ((3, 5), (0, 1), (1, 1)),
    ],
)
def test_parts_get_to_their_places_in_any_layout(
    tmp_path: Path, source: torch.Tensor, target: torch.Tensor, place: Any
) -> None:
    torch.save({"a": source}, tmp_path / "model_0.pt")
    target = target.clone(memory_format=torch.preserve_format)
    expected = target.clone()
    here, there, sizes = place
    cut = [
        tuple(slice(at, at + size) for at, size in zip(it, sizes, strict=True))
        for it in (here, there)
    ]
    expected[cut[0]] = source[cut[1]].to(target.dtype)
    storage = DurableStorageConfig().create_storage()
    assert read_into({("a",): target}, [(("a",), plan(*place))], tmp_path / "model_0.pt", storage)
    assert torch.equal(target, expected)


def test_what_lies_aside_is_bounded_and_all_of_it_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan.components.checkpointer.tc.slices._ASIDE_BYTES", 1)
    torch.save({"a": torch.arange(12.0)}, tmp_path / "model_0.pt")
    target = torch.zeros(12, dtype=torch.float64)
    plans = [(("a",), plan((at,), (at,), (3,))) for at in (9, 0, 6, 3)]
    storage = DurableStorageConfig().create_storage()
    assert read_into({("a",): target}, plans, tmp_path / "model_0.pt", storage)
    assert target.tolist() == list(range(12))


def test_a_part_outside_of_its_tensor_is_an_error(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(12.0)}, tmp_path / "model_0.pt")
    storage = DurableStorageConfig().create_storage()
    plans = [(("a",), plan((0,), (10,), (3,)))]
    with pytest.raises(ValueError, match="out of bounds"):
        read_into({("a",): torch.zeros(12)}, plans, tmp_path / "model_0.pt", storage)
    contents = contents_of((tmp_path / "model_0.pt").open("rb"))
    assert contents is not None and isinstance(contents["a"], StoredTensor)
