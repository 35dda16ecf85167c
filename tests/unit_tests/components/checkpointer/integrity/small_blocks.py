"""Blocks of a few bytes, so that a short file has many of them."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest
from torchtitan.components.checkpointer.integrity import digests

BLOCK = 64


@contextmanager
def small_blocks() -> Generator[None]:
    """Digests inside of it are of blocks of ``BLOCK`` bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "BLOCK_BYTES", BLOCK)
        patch.setattr(digests, "_FEW_BYTES", 10)
        yield
