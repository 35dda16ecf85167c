"""Refuse to write what no load would take back.

A load takes data and nothing that would run (screening.py). So what is to be saved is looked at before
its first byte is written, by the rank that writes it; the error reaches all ranks through DCP.

    DurableFileSystemWriter.write_data -> require_plain_items -> screening.require_plain
"""

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from torchtitan.components.checkpointer.screening import require_plain, require_plain_content

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def require_plain_items(plan: SavePlan, planner: SavePlanner) -> None:
    """Check what this rank is to write.

    Raises:
        ValueError: names every entry that a load would refuse.
    """
    refused: dict[str, ValueError] = {}
    for item in plan.items:
        try:
            _require_plain_item(item, planner)
        except ValueError as error:
            refused[item.index.fqn] = error
    if refused:
        first, *others = sorted(refused)
        likewise = f" The same holds for {', '.join(others)}." if others else ""
        raise ValueError(f"{refused[first]}{likewise}") from refused[first]


def _require_plain_item(item: WriteItem, planner: SavePlanner) -> None:
    key = item.index.fqn
    # The value is there already, and most need no look at what torch.save makes of them.
    is_at_hand = isinstance(planner, DefaultSavePlanner)
    found: Any = planner.lookup_object(item.index) if is_at_hand else planner.resolve_data(item)
    if item.type is not WriteItemType.BYTE_IO:
        if type(found) not in _PLAIN_TENSORS:
            require_plain(found.detach().cpu(), key)
    elif is_at_hand:
        require_plain(found, key)
    else:
        require_plain_content(found, key)
