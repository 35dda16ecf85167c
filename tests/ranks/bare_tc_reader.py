"""Read checkpoints with torch_checkpointing alone, as a user without this project would.

python -P bare_tc_reader.py <folder of a checkpoint>... > {folder: {flat name: value}} as JSON
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_serialization import TorchDistributedMetadataFormat
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

STORAGE = LocalFileSystemStorageConfig(use_direct_io=False)


def manager(*sharded: str) -> CheckpointManager:
    """One that reads ``sharded`` items from the files of all ranks, and others from that of rank 0."""
    spec = ItemSpec(requires_copy=False, resharder=DefaultResharder())
    writer = CheckpointWriterConfig(barrier_config=None, write_to_temp_dir=False)
    return CheckpointManager(
        CheckpointManager.Config(
            items=dict.fromkeys(sharded, spec),
            save=SyncCheckpointSaverConfig(writer_config=writer),
            storage_config=STORAGE,
        )
    )


def tensors(folder: str) -> dict[str, Any]:
    """All tensors, made whole, by item."""
    metadata = TorchDistributedMetadataFormat.maybe_load(Path(folder), STORAGE.create_storage())
    assert metadata is not None
    into: dict[str, Any] = {}
    for key, item in metadata.metadata.items():
        for path, groups in item.nested_path_to_metadata.items():
            sharding: Any = groups[0].sharding_metadata
            dtype = getattr(torch, sharding.dtype.removeprefix("torch."))
            *outer, name = (key, *path)
            place: Any = into
            for part in outer:
                place = place.setdefault(part, {})
            place[name] = torch.zeros(sharding.global_shape, dtype=dtype)
    manager(*into).load(folder, into=into, strict=True)
    return into


def values(folder: str) -> dict[str, Any]:
    """What is no tensor, by item."""
    keys = [file.stem.rpartition("_")[0] for file in Path(folder).glob("*_0.pt")]
    return dict(manager().load(folder, into=dict.fromkeys(keys)))


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of each leaf."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{prefix}{key}.")
    elif isinstance(tree, list) and any(isinstance(one, torch.Tensor) for one in tree):
        yield from flat(dict(enumerate(tree)), prefix)
    else:
        yield prefix.removesuffix("."), tree


def read(folder: str) -> dict[str, Any]:
    """Everything in the checkpoint; a tensor as its dtype and a list."""
    beside = {k: v for k, v in flat(values(folder)) if not isinstance(v, torch.Tensor)}
    return beside | {name: (str(t.dtype), t.tolist()) for name, t in flat(tensors(folder))}


if __name__ == "__main__":
    found = {folder: read(folder) for folder in sys.argv[1:]}
    assert not [name for name in sys.modules if name.startswith("torchtitan")]
    print(json.dumps(found))
