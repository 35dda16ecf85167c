from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torchtitan.components.checkpointer.pinned import stager

from tests.unit_tests.components.checkpointer.tc.stand_ins import Writers


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def writers() -> Iterator[Writers]:
    """What stands for the writer processes of torch_checkpointing, none of which is started."""
    stand_ins = Writers()
    with patch.object(stager, "WriterProcess", stand_ins.start):
        yield stand_ins
        stand_ins.let_go()
