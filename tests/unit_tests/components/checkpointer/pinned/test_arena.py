"""Shared memory that grows, is seen by both sides, and is gone when nobody holds it."""

import errno
import gc
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torchtitan.components.checkpointer.pinned.arena import aligned, ALIGNMENT, Arena

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]


def num_mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:checkpoint-staging")


def other_side(arena: Arena) -> Arena:
    attached = Arena(os.dup(arena.fd))
    attached.attach(arena.size_bytes)
    return attached


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_one_side_copies_the_other_reads(dtype: torch.dtype) -> None:
    arena = Arena()
    arena.reserve(10_000)
    values = torch.arange(6).view(2, 3).to(dtype)
    arena.tensor(ALIGNMENT, (2, 3), dtype).copy_(values)
    arena.write(4096, b"plain")
    there = other_side(arena)
    seen = there.tensor(ALIGNMENT, (2, 3), dtype)
    assert torch.equal(seen.view(torch.uint8), values.view(torch.uint8))
    # torch saves the whole storage of a tensor.
    assert seen.untyped_storage().nbytes() == values.nbytes
    assert there.read(4096, 5) == b"plain"
    arena.close()
    there.close()


def test_it_grows_in_place_keeps_its_descriptor_and_the_other_side_follows() -> None:
    arena = Arena()
    arena.reserve(1000)
    arena.write(0, b"kept")
    there, descriptor, size = other_side(arena), arena.fd, arena.size_bytes
    arena.reserve(size)
    assert arena.size_bytes == size
    arena.reserve(size + 1)
    assert arena.fd == descriptor and arena.size_bytes > size
    arena.write(size, b"new")
    there.attach(arena.size_bytes)
    assert there.read(0, 4) == b"kept" and there.read(size, 3) == b"new"
    assert num_mappings() == 2
    arena.close()
    there.close()


def test_nothing_is_left_when_both_sides_have_closed() -> None:
    before, descriptors = num_mappings(), len(os.listdir("/proc/self/fd"))
    arena = Arena()
    arena.reserve(1000)
    tensor = arena.tensor(0, (3,), torch.float32).fill_(7.0)
    arena.close()
    arena.close()
    assert tensor.tolist() == [7.0] * 3  # closing never takes memory from under a tensor
    del tensor
    assert num_mappings() == before and len(os.listdir("/proc/self/fd")) == descriptors


def test_memory_that_is_not_to_be_had_leaves_the_arena_as_it_was() -> None:
    arena = Arena()
    arena.reserve(1000)
    size = arena.size_bytes
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch.object(os, "posix_fallocate", side_effect=full), pytest.raises(OSError):
        arena.reserve(10 * size)
    assert arena.size_bytes == size == os.fstat(arena.fd).st_size
    arena.tensor(size - 4, (1,), torch.float32).fill_(1.0)
    arena.close()


def test_the_pages_are_taken_when_they_are_reserved() -> None:
    arena = Arena()
    arena.reserve(3 << 20)
    assert os.fstat(arena.fd).st_blocks * 512 >= 3 << 20
    arena.close()


def test_tensors_without_elements_and_offsets() -> None:
    assert Arena().tensor(0, (0, 3), torch.float32).shape == (0, 3)
    assert [aligned(size) for size in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_a_kernel_that_does_not_know_the_flag_gets_the_call_without_it() -> None:
    create, flags = os.memfd_create, []

    def old_kernel(name: str, given: int) -> int:
        flags.append(given)
        if given & 8:
            raise OSError(errno.EINVAL, "Invalid argument")
        return create(name, given)

    with patch.object(os, "memfd_create", old_kernel):
        Arena().close()
    assert flags == [os.MFD_CLOEXEC | 8, os.MFD_CLOEXEC]
