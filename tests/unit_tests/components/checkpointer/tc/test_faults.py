"""What is damage, and what is a disk that does not answer."""

import errno
import zipfile

import pytest
import torch
from torchtitan.components.checkpointer.errors import CheckpointDamagedError, CheckpointReadError
from torchtitan.components.checkpointer.tc.faults import fault

from tests.unit_tests.components.checkpointer.test_screening import full_host

PATH = "/run/step-7/model_0.pt"


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file"),
        NotADirectoryError(errno.ENOTDIR, "Not a directory"),
        IsADirectoryError(errno.EISDIR, "Is a directory"),
        OSError(errno.EINVAL, "Invalid argument"),
        OSError("Failed to seek to checkpoint offset 9"),
        EOFError("Expected 8 bytes"),
        zipfile.BadZipFile("File is not a zip file"),
        KeyError("layers.0.weight"),
        RuntimeError("PytorchStreamReader failed"),
    ],
    ids=repr,
)
def test_what_only_these_bytes_can_raise_is_damage(error: Exception) -> None:
    found = fault(error, PATH)
    assert isinstance(found, CheckpointDamagedError) and PATH in str(found)
    assert "Move the checkpoint away" in str(found)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ESTALE, "Stale file handle"),
        PermissionError(errno.EACCES, "Permission denied"),
        TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
        MemoryError(),
        full_host(),
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error"),
    ],
    ids=repr,
)
def test_what_the_machine_says_of_itself_is_none(error: Exception) -> None:
    found = fault(error, PATH)
    assert type(found) is CheckpointReadError and PATH in str(found)
    assert "says nothing about the checkpoint" in str(found)


def test_what_is_known_already_stays_as_it_is() -> None:
    for error in (CheckpointDamagedError("bytes 0..3"), CheckpointReadError("elsewhere")):
        assert fault(error, PATH) is error
