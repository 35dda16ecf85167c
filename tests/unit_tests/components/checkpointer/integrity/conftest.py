from collections.abc import Generator

import pytest

from tests.unit_tests.components.checkpointer.integrity import small_blocks


@pytest.fixture(scope="module", name="small_blocks")
def _small_blocks() -> Generator[None]:
    with small_blocks.small_blocks():
        yield
