"""Take data from the files of a checkpoint, and nothing that would run.

Both libraries write pickles, and a pickle may name any function and have it called. Whoever can write
into the folder of a run could so run programs in it. Here a pickle gets what is on a fixed list, and
asking for more is damage. What a load would refuse is refused when it is saved already.

Bytes that have passed their digest are not damaged, whatever comes of them: an older checkpoint, which
this program reads no better, is not taken in their place. Only what asks for code stays damage.

    save: value -> require_plain, or what torch.save made of it -> require_plain_content
    load: .metadata -> load_index          a file or an entry of torch.save -> load_plain
"""

import errno
import functools
import io
import pathlib
import pickle
import re
import sys
from collections.abc import Mapping
from typing import Any, IO

import torch
import torch.distributed.tensor  # noqa: F401  (allows what sharded tensors are made of)
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan.components.checkpointer.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointReadError,
)
from torchtitan.components.checkpointer.integrity.checked_file import CheckedFile
from torchtitan.components.checkpointer.stand_ins import RULE, stand_in

_WHAT_TO_DO = (
    "Nothing of it was run. If it is damaged, move the checkpoint away and start again to resume from "
    "the one before it."
)
_NOT_DAMAGED = (
    "Its bytes are what was saved, so it is not damaged, and no older checkpoint is taken in its place: "
    "this program does not take what another one, or another version, has saved. A class of your "
    "program has to be allowed by torch.serialization.add_safe_globals before the load."
)
_ASKS = re.compile(rf"it asks for (\S+), {RULE}")
# The second name is what Python 2 called its first module, and pickles still do.
_LIBRARY = sys.stdlib_module_names | {"__builtin__"}
_Refused = pickle.UnpicklingError


def _no_bytes() -> bytes:
    return b""


# For the whole process, as torch's own packages do it with theirs: only what is made of data and does
# nothing. A list for the time of one call would be torn by threads that read side by side.
torch.serialization.add_safe_globals(
    [(_no_bytes, "builtins.bytes"), (frozenset, "builtins.frozenset")]
)


# --- what torch.save wrote -------------------------------------------------------------------------


def load_plain(
    content: bytes | IO[bytes], what: str, map_location: Any = None, *, is_checked: bool = False
) -> Any:
    """The value that ``torch.save`` wrote, if it is data.

    One class of torch's own list does something when it is made: a mesh of ranks, which sharded tensors
    hold, sets up process groups if a pickle calls it, as no pickle of torch does. Nothing is run by that,
    but a rank may wait for others until the time for loading is over. Torch has one list for the whole
    process and no hook for a call, so a stand-in would change every other load in it as well.

    Args:
        what: names the file, or the entry and the file, for the error.
        is_checked: whether the bytes have passed their digest; those of a ``CheckedFile`` always have.

    Raises:
        CheckpointDamagedError: it asks for code, or is not what ``torch.save`` writes.
        CheckpointReadError: this program does not take what was saved.
        OSError, MemoryError: the machine does not let it be read now, which says nothing about it.
    """
    stream = io.BytesIO(content) if isinstance(content, bytes) else content
    try:
        return torch.load(stream, map_location=map_location, weights_only=True)
    except Exception as error:
        # Errors of checkpoints are from a stream that checks what it reads. Damaged files raise
        # whatever their bytes happen to spell.
        if isinstance(error, (CheckpointError, *NOT_THERE)) or is_of_the_machine(error):
            raise
        if is_checked or isinstance(content, CheckedFile):
            raise fault_of_good_bytes(error, what) from error
        raise CheckpointDamagedError(
            f"{what} cannot be read: {reason_of(error)}. {_WHAT_TO_DO}"
        ) from error


NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Of a file that is asked for as a checkpoint has it: damage, and nothing that a disk says of itself."""


def is_of_the_machine(error: BaseException) -> bool:
    """Whether the disk or a memory has failed, which says nothing about the checkpoint."""
    if isinstance(error, OSError):
        # A damaged table of contents may name a place where no file can begin.
        return not isinstance(error, NOT_THERE) and error.errno not in (None, errno.EINVAL)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)):
        return True
    # What torch raises on a full host has no class of its own.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def fault_of_good_bytes(error: Exception, what: str) -> CheckpointReadError:
    """What ``error``, by which ``what`` could not be read, is when its bytes are known to be good.

    Damage if they ask for code, which somebody has planted together with a manifest that fits.
    """
    reason = reason_of(error)
    if (asked := _ASKS.search(reason)) and _is_code(asked[1]):
        return CheckpointDamagedError(f"{what} cannot be read: {reason}. {_WHAT_TO_DO}")
    return CheckpointReadError(f"{what} cannot be read: {reason}. {_NOT_DAMAGED}")


def _is_code(name: str) -> bool:
    """Whether a pickle that asks for ``name`` wants to run something, as opposed to making a value.

    Nobody's state is of a class of Python's own library, unless it is allowed. What is of another
    package may be a class of the program that was allowed when it was saved. Torch calls what is
    built into Python by its bare name.
    """
    return "." not in name or name.partition(".")[0] in _LIBRARY


def reason_of(error: Exception) -> str:
    """What is wrong with what ``torch.save`` wrote, without torch's advice to read it in spite of that."""
    text = str(error)
    if isinstance(error, _Refused) and RULE in text:
        return text
    if asked := re.search(r"\bGLOBAL (\S+) ", text):
        return f"it asks for {asked[1]}, {RULE}"
    said = text.partition("WeightsUnpickler error:")[2].partition("Check the documentation")[0]
    return said.strip().rstrip(".") or repr(error)


def require_plain(value: Any, key: str) -> None:
    """Check before a save that ``load_plain`` would give ``value`` back.

    Args:
        key: where it lies in the checkpoint, for the error.

    Raises:
        ValueError: a load would refuse it, or it cannot be written at all.
    """
    if _is_plain(value):
        return
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:  # of any object in the state
        raise ValueError(f"{key} cannot be saved: {error!r}. {_WHAT_TO_SAVE}") from error
    require_plain_content(stream.getvalue(), key)


def require_plain_content(content: bytes | io.BytesIO, key: str) -> None:
    """``require_plain`` of what ``torch.save`` has made of a value.

    Raises:
        ValueError: as above.
    """
    raw = content if isinstance(content, bytes) else content.getvalue()
    try:
        (_require_known if len(raw) <= _SMALL_BYTES else _require_loads)(raw)
    except Exception as error:
        raise ValueError(
            f"{key} cannot be saved, because no load would take it: {reason_of(error)}. {_WHAT_TO_SAVE}"
        ) from error


_WHAT_TO_SAVE = (
    "Save numbers, text, bytes and tensors, and lists, tuples, sets or dicts of these; what numpy has "
    "through torch.from_numpy or .item(). A class of your program that does nothing when it is made is "
    "allowed by torch.serialization.add_safe_globals, before the save and before each load."
)
_SMALL_BYTES = 4096
_ATOMS = (type(None), bool, float, complex, str, bytes, torch.dtype, torch.Size)
_CONTAINERS = (list, tuple, set, frozenset)


def _is_plain(value: Any) -> bool:
    """Whether ``value`` certainly is; what is False here may be allowed in the end."""
    kind = type(value)
    if kind is int:
        return (
            value.bit_length() < 2000
        )  # longer ones are written in a form that torch does not read
    if kind is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return kind in _ATOMS or (kind in _CONTAINERS and all(map(_is_plain, value)))


def _require_loads(content: bytes) -> None:
    torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


@functools.lru_cache(maxsize=1024)
def _require_known(content: bytes) -> None:
    # An optimizer has the same few settings for each of thousands of parameters. What is refused is
    # raised, and so not remembered.
    _require_loads(content)


# --- the index of DCP ------------------------------------------------------------------------------


def load_index(content: bytes, path: str, *, is_checked: bool = False) -> Metadata:
    """The index of a checkpoint of DCP.

    Args:
        content: what is in the file ``.metadata``.
        path: that file, for the error.
        is_checked: whether ``content`` has passed its digest.

    Raises:
        CheckpointDamagedError: it asks for code or leads elsewhere, or is not what DCP writes.
        CheckpointReadError: this program does not take what was saved.
    """
    try:
        index = _IndexUnpickler(io.BytesIO(content)).load()
    except Exception as error:
        if is_checked:
            raise _fault_of_good_index(error, path) from error
        # Damaged pickles raise whatever their bytes happen to spell: KeyError, EOFError, ...
        text = str(error) if isinstance(error, _Refused) else repr(error)
        raise CheckpointDamagedError(
            f"The index {path} cannot be read: {text}. The path must be one checkpoint, a step-N "
            "directory; if it is damaged, move it away."
        ) from error
    if problem := _problem_of(index):
        said = f"The index {path} is not one that DCP writes: {problem}."
        if is_checked and _LEADS_OUTSIDE not in problem:
            raise CheckpointReadError(f"{said} {_NOT_DAMAGED}")
        raise CheckpointDamagedError(f"{said} If it is damaged, move the checkpoint away.")
    return index


