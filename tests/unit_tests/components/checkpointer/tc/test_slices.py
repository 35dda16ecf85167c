"""Parts of tensors get from a file into tensors of another layout, element by element."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_checkpointing.resharding import LoadPlan
from torchtitan.components.checkpointer.tc.slices import read_into
from torchtitan.components.checkpointer.tc.storage import DurableStorageConfig


def plan(offsets: Any, src_offsets: Any, sizes: Any) -> LoadPlan:
    return LoadPlan(
        offsets=offsets,
        sizes=sizes,
        src_rank=0,
        src_fqn="a",
        src_offsets=src_offsets,
        src_sizes=sizes,
    )


@pytest.mark.parametrize(
    "source,target",
    [
        (torch.arange(24.0).view(4, 6), torch.zeros(4, 6)),
        (torch.arange(24.0).view(6, 4).t(), torch.zeros(4, 6)),
        (torch.arange(24.0).view(4, 6), torch.zeros(6, 4).t()),
        (torch.arange(24.0).view(4, 6), torch.zeros(4, 6, dtype=torch.float64)),
        (torch.arange(48.0).view(4, 12)[:, ::2], torch.zeros(4, 12)[:, ::2]),
        (torch.arange(24.0).view(6, 4).t(), torch.zeros(6, 4).t()),
    ],
    ids=["alike", "turned there", "turned here", "another dtype", "gaps", "turned both"],
)
@pytest.mark.parametrize(
    "place",
    [
        ((0, 0), (0, 0), (4, 6)),
        ((1, 0), (2, 0), (2, 6)),
        ((1, 2), (2, 1), (2, 3)),
        ((3, 5), (0, 1), (1, 1)),
    ],
)
def test_parts_get_to_their_places_in_any_layout(
    tmp_path: Path, source: torch.Tensor, target: torch.Tensor, place: Any
) -> None:
    torch.save({"a": source}, tmp_path / "model_0.pt")
    target = target.clone(memory_format=torch.preserve_format)
    expected = target.clone()
    here, there, sizes = place
    cut = [
        tuple(slice(at, at + size) for at, size in zip(it, sizes, strict=True))
        for it in (here, there)
    ]
    expected[cut[0]] = source[cut[1]].to(target.dtype)
    storage = DurableStorageConfig().create_storage()
    assert read_into({("a",): target}, [(("a",), plan(*place))], tmp_path / "model_0.pt", storage)
    assert torch.equal(target, expected)


def test_what_lies_aside_is_bounded_and_all_of_it_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan.components.checkpointer.parts._ASIDE_BYTES", 1)
    torch.save({"a": torch.arange(12.0)}, tmp_path / "model_0.pt")
    target = torch.zeros(12, dtype=torch.float64)
    plans = [(("a",), plan((at,), (at,), (3,))) for at in (9, 0, 6, 3)]
    storage = DurableStorageConfig().create_storage()
    assert read_into({("a",): target}, plans, tmp_path / "model_0.pt", storage)
    assert target.tolist() == list(range(12))


def test_a_part_outside_of_its_tensor_is_an_error(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(12.0)}, tmp_path / "model_0.pt")
    storage = DurableStorageConfig().create_storage()
    plans = [(("a",), plan((0,), (10,), (3,)))]
    with pytest.raises(ValueError, match="out of bounds"):
        read_into({("a",): torch.zeros(12)}, plans, tmp_path / "model_0.pt", storage)
