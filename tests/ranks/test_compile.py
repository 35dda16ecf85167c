"""Compiled blocks compute what eager ones do, in every layout, under the same names."""

from itertools import permutations, product

import pytest
import torch
from torch._dynamo.utils import counters
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder, resolve_fsdp_mesh
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.common.decoder_sharding import shard_decoder
from torchtitan.models.llama3 import Llama3Model

from tests.ranks.gradients import Answer, answer, answers, Case, optimizer_names
from tests.ranks.pool import run_on_ranks
from tests.unit_tests.models.small import ROW_LENGTH, small_config

pytestmark = pytest.mark.ranks

CHECKPOINTING = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}
COMPILE = {"eager": CompileConfig(), "compiled": CompileConfig(enable=True, backend="aot_eager")}
# Number of ranks, and by name (replicate, tensor).
LAYOUTS: dict[int, dict[str, tuple[int, int]]] = {
    1: {"1 rank": (1, 1)},
    2: {"FSDP": (1, 1), "replicate": (2, 1), "TP": (1, 2)},
    4: {"HSDP": (2, 1), "FSDP x TP": (1, 2)},
}


def _cases(world_size: int) -> dict[str, Case]:
    return {
        f"{layout}, {checkpointing}, {compilation}": Case(
            replicate=replicate,
            tensor=tensor,
            checkpointing=CHECKPOINTING[checkpointing],
            compile=COMPILE[compilation],
        )
        for (layout, (replicate, tensor)), checkpointing, compilation in product(
            LAYOUTS[world_size].items(), CHECKPOINTING, COMPILE
        )
    }


def _fitted_in_order(order: tuple[str, ...], case: Case) -> Answer:
    """Like the trainer, but for the order of the three that follow tensor parallelism."""

    def fit(model: Llama3Model, dims: ParallelDims) -> None:
        if dims.tp_enabled:
            shard_decoder(model, dims.get_mesh("tp"), sequence_parallel=True)
        for step in order:
            if step == "checkpointing" and case.checkpointing is not None:
                case.checkpointing.build(dump_folder="").apply(model)
            elif step == "compile":
                apply_compile(model, compile_config=case.compile, parallel_dims=dims)
            elif step == "shard":
                apply_fsdp_to_decoder(
                    model, resolve_fsdp_mesh(dims), torch.float32, torch.float32, pp_enabled=False
                )

    return answer(case, fit)


def _fitted_in_other_orders(cases: dict[str, Case]) -> dict[str, Answer]:
    # The first order is the usual one.
    _, *orders = permutations(("checkpointing", "compile", "shard"))
    return {
        f"{name}: {' -> '.join(order)}": _fitted_in_order(order, case)
        for name, case in cases.items()
        for order in orders
    }


def _graphs_by_length(lengths: list[int]) -> tuple[list[int], float]:
    """Graphs made until each length was trained and evaluated, and the worst difference of an output."""
    compiled, plain = small_config().build(), small_config().build()
    for model in (compiled, plain):
        torch.manual_seed(7)
        model.init_weights()
    one_rank = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1)
    # Graphs are all that counts here, so nothing need be made of them.
    config = CompileConfig(enable=True, backend="eager")
    apply_compile(compiled, compile_config=config, parallel_dims=one_rank)
    graphs, worst = [], 0.0
    for length in lengths:
        tokens = torch.arange(length) % 64
        positions = torch.arange(length) % ROW_LENGTH
        output = compiled(tokens, positions)
        output.sum().backward()
        with torch.no_grad():
            compiled.eval()
            evaluated = compiled(tokens, positions)
            compiled.train()
        expected = plain(tokens, positions)
        for found in (output, evaluated):
            worst = max(worst, (found - expected).abs().max().item())
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs, worst


def _graphs(case: str) -> int:
    """The blocks share one. The loss is another, but one of collectives where the vocabulary is shared."""
    return 1 if "TP" in case else 2


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradients_and_names_are_those_of_the_plain_model(world_size: int) -> None:
    names = list(small_config().build().state_dict())
    for found in run_on_ranks(world_size, answers, _cases(world_size), timeout_seconds=240):
        for case, of_rank in found.items():
            assert of_rank.worst < 2e-5, case
            assert of_rank.loss_difference < 1e-5, case
            assert of_rank.saved_names == names, case
            assert not [name for name in of_rank.live_names if "_orig_mod" in name], case
            assert of_rank.num_graphs == (_graphs(case) if "compiled" in case else 0), case
            assert of_rank.num_breaks == 0, case


def test_any_order_of_checkpointing_compiling_and_sharding_computes_the_same() -> None:
    cases = {
        # On two ranks this shards over one.
        "TP": Case(tensor=2, compile=COMPILE["compiled"], checkpointing=SelectiveAC.Config()),
        **{
            f"FSDP, {name}": Case(compile=COMPILE["compiled"], checkpointing=CHECKPOINTING[name])
            for name in ("full", "selective")
        },
    }
    [found, _] = run_on_ranks(2, _fitted_in_other_orders, cases, timeout_seconds=240)
    plain = small_config().build()
    names = list(plain.state_dict())
    assert len(found) == 15
    for case, of_rank in found.items():
        assert of_rank.worst < 2e-5, case
        assert of_rank.saved_names == names, case
        assert of_rank.optimizer_names == optimizer_names(plain), case
        assert of_rank.num_graphs == _graphs(case), f"{case} is not compiled"


def test_lengths_that_vary_are_compiled_for_a_few_times_only() -> None:
    lengths = [64, 32, 48, 80, 96, 64, 112, 128, 16, 16, 144]
    [(graphs, worst)] = run_on_ranks(1, _graphs_by_length, lengths)
    # Training and evaluation, each for one length, for any length, and for a single row.
    assert graphs[-1] <= 6, graphs
    assert worst < 1e-5
