"""What of torch_checkpointing 0.1.1 is changed, each with its reason. By subclassing, never in place.

    Backend                   puts the parts below together, which the library's manager has no way to be told
      Metadata                see exchange.py
      PlainMetadata           metadata.pkl holds plain values; the library would run what it was made to hold
      WholeReader             without metadata.pkl the library reads this rank's own file, whatever the layout;
                              what has no metadata it reads as a pickle that may call anything
      CheckedStorage          the library takes what it reads for what was written, whatever has become of it
      Resharder               see resharder.py
      Saver, SharedMemory, Process   see background.py

``tests/unit_tests/components/checkpointer/tc/test_library_facts*.py`` pin what this relies on.
"""

from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch_checkpointing.checkpoint_base import CheckpointInfo
from torch_checkpointing.checkpoint_layout import TorchSerialization
from torch_checkpointing.checkpoint_loader import CheckpointLoader
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.checkpoint_reader import CheckpointReader
from torch_checkpointing.checkpoint_saver import SyncCheckpointSaver
from torch_checkpointing.checkpoint_writer import CheckpointWriterArgs
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.distributed_metadata import DistributedMetadata
from torch_checkpointing.metadata_serialization import TorchDistributedMetadataFormat
from torch_checkpointing.schema import _CheckpointSchema
from torch_checkpointing.storage.base_storage import Storage

from torchtitan.components.checkpointer.errors import CheckpointDamagedError
from torchtitan.components.checkpointer.integrity.manifest import Head
from torchtitan.components.checkpointer.integrity.verification import Verification
from torchtitan.components.checkpointer.pinned.stager import SharedMemoryStager
from torchtitan.components.checkpointer.screening import load_plain
from torchtitan.components.checkpointer.tc.background import Process, Saver, SharedMemory
from torchtitan.components.checkpointer.tc.checked_storage import CheckedStorage
from torchtitan.components.checkpointer.tc.commit import GroupCommit
from torchtitan.components.checkpointer.tc.exchange import Metadata
from torchtitan.components.checkpointer.tc.faults import checks_all, fault
from torchtitan.components.checkpointer.tc.index import MARKER
from torchtitan.components.checkpointer.tc.leaves import Nested
from torchtitan.components.checkpointer.tc.metadata_file import parse_metadata
from torchtitan.components.checkpointer.tc.ranks import rank_info_of_this_process
from torchtitan.components.checkpointer.tc.storage import DurableStorageConfig
from torchtitan.components.checkpointer.tc.writer import anybody, require_checkpoint, Writer
from torchtitan.components.checkpointer.waiting import note_given_up, WaitExpiredError


@dataclass(kw_only=True, slots=True)
class BackendConfig(CheckpointManager.Config):
    """The library's config and what our parts need on this rank."""

    group: "dist.ProcessGroup | None" = None
    """Where the ranks exchange what they know about a save; never training's."""

    stager: SharedMemoryStager | None = None
    """Stages and writes in the background; unused by a synchronous saver."""

    metadata: Metadata | None = None
    """What another backend of the run has agreed on with the other ranks, to be gone on with."""

    def build(self) -> "Backend":
        """The manager of the library, made of our parts."""
        return Backend(self)


def on_this_rank(
    config: CheckpointManager.Config,
    *,
    group: "dist.ProcessGroup | None",
    stager: SharedMemoryStager | None,
    metadata: Metadata | None = None,
) -> BackendConfig:
    """``config`` as it is built here."""
    given = {each.name: getattr(config, each.name) for each in fields(CheckpointManager.Config)}
    return BackendConfig(**given, group=group, stager=stager, metadata=metadata)


