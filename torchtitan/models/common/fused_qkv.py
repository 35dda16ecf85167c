"""One matrix for queries, keys and values, with checkpoints that never see it.

The rows of ``wqkv`` go by key-value head: for each head g the query heads that share it, then key head
g, then value head g, so that a cut by rows between heads keeps together what belongs together.
Checkpoints hold three plain matrices instead, whatever the model fuses and however it is sharded:

    state_dict       wqkv -> (gathered, if sharded) -> split -> wq, wk, wv
    load_state_dict  wq, wk, wv -> fuse -> (this rank's share, if sharded) -> wqkv
    init_states      draw wq, then wk, then wv -> fuse

Under FSDP both directions gather the matrix, so every rank must take part, in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate

from torchtitan.config.violations import reject
from torchtitan.models.common.layers import Linear
from torchtitan.protocols import Module

SPLIT_NAMES = ("wq", "wk", "wv")


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How the rows of the fused matrix, or of its bias, are laid out."""

    n_heads: int
    n_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads for each key-value head."""
        return self.n_heads // self.n_kv_heads

    @property
    def rows(self) -> tuple[int, int, int]:
        """Rows of wq, wk and wv."""
        kv_rows = self.n_kv_heads * self.head_dim
        return self.n_heads * self.head_dim, kv_rows, kv_rows

    def split(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows of wq, wk and wv, heads in order."""
        by_head = fused.unflatten(0, (self.n_kv_heads, self.group + 2, self.head_dim))
        q, k, v = by_head.split((self.group, 1, 1), dim=1)
        return q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)

    def fuse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The inverse of ``split``."""
        parts = [
            part.unflatten(0, (self.n_kv_heads, heads, self.head_dim))
            for part, heads in ((q, self.group), (k, 1), (v, 1))
        ]
        return torch.cat(parts, dim=1).flatten(0, 2)


class FusedQKVLinear(Module):
    """Queries, keys and values from one matrix multiplication."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        head_dim: int
        """Elements of one head."""

        n_heads: int
        """Query heads; a multiple of n_kv_heads."""

        n_kv_heads: int
        """Key heads, and value heads."""

        wqkv: Linear.Config
        """The fused matrix. Its param_init is that of one projection: it is run on each of the three."""

        def __post_init__(self) -> None:
            if self.n_heads % self.n_kv_heads:
                reject(
                    f"fused QKV needs n_heads to be a multiple of n_kv_heads, got {self.n_heads} and "
                    f"{self.n_kv_heads}. Change one, or use the unfused projections."
                )

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layout = HeadLayout(config.n_heads, config.n_kv_heads, config.head_dim)
        init = config.wqkv.param_init
        if init is not None:
            init = {name: _init_each(self.layout, fn) for name, fn in init.items()}
        self.wqkv = replace(config.wqkv, param_init=init).build()
        self.register_state_dict_post_hook(_split_saved)
        self.register_load_state_dict_pre_hook(_fuse_loaded)

    def forward(self, x_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Contiguous queries (T, n_heads, head_dim), keys and values (T, n_kv_heads, head_dim).

        Under tensor parallelism these are the heads of this rank.
        """
        layout = self.layout
        fused = self.wqkv(x_TC).unflatten(1, (-1, layout.group + 2, layout.head_dim))
        q, k, v = fused.split((layout.group, 1, 1), dim=2)
        return q.flatten(1, 2).contiguous(), k.squeeze(2).contiguous(), v.squeeze(2).contiguous()


def _init_each(
    layout: HeadLayout, init: Callable[[torch.Tensor], Any]
) -> Callable[[torch.Tensor], None]:
    """Draw as three unfused projections would, so that fusing does not change the weights."""

    def init_fused(fused: torch.Tensor) -> None:
        parts = [fused.new_empty(rows, *fused.shape[1:]) for rows in layout.rows]
        for part in parts:
            init(part)
        fused.copy_(layout.fuse(*parts))

    return init_fused


def _split_saved(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Post-hook of ``state_dict``: put wq, wk and wv where wqkv was."""
    assert isinstance(module, FusedQKVLinear)
    layout = module.layout
    for name, _ in module.wqkv.named_parameters():
        fused = state_dict.pop(f"{prefix}wqkv.{name}", None)
        if fused is None:
            continue
        parts = layout.split(_gathered(fused))
        for split_name, part in zip(SPLIT_NAMES, parts, strict=True):
            if isinstance(fused, DTensor):
                part = _replicated_like(part, fused)
            state_dict[f"{prefix}{split_name}.{name}"] = part


def _fuse_loaded(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Pre-hook of ``load_state_dict``: put wqkv where wq, wk and wv are, if all three are."""
    assert isinstance(module, FusedQKVLinear)
    layout = module.layout
    for name, param in module.wqkv.named_parameters():
        keys = [f"{prefix}{split_name}.{name}" for split_name in SPLIT_NAMES]
        if not all(key in state_dict for key in keys):
            continue
        parts = [state_dict.pop(key) for key in keys]
        expected = [(rows, *param.shape[1:]) for rows in layout.rows]
        wrong = [
            f"size mismatch for {key}: the checkpoint has {tuple(part.shape)}, the model {shape}."
            for key, part, shape in zip(keys, parts, expected, strict=True)
            if tuple(part.shape) != shape
        ]
        if wrong:
            error_msgs.extend(wrong)
            # The live value stands in for the refused one, which would be reported as missing too.
            state_dict[f"{prefix}wqkv.{name}"] = param.detach()
            continue
        fused = layout.fuse(*(_gathered(part) for part in parts))
        if isinstance(param, DTensor):
            # src_data_rank=None: every rank has the whole, so nothing is sent.
            fused = distribute_tensor(
                fused, param.device_mesh, param.placements, src_data_rank=None
            )
        state_dict[f"{prefix}wqkv.{name}"] = fused


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole value as a plain tensor; a collective for a sharded one."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()


def _replicated_like(tensor: torch.Tensor, like: DTensor) -> DTensor:
    mesh = like.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
