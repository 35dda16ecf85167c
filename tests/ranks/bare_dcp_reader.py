"""Read checkpoints with torch alone, as a user without this project would.

python -P bare_dcp_reader.py <folder of a checkpoint>... > {folder: {flat name: value}} as JSON
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def read(folder: str) -> Any:
    """Everything in the checkpoint, by the way that torch describes."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "all.pt"
        dcp_to_torch_save(folder, file)
        return torch.load(file, weights_only=True)


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of each leaf; a tensor as its dtype and a list."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{prefix}{key}.")
    else:
        plain = (str(tree.dtype), tree.tolist()) if isinstance(tree, torch.Tensor) else tree
        yield prefix.removesuffix("."), plain


if __name__ == "__main__":
    found = {folder: dict(flat(read(folder))) for folder in sys.argv[1:]}
    assert not [name for name in sys.modules if name.startswith("torchtitan")]
    print(json.dumps(found))
