from dataclasses import replace
from pathlib import Path

import pytest
from torchtitan.components.data import GrainDataLoader
from torchtitan.components.data.position import decode_position, encode_position
from torchtitan.components.data.types import DataFingerprint
from torchtitan.models.llama3.config_registry import llama3_jargon

PRINT = DataFingerprint(corpus="c1", tokenizer="t1", packing="p1")


def test_positions_survive_the_state() -> None:
    for position in range(25):
        assert decode_position(encode_position(position, 10, PRINT), 10, PRINT) == position


def test_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    assert encode_position(20, 10, PRINT) == {
        "version": 1,
        "epoch": 2,
        "next_row": 0,
        "fingerprint": {"corpus": "c1", "tokenizer": "t1", "packing": "p1"},
    }


@pytest.mark.parametrize("state", [None, {}])
def test_an_empty_state_is_the_beginning(state: dict | None) -> None:
    assert decode_position(state, 10, PRINT) == 0


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused(version: object) -> None:
    state = encode_position(3, 10, PRINT) | {"version": version}
    with pytest.raises(ValueError, match="version"):
        decode_position(state, 10, PRINT)


def test_a_state_of_another_program_is_refused_by_its_keys() -> None:
    state = {"version": 1, "dp_world_size": 2, "dp_rank_0": {}}
    with pytest.raises(ValueError, match=r"found \['dp_rank_0', 'dp_world_size', 'version'\]"):
        decode_position(state, 10, PRINT)


@pytest.mark.parametrize("changed", ["corpus", "tokenizer", "packing"])
def test_what_changed_is_named_with_both_values_and_the_way_out(changed: str) -> None:
    state = encode_position(3, 10, PRINT)
    state["fingerprint"][changed] = "old"
    with pytest.raises(ValueError) as caught:
        decode_position(state, 10, PRINT)
    message = str(caught.value)
    now = getattr(PRINT, changed)
    assert f"since the {changed} changed ({changed}: saved 'old', now '{now}')" in message
    assert "--checkpoint.exclude_from_loading dataloader" in message
    assert not any(f"{name}:" in message for name in {"corpus", "tokenizer", "packing"} - {changed})


@pytest.mark.parametrize(("epoch", "next_row"), [(-1, 0), (0, 10), (0, -1)])
def test_a_position_out_of_range_is_refused(epoch: int, next_row: int) -> None:
    state = encode_position(0, 10, PRINT) | {"epoch": epoch, "next_row": next_row}
    with pytest.raises(ValueError, match="out of range"):
        decode_position(state, 10, PRINT)


def test_positions_that_were_saved_by_the_first_version_are_still_of_the_same_data(
    tmp_path: Path,
) -> None:
    # A changed way to digest would part every run from the place it has reached. What is added to a
    # digest has to leave it as it was for data that does not use what is new.
    config = llama3_jargon()
    assert isinstance(config.dataloader, GrainDataLoader.Config)
    loader = replace(config.dataloader, cache_dir=str(tmp_path)).build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=config.tokenizer.build(tokenizer_path=config.hf_assets_path),
        max_context_length=256,
        num_tokens_per_batch=1024,
    )
    assert loader.state_dict()["fingerprint"] == {
        "corpus": "9abb76e9c48d261d367bc763ad404de2",
        "tokenizer": "4ef324ae3df9b2cf776030f953b9fe9e",
        "packing": "concat-then-split, rows of 256 tokens, shuffled with seed 42",
    }
    loader.close()
