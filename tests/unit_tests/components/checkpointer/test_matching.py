"""What is said when a checkpoint and a run do not fit, before anything is read."""

import logging
from typing import Any

import pytest
import torch
from torchtitan.components.checkpointer.errors import CheckpointMismatchError
from torchtitan.components.checkpointer.matching import leaves, require_match
from torchtitan.components.checkpointer.templates import SavedEntry

PATH = "/run/step-1"
OTHERS = {"optimizer", "train_state"}


def outline_of(saved: dict[str, Any]) -> dict[str, SavedEntry]:
    """What a back end would tell of a checkpoint of ``saved``."""
    return {
        name: SavedEntry(path=(name,), shape=leaf.shape, dtype=leaf.dtype)
        for name, leaf in leaves(saved)
    }


def test_another_model_is_told_with_every_key_in_one_message() -> None:
    saved = {"a": torch.ones(2), "b": torch.ones(3), "gone": torch.ones(1), "n": 4}
    outline = outline_of({**saved, "optimizer": {"state.a": torch.ones(2), "k": 1}})
    wanted = {
        "a": torch.ones(2),
        "b": torch.ones(4),
        "new": torch.ones(1),
        "n": torch.ones(1),
        "optimizer": {"state.a": torch.ones(5), "state.new": torch.ones(1)},
    }
    with pytest.raises(CheckpointMismatchError) as caught:
        require_match(PATH, wanted, other_keys=OTHERS, outline=outline)
    assert isinstance(caught.value, ValueError)
    text = str(caught.value)
    for part in (
        PATH,
        "2 missing: new, optimizer.state.new",
        "1 unexpected: gone",
        "3 of another shape: b (here [4], there [3]), n (here [1], there no tensor), "
        "optimizer.state.a (here [5], there [2])",
        "--config",
    ):
        assert part in text


def test_surplus_entries_of_other_parts_are_fine() -> None:
    outline = outline_of({"a": torch.ones(2), "optimizer": {"k": 1}})
    require_match(PATH, {"a": torch.zeros(2)}, other_keys=OTHERS, outline=outline)


def load_into(dtype: torch.dtype, saved: dict[str, torch.dtype]) -> None:
    outline = outline_of({name: torch.ones(2, dtype=of) for name, of in saved.items()})
    wanted = {name: torch.ones(2, dtype=dtype) for name in saved}
    require_match(PATH, wanted, other_keys=set(), outline=outline)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_load_that_loses_bits_is_one_warning_with_numbers_and_dtypes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    load_into(bf16, {"a": f32, "b": f32, "c": f16, "d": bf16})
    (text,) = warnings_in(caplog)
    assert PATH in text and "--training.dtype" in text
    # Of the same width, but the exponents of one and the mantissas of the other do not fit.
    assert "1 tensor of float16 into bfloat16, 2 tensors of float32 into bfloat16." in text


def test_a_load_that_widens_or_keeps_dtypes_is_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = {"a": torch.bfloat16, "b": torch.float16, "c": torch.float32}
    load_into(torch.float32, saved)
    assert warnings_in(caplog) == []
