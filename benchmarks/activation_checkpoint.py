"""Count what each choice of activation checkpointing keeps for backward, and what it computes.

    python -m benchmarks.activation_checkpoint

Counts, not times, so they are the same on every machine: one microbatch of ``llama3_jargon`` in one
process on the CPU, in float32. ``kept`` is the memory that forward made and that is alive when it has
ended, without the logits; ``GFLOP`` are the matrix multiplications of forward and backward, those
inside of attention not among them.
"""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torchtitan import assembly
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    SelectiveAC,
)
from torchtitan.models.llama3.config_registry import llama3_jargon
from torchtitan.protocols import BaseModel

NUM_TOKENS, ROW_TOKENS = 1024, 256
CHOICES: dict[str, ActivationCheckpointing.Config | None] = {
    "none": None,
    "selective": SelectiveAC.Config(),
    "full": FullAC.Config(),
}


class MadeStorages(TorchDispatchMode):
    """Remembers the memory that operations make, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive_bytes(self, *, without: set[int]) -> int:
        """Bytes that still exist, apart from the storages whose addresses are in ``without``."""
        return sum(
            size
            for address, (reference, size) in self._made.items()
            if address not in without and not reference.expired()
        )


def build(choice: ActivationCheckpointing.Config | None) -> BaseModel:
    """The model with its first weights, its blocks wrapped as ``choice`` says."""
    config = assembly.fitted(llama3_jargon())
    model = assembly.build_model(config)
    if choice is not None:
        choice.build(dump_folder="").apply(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    return model


def measure(choice: ActivationCheckpointing.Config | None) -> tuple[float, float]:
    """MiB kept for backward, and GFLOP of forward and backward."""
    model: Any = build(choice)
    tokens = torch.arange(NUM_TOKENS) % 2048
    positions = torch.arange(NUM_TOKENS) % ROW_TOKENS
    masks = model.get_attention_masks(positions)
    given = {
        tensor.untyped_storage()._cdata
        for tensor in (
            *model.parameters(),
            *model.buffers(),
            *tree_leaves(masks),
            tokens,
            positions,
        )
        if isinstance(tensor, torch.Tensor)
    }
    model._skip_lm_head = True
    with MadeStorages() as made:
        hidden = model(tokens, positions, masks)
        kept_bytes = made.alive_bytes(without=given)
    del hidden
    model._skip_lm_head = False
    with FlopCounterMode(display=False) as counter:
        model(tokens, positions, masks).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    flops = sum(count for name, count in counts.items() if "attention" not in str(name))
    return kept_bytes / 2**20, flops / 1e9


def main() -> None:
    """Print one line for each choice."""
    print(f"llama3_jargon, {NUM_TOKENS} tokens, float32")
    for name, choice in CHOICES.items():
        kept, gflop = measure(choice)
        print(f"{name:<10} kept {kept:6.1f} MiB   {gflop:5.1f} GFLOP", flush=True)


if __name__ == "__main__":
    main()
