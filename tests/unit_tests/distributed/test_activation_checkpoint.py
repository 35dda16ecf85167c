from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import tyro
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    FullAC,
    MemoryBudgetAC,
    SelectiveAC,
)


@dataclass(kw_only=True, slots=True)
class Settings:
    activation_checkpoint: ActivationCheckpointingConfig = field(default_factory=SelectiveAC.Config)


class MatmulCount(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linears = [nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)]
        self.layers = nn.ModuleDict(
            {"0": nn.Sequential(*linears, nn.Linear(4, 4, bias=False), nn.Tanh())}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers.values():
            x = block(x)
        return x


def _run(config: ActivationCheckpointing.Config | None) -> tuple[list[torch.Tensor], int, Blocks]:
    """Gradients, the number of matmuls in backward, and the model."""
    torch.manual_seed(0)
    model = Blocks()
    x = torch.randn(3, 4, requires_grad=True)
    if config is not None:
        config.build(dump_folder="").apply(model)
    loss = model(x).sum()
    with MatmulCount() as matmuls:
        loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None], matmuls.count, model


@pytest.fixture
def compiler_settings() -> Iterator[None]:
    with functorch_config.patch({}):
        yield


# Backward itself has 6 matmuls. Full runs the 3 of forward again, selective only the one it did not keep: the second.
@pytest.mark.parametrize(
    ("config", "num_matmuls"),
    [
        (None, 6),
        (FullAC.Config(), 9),
        (SelectiveAC.Config(), 7),
        (SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=["0", "2"]), 8),
    ],
)
def test_each_kind_recomputes_what_it_says_and_changes_no_gradient(
    config: ActivationCheckpointing.Config | None, num_matmuls: int
) -> None:
    expected, _, _ = _run(None)
    gradients, count, _ = _run(config)
    assert count == num_matmuls
    assert len(gradients) == 3
    for one, other in zip(gradients, expected, strict=True):
        assert torch.equal(one, other)


def test_keys_of_a_checkpoint_do_not_depend_on_the_setting() -> None:
    plain = list(Blocks().state_dict())
    for config in (FullAC.Config(), SelectiveAC.Config()):
        model = _run(config)[2]
        assert list(model.state_dict()) == plain
        assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
        model.load_state_dict(Blocks().state_dict())


def test_a_forced_name_without_a_matrix_is_refused() -> None:
    config = SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=["3"])
    with pytest.raises(ValueError, match="names 3, a Tanh"):
        config.build(dump_folder="").apply(Blocks())


@pytest.mark.usefixtures("compiler_settings")
def test_a_memory_budget_is_handed_to_the_compiler(tmp_path: Path) -> None:
    config = MemoryBudgetAC.Config(memory_budget=0.25, visualize_memory_budget_pareto=True)
    config.build(dump_folder=str(tmp_path)).apply(Blocks())
    assert functorch_config.activation_memory_budget == 0.25
    assert functorch_config.memory_budget_pareto_dir == str(tmp_path / "memory_budget_pareto")


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: MemoryBudgetAC.Config(memory_budget=1.5), "between 0 and 1"),
        (lambda: SelectiveAC.Config(debug=True), "cannot trace"),
    ],
)
def test_impossible_settings_are_refused(make: Callable[[], object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("selective", SelectiveAC.Config()),
        ("full", FullAC.Config()),
        ("memory-budget", MemoryBudgetAC.Config()),
        ("none", None),
    ],
)
def test_each_kind_is_a_subcommand(argument: str, expected: object) -> None:
    parsed = tyro.cli(Settings, args=[f"activation-checkpoint:{argument}"])
    assert parsed.activation_checkpoint == expected
    assert tyro.cli(Settings, args=[]).activation_checkpoint == SelectiveAC.Config()
