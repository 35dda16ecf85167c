"""Fill the objects of a run from a checkpoint of torch_checkpointing.

Tensors are read by the library, each rank reading its part. Everything else, which the library would
leave as it is in another layout, and which must be the same on all ranks, is read by rank 0
and handed around together with the outline:

    look (rank 0) -> Saved -> templates -> require_match -> library: tensors -> put: the rest -> objects

The outline has the flat names that DCP's index has, so both managers say the same about a mismatch.
"""

import logging
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, IO

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.stateful import Stateful
from torch_checkpointing.distributed_metadata import (
    DistributedItemMetadata,
    DistributedMetadata,
    GlobalObjectMetadata,
)
from torch_checkpointing.dtensor_metadata import DTensorShardingMetadata
from torch_checkpointing.storage.base_storage import ReadArgs, Storage

from torchtitan.components.checkpointer.agreement import gather, rank_zero_decides
from torchtitan.components.checkpointer.contents import contents_of
from torchtitan.components.checkpointer.errors import (
    cause_of,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointReadError,
)
from torchtitan.components.checkpointer.integrity.verification import Verification
from torchtitan.components.checkpointer.matching import require_match
from torchtitan.components.checkpointer.screening import load_plain
from torchtitan.components.checkpointer.source import require_step, Source
from torchtitan.components.checkpointer.state import (
    flatten_states,
    MODEL,
    RANK_STATE,
    require_known,
    TRAIN_STATE,
)
from torchtitan.components.checkpointer.tc.faults import fault
from torchtitan.components.checkpointer.tc.index import MARKER
from torchtitan.components.checkpointer.tc.leaves import leaves, name_of, Nested, path_of
from torchtitan.components.checkpointer.tc.library import PlainMetadata
from torchtitan.components.checkpointer.templates import SavedEntry, templates
from torchtitan.tools.errors import portable
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

_ITEM_FILE = re.compile(r"([A-Za-z0-9_-]+)_(0|[1-9][0-9]*)\.pt", re.ASCII)
_NUM_READERS = 16
# Stands for all that are in a file whose values alone are asked for.
_SOME_TENSOR = torch.empty(0, device="meta")


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What a checkpoint holds, but for the contents of its tensors."""

    outline: dict[str, SavedEntry]
    """By flat name; model entries stand at the top, as in DCP's index."""

    values: dict[str, Any]
    """What is no tensor, by flat name."""


def look(storage: Storage, path: str, *, unneeded: Set[str] = frozenset()) -> Saved:
    """Read the metadata and the small values of the checkpoint at ``path``.

    Args:
        unneeded: the items whose values stay unread.

    Raises:
        CheckpointDamagedError: they are not what was saved.
        CheckpointReadError: they cannot be read now, or not here.
    """
    try:
        metadata, names = PlainMetadata.maybe_load(Path(path), storage), storage.ls(Path(path))
    except OSError as error:
        raise fault(error, path, storage) from error
    if metadata is None:
        raise CheckpointDamagedError(
            f"There is no index {path}/{MARKER}. The path must be one checkpoint, a step-N directory."
        )
    values: dict[str, Any] = {}
    try:
        outline = dict(_tensors(metadata, path))
        files = [each for each in _files_with_values(metadata, names) if each[0] not in unneeded]
    except Exception as error:  # of whatever the bytes of the index spell
        raise fault(error, f"{path}/{MARKER}", storage) from error
    if gone := sorted(metadata.metadata.keys() - unneeded - {key for key, _ in files}):
        raise CheckpointDamagedError(
            f"{path} is damaged: there are no files {', '.join(f'{key}_*.pt' for key in gone)}, of which its "
            "index tells. Move it away and start again to resume from the one before it."
        )
    with ThreadPoolExecutor(min(_NUM_READERS, max(len(files), 1))) as readers:
        trees = list(readers.map(lambda one: _read(storage, Path(path, one[1])), files))
    # The lowest rank is the last to speak, so what ranks share is that of the lowest.
    for (key, _), tree in reversed(list(zip(files, trees, strict=True))):
        for nested, value in leaves(tree):
            if not isinstance(value, torch.Tensor):
                name = name_of(key, nested)
                outline[name] = SavedEntry(path=path_of(key, nested), shape=None, dtype=None)
                values[name] = value
    return Saved(outline=outline, values=values)


@contextmanager
def _without_mesh_warnings() -> Generator[None]:
    # The meshes in a checkpoint come without process groups and need none; torch warns of each.
    log = logging.getLogger("torch.distributed.device_mesh")

    def is_other(record: logging.LogRecord) -> bool:
        return "unpickling of the DeviceMesh" not in record.getMessage()

    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