def _fault_of_good_index(error: Exception, path: str) -> Exception:
    if is_of_the_machine(error):
        return error
    if isinstance(error, _Refused) and RULE in str(error) and not _ASKS.search(str(error)):
        return CheckpointDamagedError(f"The index {path} cannot be read: {error}. {_WHAT_TO_DO}")
    return fault_of_good_bytes(error, f"The index {path}")


def _blank(real: type) -> type:
    return stand_in(real.__name__, lambda: object.__new__(real))


def _path(*parts: str) -> pathlib.PurePath:
    return pathlib.PurePosixPath(*parts)


_Encoding = dcp_metadata._MEM_FORMAT_ENCODING
_ENCODING = stand_in("_MEM_FORMAT_ENCODING", _Encoding)


def _member(owner: Any, name: str) -> Any:
    # Python 3.11 writes a member of an enum as getattr(its class, its name).
    if owner is not _ENCODING:
        raise _Refused(f"it asks for builtins.getattr of something else than an encoding, {RULE}")
    return _Encoding[name]


def _allowed() -> dict[tuple[str, str], Any]:
    ours = dcp_metadata.__name__
    # Up to torch 2.1 these two lay elsewhere.
    earlier = "torch.distributed._shard.sharded_tensor.metadata"
    classes = [
        BytesStorageMetadata,
        ChunkStorageMetadata,
        dcp_metadata.StorageMeta,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    ]
    paths = {
        (module, name): stand_in(name, _path)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
    }
    dtypes = {
        ("torch", name): value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype)
    }
    return {
        **{(ours, kind.__name__): _blank(kind) for kind in classes},
        (_StorageInfo.__module__, _StorageInfo.__name__): _blank(_StorageInfo),
        (earlier, "TensorProperties"): _blank(TensorProperties),
        (ours, "_MEM_FORMAT_ENCODING"): _ENCODING,
        (earlier, "MEM_FORMAT_ENCODING"): _ENCODING,
        ("builtins", "getattr"): stand_in("getattr", _member),
        ("torch.serialization", "_get_layout"): stand_in(
            "_get_layout", torch.serialization._get_layout
        ),
        ("torch", "Size"): torch.Size,
        **paths,
        **dtypes,
    }


_ALLOWED = _allowed()


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        # By both names at once: with a dot in the second one, pickle would look inside a class.
        if (found := _ALLOWED.get((module_name, global_name))) is None:
            raise _Refused(f"it asks for {module_name}.{global_name}, {RULE}")
        return found


_LEADS_OUTSIDE = "it leads to a file outside of the checkpoint"


def _problem_of(index: Any) -> str | None:
    """What of an index is not as the read that follows takes it to be."""
    try:
        if type(index) is not Metadata:
            return f"it holds a {type(index).__name__}"
        if bad := [
            name for name, it in index.state_dict_metadata.items() if not _is_entry(name, it)
        ]:
            return f"the entry {bad[0]!r} is neither a tensor nor a value"
        if bad := [name for name, it in (index.planner_data or {}).items() if not _is_way(it)]:
            return f"the place of {bad[0]!r} is none"
        stored: Mapping[Any, Any] = index.storage_data or {}
        if bad := [key.fqn for key, info in stored.items() if not _is_inside(info)]:
            return f"{_LEADS_OUTSIDE} for {bad[0]!r}"
    except (AttributeError, TypeError, ValueError) as error:
        return f"a part is missing or of another type, {error}"
    return None


def _is_entry(name: Any, entry: Any) -> bool:
    if type(name) is not str or type(entry) is not TensorStorageMetadata:
        return type(name) is str and type(entry) is BytesStorageMetadata
    sizes = [entry.size, *(size for chunk in entry.chunks for size in (chunk.offsets, chunk.sizes))]
    return type(entry.properties.dtype) is torch.dtype and all(
        type(size) is torch.Size for size in sizes
    )


def _is_way(way: Any) -> bool:
    return type(way) is tuple and all(type(part) in (str, int) for part in way)


def _is_inside(info: Any) -> bool:
    place = pathlib.PurePosixPath(info.relative_path)
    numbers = (info.offset, info.length)
    return (
        type(info) is _StorageInfo
        and all(type(number) is int and number >= 0 for number in numbers)
        and not place.is_absolute()
        and ".." not in place.parts
    )
