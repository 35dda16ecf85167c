"""torch.distributed.checkpoint by itself, as its documentation shows it, on the same state.

Loading fills the live tensors in place; that is all of the state that has a size.
"""

from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from benchmarks.harness.models import Run

# What a machine without an accelerator allows: the copy runs in a thread, into shared memory.
_ON_CPU = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=True,
    use_async_staging=True,
    use_non_blocking_copy=False,
)


class DcpLibrary:
    """``dcp.save``, or ``dcp.async_save`` with a thread or with a process that writes."""

    def __init__(self, run: Run, folder: Path, how: str) -> None:
        """``how`` is save, thread or process."""
        self._run, self._folder, self._how = run, folder, how
        # Its collectives come from a thread: on the group of the training they would meet those.
        # A cast, because new_group answers with a number on ranks that are not members.
        made = None if how == "save" else dist.new_group(backend="gloo")
        self._group = cast("dist.ProcessGroup | None", made)
        self._stager = DefaultStager(_ON_CPU) if how == "process" else None
        self._staging: Future[Any] | None = None
        self._saving: Future[Any] | None = None

    def prepare(self) -> None:
        pass

    def save(self, step: int) -> None:
        self._run.progress.values["step"] = step
        state, path = self._state(), str(self.path_of(step))
        if self._how == "save":
            dcp.save(state, checkpoint_id=path)
        elif self._how == "thread":
            found = dcp.async_save(state, checkpoint_id=path, process_group=self._group)
            assert isinstance(found, Future)
            self._saving = found
        else:
            response = dcp.async_save(
                state,
                checkpoint_id=path,
                process_group=self._group,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self._stager,
            )
            assert isinstance(response, AsyncSaveResponse)
            self._staging, self._saving = response.staging_completion, response.upload_completion

    def wait_for_staging(self) -> None:
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def saving(self) -> "Future[Any] | None":
        return self._saving

    def wait_for_saving(self) -> None:
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def path_of(self, step: int) -> Path:
        return self._folder / f"step-{step}"

    def load(self, step: int) -> None:
        dcp.load(self._state(), checkpoint_id=str(self.path_of(step)))

    def close(self) -> None:
        self.wait_for_saving()
        if self._stager is not None:
            self._stager.close()
            # Ended by its destructor; else the first save of another side would find it running.
            _async_process_executor._CHECKPOINT_PROCESS = None
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def _state(self) -> dict[str, Any]:
        run = self._run
        return {
            **run.model.state_dict(),
            "optimizer": run.optimizers.state_dict(),
            "lr_scheduler": run.lr_schedulers.state_dict(),
            "dataloader": run.dataloader.state_dict(),
            "train_state": run.progress.state_dict(),
        }
