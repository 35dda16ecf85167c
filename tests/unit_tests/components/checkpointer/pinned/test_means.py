"""What the machine can do is asked before the first step and said in one line."""

import errno
import os
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint import _async_process_executor as torch_executor
from torch.distributed.checkpoint.staging import StagingOptions
from torchtitan.components.checkpointer.pinned import means


def test_without_an_accelerator_nothing_is_pinned_and_the_line_says_so() -> None:
    found = means.find_means(StagingOptions())
    assert found == means.Means(device=None, pins=False)
    with patch.object(means, "logger") as logger:
        means.announce()
    (line,) = logger.info.call_args.args
    assert "shared memory, not pinned because this machine trains without an accelerator" in line


@pytest.mark.parametrize("type,pins", [("cuda", True), ("xpu", False)])
def test_an_accelerator_copies_on_a_stream_and_pins_where_that_is_possible(
    type: str, pins: bool
) -> None:
    with (
        patch.object(torch.accelerator, "current_accelerator", return_value=torch.device(type)),
        patch.object(torch.accelerator, "current_device_index", return_value=3),
        patch.object(torch.cuda, "is_available", return_value=type == "cuda"),
    ):
        found = means.find_means(StagingOptions())
    assert found == means.Means(device=torch.device(type, 3), pins=pins)
    assert ("pinned shared memory" in found.in_words) == pins and f"{type}:3" in found.in_words


def test_a_system_without_shared_memory_is_refused_at_the_start() -> None:
    missing = OSError(errno.ENOSYS, "Function not implemented")
    with patch.object(os, "memfd_create", side_effect=missing):
        with pytest.raises(ValueError, match="Function not implemented.*async_mode async"):
            means.announce()


def test_a_system_that_is_no_linux_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memfd_create", "MFD_CLOEXEC"):
        monkeypatch.delattr(os, name)
    refusal = means.refusal()
    assert refusal is not None and "no memory that two processes can share" in refusal
    assert "async_mode async" in refusal


def test_a_torch_that_keeps_its_writer_process_elsewhere_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch_executor, "_CHECKPOINT_PROCESS")
    with pytest.raises(ValueError, match="starts writer processes in another way"):
        means.announce()
