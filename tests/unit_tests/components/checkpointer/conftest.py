from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torchtitan.components.checkpointer.pinned import stager
from torchtitan.tools import filesystem

from tests.unit_tests.components.checkpointer.tc.stand_ins import Writers


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to see to the directory of the test, or to those above it."""
    monkeypatch.setattr(filesystem, "_durable", {str(tmp_path)})


@pytest.fixture
def writers() -> Iterator[Writers]:
    """What stands for the writer processes of torch_checkpointing, none of which is started."""
    stand_ins = Writers()
    with patch.object(stager, "WriterProcess", stand_ins.start):
        yield stand_ins
        stand_ins.let_go()