class Backend(CheckpointManager):
    """The library's manager with other parts; what it does with them stays as it is."""

    def __init__(self, config: BackendConfig) -> None:
        self.head: Head | None = None
        """What the next save is; None saves without a manifest."""
        self.may_publish: Callable[[], None] = anybody
        """Raises what forbids that the next save is published, or taken back; for one that training waits for."""
        # Not the library's own construction: it knows one metadata manager, and starts its process.
        self._config = config
        self._schema = _CheckpointSchema(items=config.items, default=config.default)
        self._prewarm_staging_future: Future[Any] | None = None
        self._staging_future: Future[Any] | None = None
        self._write_future: Future[Any] | None = None
        self._closed = False
        self._storage_config = config.storage_config or DurableStorageConfig()
        rank_info = rank_info_of_this_process()
        self._rank = rank_info.global_rank
        self.metadata = config.metadata or Metadata(rank_info, config.group)
        self._metadata_manager = self.metadata
        args = CheckpointWriterArgs(
            config=config.save.writer_config,
            rank_info=rank_info,
            storage_config=self._storage_config,
            pre_finalize_callback=config.pre_finalize_callback,
            finalize_callback=config.finalize_callback,
        )
        self._stager = config.stager
        if isinstance(config.save, AsyncCheckpointSaverConfig):
            assert config.stager is not None
            init_fn = config.subprocess_init_fn
            init = None if init_fn is None else (init_fn, config.subprocess_init_args)
            self._saver = Saver(
                SharedMemory(config.stager),
                Process(args, init, self._require_written, lambda: self.head),
                self.metadata,
                config.save.wait_timeout_secs or 600.0,
            )
        else:
            writer = Writer(
                args,
                lambda: GroupCommit(rank_info, config.group),
                lambda: self.may_publish(),
                lambda: self.head,
            )
            self._saver = SyncCheckpointSaver(writer, self.metadata)
        self._checked = CheckedStorage(self._storage_config.create_storage())
        self._reader = WholeReader(rank_info, self._storage_config, storage=self._checked)
        self._loader = CheckpointLoader(self._reader, self.metadata)

    def _require_written(self, path: str) -> None:
        if self._rank == 0:
            # Else a storage in memory would be that of the writer process, and all of it lost.
            require_checkpoint(self._storage_config.create_storage(), path)

    def look(
        self, payload: Mapping[str, Any], tensors: Mapping[Nested, torch.Tensor] | None = None
    ) -> bool:
        """Look at the tensors to be saved; whether all of them are as they were. Raises ValueError."""
        items = self._schema.build_items(payload, rank=self._rank)
        return self.metadata.look(CheckpointInfo(checkpoint_items=items), tensors)

    def check_with(self, verification: Verification | None) -> None:
        """Check what the following loads read of the checkpoint that ``verification`` is of."""
        self._checked.verification = verification

    def prewarm_staging(self, checkpoint: Mapping[str, Any]) -> None:
        """Take memory for ``checkpoint``, and start the writer process, while nothing is saved."""
        if isinstance(self._saver, Saver) and self._stager is not None:
            self._stager.prewarm(checkpoint)

    @contextmanager
    def lock(self) -> Generator[None]:
        """As the library's, which takes a copy that is not done in time for a deadlock, and says so.

        Raises:
            WaitExpiredError: something is still copied after the limit.
        """
        if not isinstance(self._saver, Saver):
            yield
            return
        seconds, readers = self._config.save.wait_timeout_secs, self._saver.staging_lock.read
        if not readers.acquire(timeout=-1 if seconds is None else seconds):
            note_given_up()
            raise WaitExpiredError(f"not copied after {seconds:g} s")
        try:
            yield
        finally:
            readers.release()

    def forget_failure(self) -> None:
        """Go on after a failed save that was told of; the library would raise it again for ever."""
        self._staging_future = self._write_future = None
        if isinstance(self._saver, Saver):
            self._saver.forget_failure()

    def close(self) -> None:
        """Free everything. Whoever wants to know how the last save went has waited for it."""
        if not self._closed:
            self._closed = True
            self._saver.close()
            self._loader.close()
            self.metadata.close()


class PlainMetadata(TorchDistributedMetadataFormat):
    """The library's metadata.pkl, read as values and nothing else."""

    @classmethod
    def maybe_load(cls, checkpoint_dir: Path, storage: Storage) -> DistributedMetadata | None:
        """Its contents, or None where there is none. Raises CheckpointDamagedError if it is damaged."""
        path = checkpoint_dir / MARKER
        if not storage.exists(path):
            return None
        content = parse_metadata(str(checkpoint_dir), storage.read(path))
        try:
            return DistributedMetadata.from_dict(content)
        except Exception as error:
            if checks_all(storage):
                raise fault(error, str(path), storage) from error  # another version of the library
            # Plain values that do not fit together raise whatever they happen to lack.
            raise CheckpointDamagedError(
                f"The index {path} is not one that torch_checkpointing writes: {error!r}; if it is damaged, "
                "move it away."
            ) from error


class WholeReader(CheckpointReader):
    """Insists on metadata, and on files that are data."""

    _METADATA_FORMATS = (PlainMetadata,)
    _REQUIRE_METADATA = True

    def _load_full_file(
        self, file_path: Path, layout_info: Any, *, map_location: Any = None
    ) -> Any:
        if not isinstance(layout_info.serialization_format, TorchSerialization):
            return super()._load_full_file(file_path, layout_info, map_location=map_location)
        content = self._storage.read(file_path)
        is_checked = checks_all(self._storage)
        return load_plain(content, str(file_path), map_location, is_checked=is_checked)
