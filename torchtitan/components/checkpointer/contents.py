"""Tell what is in a file of torch.save, and where its tensors lie in it, without making a tensor.

``torch.load`` of weights alone is a program in Python for each byte of the pickle, and makes every
tensor. Here the pickle gets stand-ins, which make records and nothing else, so it is read by pickle
itself. This is the short way and not the judge: of what it does not know, be that damage or code, it
says nothing, and the long way (screening.py) takes it or says what is wrong with it.

    tc/reading.py, dcp_reader.py (values), parts.py (places of tensors) -> contents_of, or None -> load_plain
"""

import collections
import functools
import io
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast, IO

import torch

from torchtitan.components.checkpointer.stand_ins import Closed, stand_in

# Where torch puts the first byte of each tensor: at a multiple of this, or of more.
_ALIGNMENT_BYTES = 64
_HEADER_BYTES = 30
# Behind the bytes of a record stand its checksum and its lengths; these are longer in a large archive.
_HAS_TRAILER = 0x08
_TRAILER_BYTES, _LONG_TRAILER_BYTES = 16, 24
_LARGE = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, without its contents; of a sharded one, the part of one rank."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    begin_byte: int
    """Where its first element lies in the file."""


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: torch.dtype
    begin_byte: int
    num_elements: int


def contents_of(stream: Any, leaf: Callable[[StoredTensor], Any] = lambda it: it) -> Any | None:
    """What was saved, with ``leaf`` of each tensor in its place; None if that takes ``torch.load``.

    Args:
        stream: the open file; it stands anywhere afterwards.
    """
    if not stream.seekable():
        return None
    try:
        with zipfile.ZipFile(cast(IO[bytes], stream)) as archive:
            folder = archive.infolist()[0].filename.partition("/")[0]
            if archive.read(f"{folder}/byteorder").decode() != sys.byteorder:
                return None
            places = _places(archive, f"{folder}/data/")
            content = archive.read(f"{folder}/data.pkl")
        tree = _Unpickler(content, places).load()
        return _with_leaves(tree, leaf)
    except Exception:
        # Whatever it is, the long way meets it as well and says what it is.
        return None


def value_of(stream: Any) -> Any | None:
    """What was saved, if it is neither a tensor nor holds one; None otherwise, and for None."""
    return contents_of(stream, _refuse)


def named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, StoredTensor]]:
    """(path with dots, tensor) of all tensors in what ``contents_of`` returned."""
    if isinstance(tree, StoredTensor):
        yield prefix, tree
        return
    items: Any = ()
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    for key, value in items:
        yield from named_tensors(value, f"{prefix}.{key}" if prefix else str(key))


def _places(archive: zipfile.ZipFile, folder: str) -> dict[str, tuple[int, int]]:
    """(first byte, length) of each record in ``folder``, by its name there.

    From behind, because what stands before the bytes tells its own length only where it stands, and
    to look there would be a read for each tensor.
    """
    records = sorted(archive.infolist(), key=lambda record: record.header_offset)
    ends = [record.header_offset for record in records[1:]] + [archive.start_dir]
    places = {}
    for record, end in zip(records, ends, strict=True):
        if not record.filename.startswith(folder):
            continue
        size, begin = record.file_size, end
        if size:  # of what is empty, nothing will be read
            is_large = record.header_offset >= _LARGE or size >= _LARGE
            begin -= size + (_LONG_TRAILER_BYTES if is_large else _TRAILER_BYTES)
            first_possible = record.header_offset + _HEADER_BYTES + len(record.filename.encode())
            if (
                record.compress_type != zipfile.ZIP_STORED
                or not record.flag_bits & _HAS_TRAILER
                or begin % _ALIGNMENT_BYTES
                or begin < first_possible
            ):
                raise ValueError(record.filename)
        places[record.filename.removeprefix(folder)] = begin, size
    return places


def _with_leaves(tree: Any, leaf: Callable[[StoredTensor], Any]) -> Any:
    """``tree`` with ``leaf`` of its tensors, if nothing in it is a stand-in."""
    kind = type(tree)
    if kind is StoredTensor:
        return leaf(tree)
    if kind in _VALUES:
        return tree
    if kind is dict or kind is collections.OrderedDict:
        for key, value in tree.items():
            _with_leaves(key, _refuse)
            tree[key] = _with_leaves(value, leaf)
        return tree
    if kind is list:
        tree[:] = [_with_leaves(value, leaf) for value in tree]
        return tree
    if kind is tuple:
        return tuple(_with_leaves(value, leaf) for value in tree)
    raise ValueError(kind.__name__)


