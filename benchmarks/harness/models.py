"""The models that are measured, in the sizes that are measured, sharded as a run shards them.

Size -> config (a recipe's, with another model) -> Run: FSDP2 model, AdamW that has stepped, one batch
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan import assembly
from torchtitan.components.optimizer import default_adamw, LRSchedulersContainer
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.common.config_utils import make_gqa_config, normal
from torchtitan.models.llama3.config_registry import llama3_jargon
from torchtitan.models.llama3.model import Flavor
from torchtitan.trainer import Trainer

_STATE_BYTES_PER_PARAMETER = 12
"""A weight and the two moments of AdamW, in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A model, and the batch with which a step of it takes a few tenths of a second."""

    flavor: Flavor
    num_tokens: int
    """Tokens of a rank's microbatch; a multiple of the context."""

    context: int

    @property
    def num_parameters(self) -> int:
        flavor = self.flavor
        head_dim = flavor.dim // flavor.n_heads
        attention = flavor.dim * head_dim * 2 * (flavor.n_heads + flavor.n_kv_heads)
        block = attention + 3 * flavor.dim * flavor.ffn_dim + 2 * flavor.dim
        outside = 2 * flavor.vocab_size * flavor.dim + flavor.dim
        return flavor.n_layers * block + outside

    @property
    def state_bytes(self) -> int:
        """Weights and moments on all ranks together."""
        return self.num_parameters * _STATE_BYTES_PER_PARAMETER

    @property
    def gradient_bytes(self) -> int:
        """Gradients on all ranks together."""
        return self.num_parameters * 4


def _flavor(dim: int, n_layers: int, ffn_dim: int, vocab_size: int, n_kv_heads: int) -> Flavor:
    return Flavor(
        dim=dim,
        n_layers=n_layers,
        n_heads=8,
        n_kv_heads=n_kv_heads,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
    )


SIZES: dict[str, Size] = {
    "tiny": Size(flavor=_flavor(64, 2, 128, 2048, 8), num_tokens=64, context=32),
    "4M": Size(flavor=_flavor(256, 4, 768, 2048, 4), num_tokens=4 * 256, context=256),
    "50M": Size(flavor=_flavor(512, 8, 2048, 16384, 8), num_tokens=16, context=16),
    "300M": Size(flavor=_flavor(1024, 16, 4096, 16384, 8), num_tokens=8, context=8),
}
"""By the number of parameters; tiny has 0.3 million, for trying out, and 4M is that of llama3_jargon."""


def config_of(size: Size, dump_folder: str, *, fuse_qkv: bool = True) -> Trainer.Config:
    """The recipe ``llama3_jargon`` with the model and the batch of ``size`` and a constant rate."""
    config = llama3_jargon()
    assert config.model_spec is not None
    config.model_spec.model = size.flavor.build_config()
    if not fuse_qkv:
        for layer in config.model_spec.model.layers:
            layer.attention = make_gqa_config(
                dim=size.flavor.dim,
                n_heads=size.flavor.n_heads,
                n_kv_heads=size.flavor.n_kv_heads,
                rope=layer.attention.rope,
                inner_attention=layer.attention.inner_attention,
                qkv_init=normal(0.02),
                wo_init=normal(0.02),
            )
    config.optimizer = default_adamw(lr=1e-4)
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)
    config.training.num_tokens_per_microbatch_per_dp_rank = size.num_tokens
    config.training.max_context_length = size.context
    config.dump_folder = dump_folder
    config.debug.seed = 1
    return config


class Values:
    """State that is a few plain values, as those of a data loader and of a trainer are."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = dict(state_dict)


class Run:
    """The objects that a checkpoint is made of, and steps to train them with.

    The projections of attention are not fused: a fused one is split anew for each checkpoint, which the
    libraries by themselves do not do.
    """

    def __init__(self, size: Size, folder: str) -> None:
        config = assembly.fitted(config_of(size, folder, fuse_qkv=False))
        dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
        torch.manual_seed(1)
        cpu = torch.device("cpu")
        self.model = assembly.materialize(assembly.build_model(config), config, dims, cpu)
        self.optimizers, self.lr_schedulers = assembly.build_optimizers(config, [self.model], dims)
        self.dataloader = Values(epoch=0, next_row=0, fingerprint="0123456789abcdef" * 4)
        self.progress = Values(step=0, ntokens_seen=0)
        self._tokens = torch.arange(size.num_tokens) % size.flavor.vocab_size
        self._positions = torch.arange(size.num_tokens) % size.context
        self.step()

    def forward_backward(self) -> None:
        """Gradients for one batch."""
        self.model(self._tokens, self._positions).float().logsumexp(-1).mean().backward()

    def update(self) -> None:
        """Change the parameters and forget the gradients."""
        self.optimizers.step()
        self.optimizers.zero_grad()

    def step(self) -> None:
        """A whole step."""
        self.forward_backward()
        self.update()

    def tensors(self) -> Iterator[torch.Tensor]:
        """This rank's part of all weights and moments, the live memory."""
        for value in (*self.model.state_dict().values(), *self.optimizers.state_dict().values()):
            if isinstance(value, torch.Tensor):
                local = value.to_local() if isinstance(value, DTensor) else value
                yield local.detach()

    @torch.no_grad()
    def sums(self) -> list[float]:
        """One number over all weights and one over all moments, the same on all ranks."""
        totals = []
        for state in (self.model.state_dict(), self.optimizers.state_dict()):
            shards = [value.to_local() for value in state.values() if isinstance(value, DTensor)]
            total = torch.stack([shard.double().abs().sum() for shard in shards]).sum()
            dist.all_reduce(total)
            totals.append(total.item())
        return totals

    @torch.no_grad()
    def clear(self) -> None:
        """Set all weights and moments to 0, to see that a load fills them."""
        for tensor in self.tensors():
            tensor.zero_()


def all_ranks(is_done: bool) -> bool:
    """Whether ``is_done`` on every rank; a small collective."""
    flag = torch.tensor(int(is_done))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())
