"""The masks against the plain definition: an earlier token of the same document of the same row."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torchtitan.models.common.masks import (
    block_mask,
    dense_mask,
    document_starts,
    get_causal_mask_mod,
    get_document_mask_mod,
    get_efficient_causal_mask_mod_for_packed_document,
    varlen_metadata,
)

# Lengths of the documents in each row of 8 tokens.
ROWS = st.lists(
    st.sampled_from([(8,), (1, 7), (3, 5), (7, 1), (2, 2, 4), (1,) * 8]), min_size=1, max_size=4
)


def positions_of(rows: list[tuple[int, ...]]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for row in rows for length in row])


def naive(positions: torch.Tensor) -> torch.Tensor:
    """(T, T): walk back from each query to the start of its document."""
    allowed = torch.zeros(len(positions), len(positions), dtype=torch.bool)
    for query in range(len(positions)):
        for key in range(query, -1, -1):
            allowed[query, key] = True
            if positions[key] == 0:
                break
    return allowed


def rendered(mask_mod, num_tokens: int) -> torch.Tensor:
    index = torch.arange(num_tokens)
    zero = torch.tensor(0)
    return mask_mod(zero, zero, index.unsqueeze(1), index.unsqueeze(0))


@settings(deadline=None, max_examples=30)
@given(ROWS)
def test_every_form_of_the_mask_follows_the_definition(rows: list[tuple[int, ...]]) -> None:
    positions = positions_of(rows)
    num_tokens = len(positions)
    expected = naive(positions)

    allowed = dense_mask(positions, 8).allowed
    assert allowed.shape == (len(rows), 1, 8, 8)
    assert torch.equal(torch.block_diag(*allowed.squeeze(1)).bool(), expected)

    both = rendered(get_causal_mask_mod(), num_tokens) & rendered(
        get_document_mask_mod(positions), num_tokens
    )
    assert torch.equal(both, expected)
    packed = get_efficient_causal_mask_mod_for_packed_document(positions)
    assert torch.equal(rendered(packed, num_tokens), expected)

    varlen = varlen_metadata(positions)
    lengths = [length for row in rows for length in row]
    assert varlen.cu_seqlens.diff().tolist() == lengths
    assert varlen.cu_seqlens[0] == 0 and varlen.cu_seqlens.dtype == torch.int32
    assert varlen.max_seqlen == max(lengths)


@pytest.mark.parametrize(
    "positions",
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],  # not whole rows
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],  # a document across two rows
        [0, 1, 2, 0, 1],
    ],
)
def test_tokens_that_are_not_whole_rows_make_one_row(positions: list[int]) -> None:
    tensor = torch.tensor(positions)
    allowed = dense_mask(tensor, 8).allowed
    assert allowed.shape == (1, 1, len(positions), len(positions))
    assert torch.equal(allowed[0, 0], naive(tensor))


def test_memory_of_the_dense_mask_grows_with_the_row_not_with_the_batch() -> None:
    positions = torch.arange(32).repeat(64)
    assert dense_mask(positions, 32).allowed.numel() == 64 * 32 * 32


def test_tokens_before_the_first_start_belong_to_the_first_document() -> None:
    assert document_starts(torch.tensor([5, 6, 0, 1])).tolist() == [0, 0, 2, 2]
    assert varlen_metadata(torch.tensor([5, 6, 0, 1])).cu_seqlens.tolist() == [0, 2, 4]


def test_block_mask_skips_blocks_of_other_documents() -> None:
    mask = block_mask(torch.arange(128).repeat(2))
    assert mask.shape == (1, 1, 256, 256)
    # Block 1 sees itself alone although block 0 is earlier.
    assert mask.kv_num_blocks.flatten().tolist() == [1, 1]
    assert mask.kv_indices[0, 0, 1, 0] == 1