_VALUES = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size))


def _refuse(tensor: StoredTensor) -> Any:
    raise ValueError(tensor)


class _Ignored(metaclass=Closed):
    """What stands around a tensor in a layout; that is known from the index."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


_IGNORED = _Ignored()


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, _: Any, hooks: Any, metadata: Any = None
) -> StoredTensor:
    numbers = (offset, *size, *stride)
    if (
        type(storage) is not _Storage
        or any(type(number) is not int or number < 0 for number in numbers)
        or len(size) != len(stride)
        or metadata
        or hooks
    ):
        raise ValueError("a tensor that is more than its elements")
    span = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if all(size) and offset + span > storage.num_elements:
        raise ValueError("a tensor that goes beyond its storage")
    begin = storage.begin_byte + offset * storage.dtype.itemsize
    return StoredTensor(storage.dtype, tuple(size), tuple(stride), begin)


def _sharded(function: Any, kind: Any, _: Any, state: Any) -> StoredTensor:
    # What is in its dict, which is empty, and what is in its slots.
    local = state[1]["_local_tensor"]
    if (
        state[0]
        or function is not _WRAPPER
        or kind is not _DTENSOR
        or type(local) is not StoredTensor
    ):
        raise ValueError("a tensor of another kind")
    return local


def _bytes(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError(encoding)
    return text.encode(encoding)


_WRAPPER = stand_in("_rebuild_wrapper_subclass", _refuse)
_DTENSOR = stand_in("DTensor", _refuse)


@functools.cache
def _known() -> dict[tuple[str, str], Any]:
    placements = "torch.distributed.tensor.placement_types"
    spec = "torch.distributed.tensor._dtensor_spec"
    around = [
        ("torch.distributed.device_mesh", "DeviceMesh"),
        ("torch.distributed._mesh_layout", "_MeshLayout"),
        ("torch.distributed._mesh_layout", "_FlatLayout"),
        ("torch.serialization", "_get_layout"),
        ("torch", "device"),
        *((spec, name) for name in ("DTensorSpec", "ShardOrderEntry", "TensorMeta")),
        *((placements, name) for name in ("Shard", "Replicate", "_StridedShard")),
    ]
    storages = {
        ("torch", name): dtype
        for name, dtype in torch.storage._storage_type_to_dtype_map().items()
        if not name.startswith("Q")
    }
    dtypes = {
        ("torch", name): value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype)
    }
    return {
        **{name: stand_in(name[1], lambda *args: _IGNORED) for name in around},
        **storages,
        **dtypes,
        ("torch._utils", "_rebuild_tensor_v2"): stand_in("_rebuild_tensor_v2", _tensor),
        ("torch._tensor", "_rebuild_from_type_v2"): stand_in("_rebuild_from_type_v2", _sharded),
        ("torch._utils", "_rebuild_wrapper_subclass"): _WRAPPER,
        ("torch.distributed.tensor", "DTensor"): _DTENSOR,
        # How bytes are written.
        ("_codecs", "encode"): stand_in("encode", _bytes),
        # Classes in C, which take no attribute either.
        ("torch", "Size"): torch.Size,
        ("collections", "OrderedDict"): collections.OrderedDict,
    }


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, places: dict[str, tuple[int, int]]) -> None:
        super().__init__(io.BytesIO(content))
        self._places = places

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        # By both names at once: with a dot in the second one, pickle would look inside a class.
        if (found := _known().get((module_name, global_name))) is None:
            raise ValueError(f"{module_name}.{global_name}")
        return found

    def persistent_load(self, pid: Any) -> _Storage:
        what, dtype, key, _, num_elements = pid
        begin, size = self._places[key]
        if (
            what != "storage"
            or type(dtype) is not torch.dtype
            or type(num_elements) is not int
            or size != num_elements * dtype.itemsize
        ):
            raise ValueError("a storage of another kind")
        return _Storage(dtype, begin, num_elements)
