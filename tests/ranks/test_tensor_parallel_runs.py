"""Whole runs on tensor-parallel ranks, the numbers in which they compute, and what they refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.metrics import BaseLogger
from torchtitan.distributed.tensor_parallel import (
    apply_tensor_parallel,
    NoParallel,
    TensorParallel,
    VocabParallel,
)
from torchtitan.trainer import Trainer

from tests.ranks.pool import run_on_ranks
from tests.ranks.test_tensor_parallel import (
    batch_of,
    Case,
    parallel_model,
    whole_model,
    whole_value,
)
from tests.ranks.tiny_run import CONTEXT, make_config

pytestmark = pytest.mark.ranks

NUM_STEPS = 4
Curves = dict[str, list[float]]


class _Curves(BaseLogger):
    """Every number that a run reports and that its layout must not change."""

    NAMES = (
        "loss_metrics/global_avg_loss",
        "grad_norm",
        "validation_metrics/loss",
        "n_tokens_seen",
    )

    def __init__(self) -> None:
        self.found: Curves = {name: [] for name in self.NAMES}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        for name in self.NAMES:
            if name in metrics:
                self.found[name].append(metrics[name])


def _curves(folder: str, name: str, *, tensor: int, shard: int = 1, chunked: bool) -> Curves:
    """What a run of four steps with validation reports, two rows of the corpus in each step."""
    config = make_config(Path(folder), name, enable=False)
    config.parallelism.tensor_parallel_degree = tensor
    config.training.steps = NUM_STEPS
    config.training.num_tokens_per_microbatch_per_dp_rank = 2 * CONTEXT // shard
    config.training.num_tokens_per_train_step = 2 * CONTEXT
    if chunked:
        config.loss = ChunkedLossWrapper.Config(num_chunks=2)
    config.validator.enable, config.validator.freq, config.validator.steps = True, 2, 2
    config.validator.dataloader = config.dataloader
    trainer = Trainer(config)
    curves = _Curves()
    trainer.metrics_processor.logger.add_logger(curves)
    trainer._train()
    trainer.close()
    trainer.peers.close()
    dist.destroy_process_group()
    return curves.found


def _all_curves(folder: str, layouts: list[dict[str, Any]]) -> list[Curves]:
    return [_curves(folder, str(index), **layout) for index, layout in enumerate(layouts)]


def test_a_run_reports_the_same_numbers_in_every_layout(tmp_path: Path) -> None:
    [[expected]] = run_on_ranks(
        1, _all_curves, str(tmp_path), [{"tensor": 1, "chunked": False}], init=False
    )
    assert [len(values) for values in expected.values()] == [NUM_STEPS, NUM_STEPS, 3, NUM_STEPS]
    assert expected["loss_metrics/global_avg_loss"][0] > 7
    for num_ranks, layouts in (
        (2, [{"tensor": 2, "chunked": False}, {"tensor": 2, "chunked": True}]),
        (4, [{"tensor": 2, "shard": 2, "chunked": True}]),
    ):
        for of_rank in run_on_ranks(num_ranks, _all_curves, str(tmp_path), layouts, init=False):
            for found in of_rank:
                for name, values in expected.items():
                    # The norm of half a million gradients, summed in other pieces; FSDP does the same.
                    close = 5e-4 if name == "grad_norm" else 1e-5
                    assert found[name] == pytest.approx(values, rel=close), name


def _in_bfloat16() -> list[tuple[torch.dtype, torch.dtype, float]]:
    """Dtype of logits and gradients, and the cosine of the gradients with those of float32."""
    answers = []
    for sequence_parallel in (True, False):
        case = Case(sequence_parallel=sequence_parallel)
        whole, model = whole_model(case), parallel_model(case, case.dims(), "bfloat16")
        tokens, labels, positions = batch_of(0, case.flavor.vocab_size)
        gradients = []
        for each in (whole, model):
            logits = each(tokens, positions)
            case.plain_loss()(logits, labels, 1.0)[0].backward()
            gradients.append([whole_value(param.grad).flatten() for param in each.parameters()])
        dtypes = {part.dtype for part in gradients[1]}
        assert len(dtypes) == 1
        cosines = [
            torch.cosine_similarity(one, other, dim=0).item()
            for one, other in zip(*gradients, strict=True)
        ]
        answers.append((logits.dtype, dtypes.pop(), min(cosines)))
    return answers


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32() -> None:
    for answers in run_on_ranks(2, _in_bfloat16):
        for logits_dtype, grad_dtype, cosine in answers:
            assert (logits_dtype, grad_dtype) == (torch.bfloat16, torch.float32)
            assert cosine > 0.99


class _Block(nn.Module):
    """Two matrices with biases, and a third one that is to stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.gate = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()) * self.gate(x)


def _plan() -> dict[str, Any]:
    return {
        "up": TensorParallel(
            input_layout=Replicate(),
            output_layout=Shard(-1),
            param_layouts={"weight": Shard(0), "bias": Shard(0)},
        ),
        "down": TensorParallel(
            input_layout=Shard(-1), output_layout=Replicate(), param_layouts={"weight": Shard(1)}
        ),
        "gate": NoParallel(use_local_output=True),
    }


def _blocks() -> tuple[_Block, _Block]:
    torch.manual_seed(1)
    whole, cut = _Block(), _Block()
    cut.load_state_dict(whole.state_dict())
    return whole, cut


def _run_block() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole, cut = _blocks()
    apply_tensor_parallel(cut, mesh, _plan())
    assert NoParallel(output_layout=Shard(0)).output_layout == Shard(0)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for block, each in zip((whole, cut), inputs, strict=True):
        block(each).square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(whole_value(other.grad), one.grad)
    layouts = [param.placements for param in cut.parameters() if isinstance(param, DTensor)]
    assert layouts == [(Shard(0),), (Shard(0),), (Shard(1),)] + [(Replicate(),)] * 3


def test_any_module_can_be_cut_by_a_plan() -> None:
    run_on_ranks(2, _run_block)


def _message(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


def _refusals() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,))
    plan = _plan()
    short = nn.Sequential(nn.Linear(4, 1, bias=False))
    table = nn.Sequential(nn.Embedding(4, 2))
    apply_tensor_parallel(table, mesh, {"0": VocabParallel(output_layout=Shard(0))})
    return {
        "unknown": _message(lambda: apply_tensor_parallel(_Block(), mesh, {"side": plan["up"]})),
        "left over": _message(lambda: apply_tensor_parallel(_Block(), mesh, {"up": plan["up"]})),
        "nothing": _message(lambda: apply_tensor_parallel(short, mesh, {"0": plan["up"]})),
        "tokens": _message(lambda: table(torch.tensor([0, 1, 2]))),
    }


def test_a_plan_that_does_not_fit_is_refused() -> None:
    for found in run_on_ranks(2, _refusals):
        assert "_Block does not have: ['side']" in found["unknown"]
        assert "['down.bias', 'down.weight', 'gate.bias', 'gate.weight']" in found["left over"]
        assert "0 of 1 leaves some of them nothing" in found["nothing"]
        assert "3 tokens cannot be split over 2" in found["tokens"]
