import numpy as np
import pytest
import torch
from torchtitan.components.data import DatasetBuildContext, TextCollator, TextSequence
from torchtitan.components.tokenizer import HuggingFaceTokenizer


def collator(tokenizer: HuggingFaceTokenizer, num_tokens: int, row_length: int) -> TextCollator:
    context = DatasetBuildContext(
        tokenizer=tokenizer, max_context_length=row_length, num_tokens_per_batch=num_tokens
    )
    return TextCollator.Config().build(context=context)


def row(first: int, length: int, positions: list[int] | None = None) -> TextSequence:
    ids = np.arange(first, first + length + 1)
    return TextSequence(
        input_ids=ids[:-1],
        labels=ids[1:],
        positions=None if positions is None else np.array(positions),
    )


def test_rows_lie_end_to_end(tokenizer: HuggingFaceTokenizer) -> None:
    collate = collator(tokenizer, num_tokens=4, row_length=2)
    assert collate.num_rows_per_batch() == 2
    inputs, labels = collate([row(10, 2, [0, 1]), row(20, 2, [0, 0])])
    assert inputs["input"].tolist() == [10, 11, 20, 21]
    assert inputs["positions"].tolist() == [0, 1, 0, 0]
    assert labels.tolist() == [11, 12, 21, 22]
    assert {tensor.dtype for tensor in (*inputs.values(), labels)} == {torch.int64}


def test_the_rest_is_padding_that_counts_in_no_loss(tokenizer: HuggingFaceTokenizer) -> None:
    inputs, labels = collator(tokenizer, num_tokens=5, row_length=5)([row(10, 2)])
    assert inputs["input"].tolist() == [10, 11, 0, 0, 0]
    assert inputs["positions"].tolist() == [0, 1, 0, 1, 2]
    assert labels.tolist() == [11, 12, -100, -100, -100]


def test_too_many_tokens_are_refused(tokenizer: HuggingFaceTokenizer) -> None:
    with pytest.raises(ValueError, match="1 rows hold 6 tokens, more than the 4"):
        collator(tokenizer, num_tokens=4, row_length=4)([row(0, 6)])