@_without_mesh_warnings()
@GarbageCollection.paused()
def restore(
    source: Source,
    states: Mapping[str, Any],
    read: Callable[[dict[str, Any]], Any],
    *,
    storage: Storage,
    excluded: Iterable[str],
    group: "dist.ProcessGroup | None",
) -> None:
    """Fill ``states`` from the checkpoint ``source``, whose tensors ``read`` fills in. Collective.

    Args:
        states: all objects of the run by state key.
        read: fills the tensors in a dict {state key: state dict}.
        excluded: the keys that are not to be restored.

    Raises:
        CheckpointMismatchError: the checkpoint holds other state, or another step.
        CheckpointDamagedError: it is not what was saved. Of ``states`` no more has changed than the
            contents of tensors.
        CheckpointReadError: it cannot be read now.
    """
    started_at = time.monotonic()
    other_keys = frozenset(states) - {MODEL}
    kept = _to_fill(source, states, excluded)
    unneeded = states.keys() - kept.keys()
    saved = rank_zero_decides(lambda: look(storage, source.path, unneeded=unneeded), group)
    model = states[MODEL].state_dict()
    wanted = templates(flatten_states(kept, model=model), other_keys, saved.outline)
    require_match(
        source.path,
        wanted,
        other_keys=other_keys | {RANK_STATE},
        group=group,
        outline=saved.outline,
    )
    targets = {key: wanted[key] for key in kept if key != MODEL}
    in_checkpoint = {entry.path[0] for entry in saved.outline.values()}
    # Before anything is changed. None is what this run does without.
    _require_restorable(
        {key: it for key, it in targets.items() if key in in_checkpoint and it is not None}
    )
    trees = {
        key: value.state_dict() for key, value in targets.items() if isinstance(value, Stateful)
    }
    trees[MODEL] = model
    into = _with_tensors(targets, trees)
    _read_on_all_ranks(lambda: read(into), source.path, group, storage)
    filled = {key: _put(key, tree, saved) for key, tree in trees.items()}
    restore_state_dict({**targets, MODEL: states[MODEL]}, filled)
    if TRAIN_STATE not in excluded:
        require_step(source, states.get(TRAIN_STATE))
    GarbageCollection.collect("after loading a checkpoint")
    logger.info(f"Loaded the checkpoint in {time.monotonic() - started_at:.2f} s.")


def _with_tensors(targets: Mapping[str, Any], trees: Mapping[str, Any]) -> dict[str, Any]:
    """What the library is to read: the ``trees`` that hold tensors, and targets that are one."""
    plain = {key: value for key, value in targets.items() if isinstance(value, torch.Tensor)}
    return {
        key: tree
        for key, tree in {**trees, **plain}.items()
        if any(isinstance(value, torch.Tensor) for _, value in leaves(tree))
    }


def _to_fill(source: Source, states: Mapping[str, Any], excluded: Iterable[str]) -> dict[str, Any]:
    if source.model_only:
        return {MODEL: states[MODEL]}
    require_known(excluded, states)
    return {key: value for key, value in states.items() if key == MODEL or key not in excluded}


def restore_state_dict(states: Mapping[str, Any], state_dict: Mapping[str, Any]) -> None:
    """Give each of ``states`` what was loaded for it, the model last.

    Raises:
        CheckpointMismatchError: something was loaded for what cannot take it.
    """
    _require_restorable({key: states.get(key) for key in state_dict})
    for key in sorted(state_dict, key=lambda name: (name == MODEL, name)):
        state = states[key]
        if isinstance(state, Stateful):
            state.load_state_dict(state_dict[key])
        elif isinstance(state, dict):
            state.update(state_dict[key])
        else:
            state.copy_(state_dict[key])


def _require_restorable(states: Mapping[str, Any]) -> None:
    refused = [
        f"{key} ({type(state).__name__})"
        for key, state in sorted(states.items())
        if not isinstance(state, (Stateful, dict, torch.Tensor))
    ]
    if refused:
        raise CheckpointMismatchError(
            f"The checkpoint holds {', '.join(refused)}, which cannot be restored: only an object with "
            "state_dict and load_state_dict, a dict or a tensor can be. Leave them out with "
            "--checkpoint.exclude_from_loading."
        )


