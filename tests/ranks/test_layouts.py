"""Replicas, shards and both together train like one process, at sizes that divide by no number of ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder, ReshardPolicy, resolve_fsdp_mesh
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_

from tests.ranks.layouts import FSDP_2, HSDP_4, Layout, ONE, REPLICATE_2, samples_in_order
from tests.ranks.pool import run_on_ranks
from tests.ranks.tiny_run import make_config, NUM_STEPS, run, Trace

pytestmark = pytest.mark.ranks

OddCase = tuple[int, bool, ReshardPolicy]

NUM_UPDATES = 3
ROWS_PER_STEP = 4


class OddBlock(nn.Module):
    """7 rows, 3 rows (over four ranks one has none), no rows at all, and a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 7), nn.Linear(7, 3)
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.unused = nn.Parameter(torch.ones(3, 2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.silu(self.up(hidden))) + self.empty.sum()


class OddDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(7, 3)
        self.layers = nn.ModuleDict({"0": OddBlock()})
        self.norm = nn.LayerNorm(3)
        self.lm_head = nn.Linear(3, 7, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.layers["0"](self.tok_embeddings(tokens))))


@dataclass(frozen=True)
class Trained:
    """What a few updates came to."""

    norms: list[float]
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    smallest_shard: int
    """Elements of the smallest shard of a parameter with rows, on this rank."""


def _whole(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _updates(model: nn.Module, share: int, num_shares: int, foreach: bool) -> Trained:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=not foreach, foreach=foreach)
    tokens = torch.randint(0, 7, (NUM_UPDATES, 4, 6), generator=torch.Generator().manual_seed(3))
    norms = []
    for rows in tokens:
        optimizer.zero_grad()
        for row in rows.chunk(num_shares)[share]:
            loss = nn.functional.cross_entropy(model(row), (row + 1) % 7, reduction="sum")
            (loss / rows.numel()).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.1, foreach=True).item())
        optimizer.step()
    named = dict(model.named_parameters())
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in named.values() if p.numel()]
    return Trained(
        norms=norms,
        weights={name: _whole(param) for name, param in named.items()},
        moments={
            f"{name}.{key}": _whole(value)
            for name, param in named.items()
            for key, value in optimizer.state.get(param, {}).items()
        },
        smallest_shard=min(shard.numel() for shard in shards),
    )


def _train_odd_model(
    replicate: int, foreach: bool, reshard: ReshardPolicy
) -> tuple[Trained, Trained]:
    """The plain model on all rows, and a sharded one on this rank's."""
    torch.manual_seed(2)
    plain = OddDecoder()
    model = OddDecoder()
    model.load_state_dict(plain.state_dict())
    world_size = dist.get_world_size()
    dims = ParallelDims(
        dp_replicate=replicate, dp_shard=-1, cp=1, tp=1, pp=1, ep=1, world_size=world_size
    )
    apply_fsdp_to_decoder(
        model,
        resolve_fsdp_mesh(dims),
        torch.float32,
        torch.float32,
        pp_enabled=False,
        reshard_after_forward_policy=reshard,
    )
    batch = dims.get_mesh("batch")
    return (
        _updates(plain, 0, 1, foreach),
        _updates(model, batch.get_local_rank(), batch.size(), foreach),
    )


def _train_odd_models(cases: list[OddCase]) -> list[tuple[Trained, Trained]]:
    return [_train_odd_model(*case) for case in cases]


# Replicas, whether the optimizer is foreach (else fused), when gathered parameters are given back.
ODD_CASES: dict[int, list[OddCase]] = {
    2: [(1, False, "default"), (2, True, "never")],
    4: [(1, True, "always"), (2, False, "never"), (4, False, "always")],
}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_uneven_and_empty_shards_are_updated_like_whole_parameters(num_ranks: int) -> None:
    ranks = run_on_ranks(num_ranks, _train_odd_models, ODD_CASES[num_ranks])
    for case, found in zip(ODD_CASES[num_ranks], zip(*ranks, strict=True), strict=True):
        for plain, sharded in found:
            torch.testing.assert_close(sharded.norms, plain.norms, rtol=1e-4, atol=1e-6)
            assert min(plain.norms) > 0.1, "the clipping has to act"
            expected = plain.weights | plain.moments
            for name, actual in (sharded.weights | sharded.moments).items():
                torch.testing.assert_close(actual, expected[name], rtol=1e-4, atol=1e-5, msg=name)
            assert not [name for name in sharded.moments if "unused" in name or "empty" in name]
        smallest = min(sharded.smallest_shard for _, sharded in found)
        assert (smallest == 0) == (num_ranks == 4 and case[0] == 1)


def _train(folder: str, layouts: list[Layout]) -> dict[str, Trace]:
    traces = {}
    for layout in layouts:
        config = make_config(Path(folder), layout.name, load_only=True)
        config.optimizer.param_groups[0].optimizer_kwargs["lr"] = 1e-2
        traces[layout.name] = run(layout.divide(config, rows_per_step=ROWS_PER_STEP))
    return traces


def test_replicas_and_shards_lose_and_read_what_one_rank_does(tmp_path: Path) -> None:
    layouts = [ONE, FSDP_2, REPLICATE_2, HSDP_4]
    traces: dict[str, list[Trace]] = {}
    for num_ranks in (1, 2, 4):
        chosen = [layout for layout in layouts if layout.num_ranks == num_ranks]
        ranks = run_on_ranks(num_ranks, _train, str(tmp_path), chosen, init=False)
        traces |= {layout.name: [rank[layout.name] for rank in ranks] for layout in chosen}
    [one] = traces[ONE.name]
    assert list(one.losses) == list(range(1, NUM_STEPS + 1))
    assert one.losses[NUM_STEPS] < one.losses[1] - 1, "a run that learns nothing shows nothing"
    for layout in layouts:
        ranks = traces[layout.name]
        for step, loss in one.losses.items():
            assert {rank.losses[step] for rank in ranks} == {ranks[0].losses[step]}
            assert ranks[0].losses[step] == pytest.approx(loss, rel=1e-4), (layout.name, step)
            assert samples_in_order(ranks, step, layout) == samples_in_order([one], step, ONE)
        assert all(rank.state == ranks[0].state for rank in ranks), "replicas drifted apart"
