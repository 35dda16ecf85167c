"""Write one rank's files of a checkpoint, and let it count only when all ranks have written.

    CheckpointWriter (the library's): files and metadata.pkl -> tmp_step-N -> barrier -> rename
    Writer: its barrier is a stop of commit.py, and what fails anywhere is told to the other ranks

It runs in the writer process (writer_main.py) and, for saves that training waits for, in the trainer.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_checkpointing.checkpoint_base import CheckpointWriteInfo
from torch_checkpointing.checkpoint_layout import LayoutInfo
from torch_checkpointing.checkpoint_writer import CheckpointWriter, CheckpointWriterArgs
from torch_checkpointing.storage.base_storage import Storage

from torchtitan.components.checkpointer.tc.commit import Commit, CommitBarrier, CommitBarrierConfig
from torchtitan.components.checkpointer.tc.compact import compact


def _anybody() -> None:
    """The check of a writer that nobody can outlive."""


def require_checkpoint(storage: Storage, path: str) -> None:
    """Check that ``storage`` has what was written at ``path``.

    Raises:
        FileNotFoundError: it has not.
    """
    if not storage.exists(Path(path)):
        raise FileNotFoundError(
            f"{path} was written and is not there; the storage must be one that this process and the one "
            "that writes see alike, and nobody else may delete from it"
        )


class Writer(CheckpointWriter):
    """Writes saves one after the other, each of them with a commit of its own."""

    def __init__(
        self,
        args: CheckpointWriterArgs,
        new_commit: Callable[[], Commit],
        may_publish: Callable[[], None] = _anybody,
    ) -> None:
        """``may_publish`` is called before the final name; what it raises prevents that."""
        is_committed = args.config.barrier_config is not None
        barrier = CommitBarrierConfig() if is_committed else None
        super().__init__(replace(args, config=replace(args.config, barrier_config=barrier)))
        self._new_commit = new_commit
        self._may_publish = may_publish

    def write(self, path: str, checkpoint_info: CheckpointWriteInfo) -> None:
        """Write the checkpoint at ``path``; returns when it is durable on all ranks.

        Raises:
            OtherRankFailedError: another rank failed.
        """
        barrier = self._barrier
        if not isinstance(barrier, CommitBarrier):
            super().write(path, checkpoint_info)
            return
        barrier.commit = commit = self._new_commit()
        barrier.may_publish = self._may_publish
        try:
            super().write(path, checkpoint_info)
            if self._args.rank_info.role_rank == 0:
                # Of files that were taken away meanwhile the library renames none, and says nothing.
                require_checkpoint(self._storage, path)
        except BaseException as error:
            commit.fail(error)
            raise
        commit.publish()

    def _write_key(
        self, key: str, layout_info: LayoutInfo, full_path: Path, data_to_serialize: Any
    ) -> None:
        # Not earlier: what fails here is told to the other ranks, and one file needs least memory.
        super()._write_key(key, layout_info, full_path, compact(data_to_serialize))
