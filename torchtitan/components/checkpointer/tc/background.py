"""Saving beside training: the library's asynchronous saver, on our staging and our writer process.

The parts of library.py that are at work then, and why they replace those of the library:

    Saver          the library sends the metadata once, and raises an old failure at every later save
    SharedMemory   its staging takes a descriptor per tensor, and copies host state later, by reference
    Process        its writer process runs the main module again, gives up after 30 s of start-up and ends
                   with the first error

Their events are those of the parts that they replace, so that a trace of the library's looks the same.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch_checkpointing.checkpoint_base import CheckpointBase, CheckpointWriteInfo
from torch_checkpointing.checkpoint_process import CheckpointProcess
from torch_checkpointing.checkpoint_saver import AsyncCheckpointSaver
from torch_checkpointing.checkpoint_writer import CheckpointWriterArgs
from torch_checkpointing.logging_utils import checkpoint_logging_context, EventLogger, EventType
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.staging import CheckpointStager
from torch_checkpointing.utils import ensure_future, fut_then

from torchtitan.components.checkpointer.integrity.manifest import Head
from torchtitan.components.checkpointer.pinned.stager import SharedMemoryStager, Staged
from torchtitan.components.checkpointer.tc.events import BACKEND_LOGGER_NAME
from torchtitan.components.checkpointer.tc.writer_main import Job

_logger = logging.getLogger(BACKEND_LOGGER_NAME)
_METRIC = "train.checkpoint_write.{what}.latency_ms"


class Saver(AsyncCheckpointSaver):
    """Hands the metadata over with every save."""

    def __init__(
        self,
        stager: CheckpointStager,
        process: CheckpointProcess,
        metadata: DefaultMetadataManager,
        limit_seconds: float,
    ) -> None:
        super().__init__(stager, process, metadata, limit_seconds)
        self._metadata = metadata

    def _prepare_checkpoint_write_info(
        self, checkpoint: CheckpointBase, validate: bool = False
    ) -> CheckpointWriteInfo:
        # As if it were to be validated: computed for each save, not for the first alone.
        return super()._prepare_checkpoint_write_info(checkpoint, validate=True)

    def _get_serialized_metadata_if_needed(self) -> bytes | None:
        return self._metadata.get_serialized_metadata()

    def forget_failure(self) -> None:
        """Let the next save begin without the end of the previous one."""
        self._write_future = None


class SharedMemory(CheckpointStager):
    """Our stager as the library sees it: every item of the result is the whole of what is staged."""

    def __init__(self, stager: SharedMemoryStager) -> None:
        self._stager = stager

    def stage(  # pyrefly: ignore[bad-override]  (what the library does with it is look up its keys)
        self, state_dict: Mapping[str, Any], keys_not_requiring_copy: Sequence[str] = ()
    ) -> "Future[dict[str, Staged]]":
        """Begin to copy what was prepared; everything is copied, whatever the library asks for."""
        tell, step = EventLogger(), checkpoint_logging_context.get("step")
        _logger.info("Staging", extra=tell(EventType.CHECKPOINT_STAGING_START, step=step))
        keys = list(state_dict)

        def under_each_key(staged: Staged) -> dict[str, Staged]:
            # In the thread that copies, which has not the context of the save.
            done = tell(
                EventType.CHECKPOINT_STAGING_END,
                step=step,
                metric_name=_METRIC.format(what="staging.e2e"),
                end_to_end=True,
            )
            _logger.info("Staged", extra=done)
            return dict.fromkeys(keys, staged)

        return fut_then(self._stager.stage(state_dict), under_each_key)

    def get_staged_state_dict(self) -> object | None:
        """Nothing that could be looked at here."""
        return None

    def close(self) -> None:
        """The stager belongs to the manager, which closes it."""


class Process(CheckpointProcess):
    """Our writer process as the library sees it."""

    def __init__(
        self,
        args: CheckpointWriterArgs,
        init: tuple[Callable[..., None], tuple[Any, ...]] | None,
        require_written: Callable[[str], None] = lambda path: None,
        find_head: Callable[[], Head | None] = lambda: None,
    ) -> None:
        """
        Args:
            require_written: raises if the checkpoint at a path cannot be seen from here.
            find_head: says what is saved, when a save begins.
        """
        # Not the library's own construction, which starts a process.
        self._args = args
        self._init = init
        self._require_written = require_written
        self._find_head = find_head
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writing")

    def write(
        self, checkpoint_info: "CheckpointWriteInfo | Future[CheckpointWriteInfo]", path: str
    ) -> "Future[None]":
        """Write what is staged, in the background."""
        context, head = checkpoint_logging_context.export_context(), self._find_head()
        info = ensure_future(checkpoint_info)
        return self._executor.submit(self._deliver, info, path, context, head)

    def _deliver(
        self,
        checkpoint_info: "Future[CheckpointWriteInfo]",
        path: str,
        context: dict[str, Any],
        head: Head | None,
    ) -> None:
        tell, step = EventLogger(), context.get("step")
        info = checkpoint_info.result()
        staged = next(iter(info.state_dict.values()))
        job = Job(
            args=self._args,
            layouts=info.layout_info_mappings,
            metadata=info.serialized_distributed_metadata,
            head=head,
            log_context=context,
            init=self._init,
        )
        _logger.info("Writing", extra=tell(EventType.CHECKPOINT_THREAD_START, step=step))
        staged.deliver(job, path)
        self._require_written(path)
        done = tell(
            EventType.CHECKPOINT_THREAD_END,
            step=step,
            metric_name=_METRIC.format(what="execute.subprocess_comm.e2e"),
            end_to_end=True,
        )
        _logger.info("Written", extra=done)

    def close(self) -> None:
        """End the thread as soon as it is free; its process belongs to the stager."""
        self._executor.shutdown(wait=False)
