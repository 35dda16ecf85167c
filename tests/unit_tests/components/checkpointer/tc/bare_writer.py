"""Write a checkpoint with the library itself in a process that knows only what it is given.

python bare_writer.py <folder of the checkpoint> <context of the library as JSON> < (function, arguments) pickled
"""

import json
import logging
import pickle
import sys

import torch
from torch_checkpointing.checkpoint_base import CheckpointItem, CheckpointWriteInfo
from torch_checkpointing.checkpoint_writer import (
    CheckpointWriter,
    CheckpointWriterArgs,
    CheckpointWriterConfig,
)
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
from torch_checkpointing.types import RankInfo
from torchtitan.components.checkpointer.tc import events


def write(path: str) -> None:
    """Save two items at ``path``, and say what is to be shown and what is not."""
    args = CheckpointWriterArgs(
        config=CheckpointWriterConfig(barrier_config=None, write_to_temp_dir=False),
        rank_info=RankInfo(0, 1, 0, 1),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
    state = {"model": {"w": torch.ones(4)}, "train_state": {"step": 7}}
    DefaultResharder().extract_sharding_metadata("model", state["model"])  # warns
    items = {key: CheckpointItem(value=value) for key, value in state.items()}
    CheckpointWriter(args).write(path, CheckpointWriteInfo(items))
    logging.getLogger("torch_checkpointing.storage.filesystem").warning("the disk is slow")


if __name__ == "__main__":
    function, arguments = pickle.load(sys.stdin.buffer)
    function(*arguments)
    events.adopt(json.loads(sys.argv[2]))
    write(sys.argv[1])