def _tensors(metadata: DistributedMetadata, path: str) -> Iterator[tuple[str, SavedEntry]]:
    for key, item in metadata.metadata.items():
        for nested, groups in item.nested_path_to_metadata.items():
            sharding = groups[0].sharding_metadata
            name = name_of(key, nested)
            if not isinstance(sharding, DTensorShardingMetadata):
                raise CheckpointReadError(
                    f"The index {path}/{MARKER} describes {name} by {type(sharding).__name__}, which is not "
                    "understood here; load what was written by --checkpoint.backend torch_checkpointing."
                )
            dtype = getattr(torch, sharding.dtype.removeprefix("torch."))
            yield name, SavedEntry(
                path=path_of(key, nested), shape=tuple(sharding.global_shape), dtype=dtype
            )


def _files_with_values(
    metadata: DistributedMetadata, names: Iterable[str]
) -> list[tuple[str, str]]:
    """(item, file) of all files to look into, by item and rank.

    Of what is sharded, one rank's file tells the values of all ranks, if all of the tensors are on it:
    it has all values then, although other ranks may have written some of these tensors (shares.py).
    """
    ranks: dict[str, list[int]] = {}
    for name in names:
        if match := _ITEM_FILE.fullmatch(name):
            ranks.setdefault(match[1], []).append(int(match[2]))
    found = []
    for key in sorted(ranks):
        first = min(ranks[key])
        item = metadata.metadata.get(key)
        is_enough = item is not None and _is_sharded(item) and _has_all(item, first)
        found += [
            (key, f"{key}_{rank}.pt")
            for rank in sorted(ranks[key])
            if rank == first or not is_enough
        ]
    return found


def _is_sharded(item: DistributedItemMetadata) -> bool:
    return any(len(_holders(groups[0])) > 1 for groups in item.nested_path_to_metadata.values())


def _has_all(item: DistributedItemMetadata, rank: int) -> bool:
    return all(
        any(rank in _holders(group) for group in groups)
        for groups in item.nested_path_to_metadata.values()
    )


def _holders(group: GlobalObjectMetadata) -> tuple[int, ...]:
    """The ranks that had the tensor, of which those in ``group.ranks`` have written it."""
    return group.sharding_metadata.equivalent_ranks or group.ranks


def _read(storage: Storage, path: Path) -> Any:
    """What is in a file, its tensors without their contents."""
    try:
        with storage.stream_read(path, ReadArgs(pre_read_full_file=False)) as stream:
            tree = contents_of(stream, lambda _: _SOME_TENSOR)
            if tree is not None:
                return tree
            if stream.seekable():
                stream.seek(0)
            return load_plain(cast(IO[bytes], stream), str(path), map_location="meta")
    except Exception as error:
        raise fault(error, str(path), storage) from error


def _read_on_all_ranks(
    read: Callable[[], Any],
    path: str,
    group: "dist.ProcessGroup | None",
    storage: Storage | None = None,
) -> None:
    failure: BaseException | None = None
    try:
        read()
    except Exception as error:
        failure = portable(_of_the_index(error, path, storage))
    found = gather(failure, group)
    failures = [(rank, error) for rank, error in enumerate(found) if error is not None]
    if not failures:
        return
    # Damage on any rank is damage of the checkpoint, and an older one may do for all.
    damages = [each for each in failures if isinstance(each[1], _DAMAGE)]
    rank, error = (damages or failures)[0]
    said = str(error) if isinstance(error, CheckpointReadError) else f"{cause_of(error)}."
    kind = CheckpointDamagedError if damages else CheckpointReadError
    raise kind(f"Could not read the checkpoint {path}: rank {rank}: {said}") from error


_DAMAGE = (CheckpointDamagedError, FileNotFoundError)


def _of_the_index(error: Exception, path: str, storage: Storage | None) -> Exception:
    """``error``; damage if an index that no digest vouches for may have led to it.

    What comes of the other files has its class already.
    """
    verification: Verification | None = getattr(storage, "verification", None)
    if (
        verification is None
        or verification.is_full
        or isinstance(error, (CheckpointError, OSError))
    ):
        return error
    return fault(error, f"{path}/{MARKER}", storage)


def _put(key: str, tree: Any, saved: Saved) -> Any:
    """``tree`` with the saved values in their places, which for a dict is done in place."""
    # By where they were: a list of places for values says nothing of the lists that it held.
    for name, value in saved.values.items():
        if key != MODEL and not name.startswith(key):
            continue
        path = saved.outline[name].path
        if key != MODEL and path[0] != key:
            continue
        nested = path if key == MODEL else path[1:]
        if not nested:
            return value
        if _has_place(tree, nested):
            set_element(tree, nested, value)
    return tree


def _has_place(tree: Any, nested: Nested) -> bool:
    for part in nested:
        if isinstance(tree, Mapping):
            if part not in tree:
                return False
            tree = tree[part]
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return False
    return not isinstance(tree, torch.Tensor)
