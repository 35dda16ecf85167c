"""How large a save is said to be, and what a refused one tells."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torchtitan.components.checkpointer.space import Kept, refusal, state_bytes
from torchtitan.components.checkpointer.state import MODEL, ModelWrapper, OPTIMIZER

from tests.unit_tests.components.checkpointer.runs import build_run
from tests.unit_tests.components.checkpointer.ways import DISABLED, over, TC_WAITING, Way

MIB = 2**20
FRAME = 8 * 1024
"""More than is added for a tensor on one rank."""


class OneWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(MIB))


def elements(model: nn.Module, **more: object) -> float:
    """What the tensors are said to take, in elements of four bytes."""
    size = state_bytes({MODEL: ModelWrapper(model), **more}, world_size=1)
    return size // 4 // 2**18 * 2**18  # all that is added lies below a MiB


@over(DISABLED, TC_WAITING)
@pytest.mark.usefixtures("one_rank")
def test_a_save_takes_no_more_than_is_said_and_not_much_less(tmp_path: Path, way: Way) -> None:
    run = build_run(tmp_path, width=300, last_save_model_only=True, **way.settings)
    run.train(2, last_step=2)
    for name, dtype in (("step-1", None), ("step-2", torch.float32)):
        folder = tmp_path / "checkpoint" / name
        real = sum(path.stat().st_size for path in folder.iterdir())
        said = state_bytes(run.manager.states, world_size=1, export_dtype=dtype)
        assert real <= said < real + 25 * FRAME + MIB // 4
    run.manager.close()


def test_weights_alone_are_counted_in_the_type_that_they_are_exported_in() -> None:
    model = OneWeight()
    model.register_buffer("seen", torch.zeros(MIB, dtype=torch.int64))
    states = {MODEL: ModelWrapper(model), "big": torch.zeros(8 * MIB)}
    size = state_bytes(states, world_size=1, export_dtype=torch.bfloat16)
    assert 2 * MIB + 8 * MIB <= size < 11 * MIB


def test_tensors_that_are_tied_are_counted_once() -> None:
    model = OneWeight()
    model.register_parameter("tied", model.weight)
    assert elements(model) == MIB


def test_parts_of_one_memory_are_counted_each() -> None:
    model, fused = OneWeight(), torch.zeros(2 * MIB)
    model.register_buffer("queries", fused[:MIB])
    model.register_buffer("keys", fused[MIB:])
    assert elements(model) == 3 * MIB


def test_the_state_of_any_torch_optimizer_and_plain_values_are_counted() -> None:
    model = OneWeight()
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    assert elements(model, **{OPTIMIZER: optimizer}) == 3 * MIB
    assert elements(model, **{OPTIMIZER: [optimizer]}) == 3 * MIB
    assert elements(model, more={"a": [torch.zeros(MIB)], "b": (torch.zeros(MIB), 1)}) == 3 * MIB


def test_what_has_fewer_elements_than_its_shape_says_is_not_counted() -> None:
    model = OneWeight()
    sparse = torch.eye(2).to_sparse_coo().sparse_resize_((10**6, 10**6), 2, 0)
    assert elements(model, more=sparse) == MIB


def test_of_a_state_without_tensors_nothing_is_known() -> None:
    assert state_bytes({}, world_size=8) == 0
    assert state_bytes({MODEL: object(), OPTIMIZER: None, "x": 1}, world_size=8) == 0


def test_a_refusal_has_all_numbers_and_every_way_to_make_room() -> None:
    older = [
        Kept(name="step-5", size_bytes=3 * MIB, why="a file PIN"),
        Kept(name="step-10", size_bytes=2**31),
        Kept(name="step-20", size_bytes=2**30),
        Kept(name="step-100", size_bytes=MIB, why="--checkpoint.keep_every"),
    ]
    text = refusal("Saving", "/run", needed=5 * 2**30, free=2**30, older=older, superseded=10 * MIB)
    assert text == (
        "Saving was not begun: it takes 5.00 GiB, and the disk of /run has 1.00 GiB free, 4.00 GiB too few. "
        "--checkpoint.keep_latest_k 2 would free 3.00 GiB (step-10, step-20); /run/superseded holds "
        "10.0 MiB, which nothing deletes by itself; --checkpoint.keep_every keeps 1.0 MiB (step-100); a "
        "file PIN keeps 3.0 MiB (step-5). Free some, or name another disk by --checkpoint.folder. Nothing "
        "was written, and older checkpoints are untouched."
    )


def test_a_refusal_says_when_no_checkpoint_could_make_room() -> None:
    text = refusal("Saving", "/run", needed=2 * MIB, free=MIB, older=[], superseded=0)
    assert "1.0 MiB too few. No other checkpoint in it could go. Free some" in text
