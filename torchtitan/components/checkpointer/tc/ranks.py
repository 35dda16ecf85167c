"""Which rank this process is, in the words of torch_checkpointing."""

import torch.distributed as dist
from torch_checkpointing.types import RankInfo


def rank_info_of_this_process() -> RankInfo:
    """This rank among those of the default process group."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return RankInfo(
        global_rank=rank, global_world_size=world_size, role_rank=rank, role_world_size=world_size
    )
