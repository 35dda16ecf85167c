"""What we rely on inside of torch: a save goes to the object that stands in one module global."""

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import _async_process_executor as torch_executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torchtitan.components.checkpointer.dcp_writer import DurableFileSystemWriter
from torchtitan.components.checkpointer.pinned import torch_seam

pytestmark = pytest.mark.usefixtures("one_rank")


class Delivered:
    """Takes the place of a staged state dict and of its stager."""

    def __init__(self, error: Exception | None = None) -> None:
        self.future: Future[Any] = Future()
        self.writers: list[Any] = []
        self.threads: list[threading.Thread] = []
        self.error = error

    def stage(self, state_dict: dict[str, Any]) -> "Future[Any]":
        self.state_dict = state_dict
        return self.future

    def deliver(self, job: Any, path: str) -> None:
        self.writers.append((job, path))
        self.threads.append(threading.current_thread())
        if self.error is not None:
            raise self.error


def save(stager: Any, path: Path) -> AsyncSaveResponse:
    response = torch_dcp.async_save(
        {"w": torch.ones(1)},
        storage_writer=DurableFileSystemWriter(str(path)),
        checkpoint_id=str(path),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        async_stager=stager,
    )
    assert isinstance(response, AsyncSaveResponse)
    return response


def test_a_save_is_delivered_once_in_a_thread_of_its_own_after_staging(tmp_path: Path) -> None:
    torch_seam.open_route()
    stager = Delivered()
    response = save(stager, tmp_path)
    assert not response.staging_completion.done() and stager.writers == []
    stager.future.set_result(stager)
    response.staging_completion.result(30)
    response.upload_completion.result(30)
    ((writer, path),), (thread,) = stager.writers, stager.threads
    assert str(writer.path) == path == str(tmp_path) and thread is not threading.main_thread()
    torch_seam.close_route()


def test_what_a_delivery_raises_is_the_error_of_the_save(tmp_path: Path) -> None:
    torch_seam.open_route()
    stager = Delivered(OSError(28, "No space left on device"))
    stager.future.set_result(stager)
    with pytest.raises(OSError, match="No space left"):
        save(stager, tmp_path).upload_completion.result(30)
    torch_seam.close_route()


def test_several_managers_share_the_route_and_the_last_one_puts_back_what_was_there() -> None:
    class TorchsOwn:
        def save(self, staged_state_dict: Any, **others: Any) -> Any:
            return staged_state_dict, others

    own: Any = TorchsOwn()
    torch_executor._CHECKPOINT_PROCESS = own
    try:
        torch_seam.open_route()
        torch_seam.open_route()
        router: Any = torch_executor._CHECKPOINT_PROCESS
        assert router is not own
        assert router.save({"a": 1}, storage_writer=None, no_dist=True) == (
            {"a": 1},
            {"storage_writer": None, "no_dist": True},
        )
        torch_seam.close_route()
        assert torch_executor._CHECKPOINT_PROCESS is router
        torch_seam.close_route()
        assert torch_executor._CHECKPOINT_PROCESS is own
    finally:
        torch_executor._CHECKPOINT_PROCESS = None


def test_a_save_of_somebody_else_in_between_is_told_what_is_wrong(tmp_path: Path) -> None:
    torch_seam.open_route()
    router: Any = torch_executor._CHECKPOINT_PROCESS
    with pytest.raises(RuntimeError, match="close that run first"):
        router.save({"a": 1})
    torch_seam.close_route()
