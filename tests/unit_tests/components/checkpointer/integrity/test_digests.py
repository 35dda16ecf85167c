"""The digest of a file is the same however its bytes arrive, and other tools know it."""

import array
import itertools
import pickle
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torchtitan.components.checkpointer.integrity.digests import digest_of, FileDigest, Hasher
from xxhash import xxh3_64_hexdigest

from tests.unit_tests.components.checkpointer.integrity.small_blocks import BLOCK

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize(
    ("content", "digits"),
    [(b"", "2d06800538d394c2"), (b"a", "e6c632b61e964e1f"), (b"abc", "78af5f94892f3950")],
)
def test_a_file_has_the_digest_that_xxhsum_prints(content: bytes, digits: str) -> None:
    assert digest_of(content) == FileDigest(len(content), digits, "")


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 7])
def test_each_block_has_a_digest_of_its_own(size: int) -> None:
    content = bytes(index % 251 for index in range(size))
    digest = digest_of(content)
    parts = [content[start : start + BLOCK] for start in range(0, size, BLOCK)]
    assert digest.num_blocks == len(parts)
    assert [digest.block_digest(index) for index in range(len(parts))] == [
        xxh3_64_hexdigest(part) for part in parts
    ]
    ranges = [digest.block_range(index) for index in range(len(parts))]
    assert [content[start:end] for start, end in ranges] == parts
    assert (digest.blocks == "") == (size <= BLOCK)
    assert digest.xxh3_64 == xxh3_64_hexdigest(content)


@given(content=st.binary(max_size=6 * BLOCK), cuts=st.lists(st.integers(0, 6 * BLOCK)))
def test_it_does_not_matter_how_the_bytes_arrive(content: bytes, cuts: list[int]) -> None:
    hasher = Hasher()
    edges = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    for start, end in itertools.pairwise(edges):
        hasher.update(content[start:end])
        assert hasher.digest() == digest_of(content[:end])


def test_anything_contiguous_is_hashed_as_the_bytes_it_is() -> None:
    numbers: Any = array.array("d", [1.0, 2.0, 3.0])
    grid = memoryview(bytes(range(24))).cast("B", (2, 3, 4))
    rows: Any = torch.arange(12.0).view(3, 4).numpy()
    empty: Any = torch.empty(3, 0).numpy()
    turned: Any = torch.arange(12).view(3, 4).t().numpy()
    for buffer in (numbers, grid, rows, bytearray(b"xyz")):
        assert digest_of(buffer) == digest_of(memoryview(buffer).tobytes())
    assert digest_of(empty) == digest_of(b"")
    with pytest.raises((TypeError, BufferError), match="contiguous"):
        digest_of(turned)


def test_large_pieces_are_not_copied() -> None:
    content = memoryview(bytearray(2**20))
    hasher = Hasher(2**18)
    tracemalloc.start()
    hasher.update(content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert hasher.digest() == digest_of(bytes(content), 2**18)
    assert peak < 10_000


def test_a_digest_travels_between_processes() -> None:
    digest = digest_of(bytes(3 * BLOCK))
    assert pickle.loads(pickle.dumps(digest)) == digest
    assert hash(digest) == hash(pickle.loads(pickle.dumps(digest)))


@pytest.mark.parametrize(
    ("size", "whole", "blocks"),
    [
        (-1, "0" * 16, ""),
        (1, "0" * 15, ""),
        (1, "0" * 16, "0" * 16),
        (BLOCK + 1, "0" * 16, ""),
        (BLOCK + 1, "0" * 16, "0" * 31),
    ],
)
def test_what_cannot_be_a_digest_is_none(size: int, whole: str, blocks: str) -> None:
    with pytest.raises(ValueError, match="not a digest"):
        FileDigest(size, whole, blocks)
