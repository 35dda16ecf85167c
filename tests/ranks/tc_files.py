"""What the files of a checkpoint in the format of torch_checkpointing hold, rank by rank."""

import logging
import re
from collections import Counter
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.tc.leaves import leaves, name_of

_FILE = re.compile(r"([A-Za-z0-9_-]+)_([0-9]+)\.pt")


def shares_of(step: Path) -> tuple[Counter[str], Counter[int]]:
    """(how many elements of each tensor the files hold together, how many bytes each rank has written)."""
    # Meshes in a file come without process groups, which torch says of each.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    num_elements: Counter[str] = Counter()
    sizes: Counter[int] = Counter()
    for file in sorted(step.glob("*.pt")):
        found = _FILE.fullmatch(file.name)
        assert found is not None, file
        sizes[int(found[2])] += file.stat().st_size
        tree = torch.load(file, map_location="meta", weights_only=False)
        for nested, leaf in leaves(tree):
            if isinstance(leaf, torch.Tensor):
                local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
                num_elements[name_of(found[1], nested)] += local.numel()
    return num_elements, sizes


def unevenness(sizes: Counter[int]) -> float:
    """The bytes of the fullest rank over the mean."""
    return max(sizes.values()) * len(sizes) / sum(sizes.values())
