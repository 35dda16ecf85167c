"""Make one microbatch of the rows that a rank takes.

The one fact to know: a microbatch has no batch axis. Its rows lie end to end, and ``positions``
say where each document begins.

    rows (TextSequence, numpy) -> TextCollator -> TrainerBatch (torch, 1-D int64)
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torchtitan.components.data.corpus import positions_of
from torchtitan.components.data.types import (
    DatasetBuildContext,
    IGNORE_LABEL,
    TextSequence,
    TrainerBatch,
)
from torchtitan.config import Configurable


class Collator(Configurable, ABC):
    """Makes a microbatch of rows; built with ``context=``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def __init__(self, config: Config, *, context: DatasetBuildContext) -> None:
        self.config = config
        self.context = context

    def num_rows_per_batch(self) -> int:
        """Rows that one microbatch of one rank takes."""
        return self.context.num_tokens_per_batch // self.context.max_context_length

    @abstractmethod
    def __call__(self, rows: Sequence[TextSequence]) -> TrainerBatch:
        """The microbatch of ``rows``."""


class TextCollator(Collator):
    """Rows end to end, the rest of the microbatch filled with tokens that count in no loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(Collator.Config):
        pass

    def __call__(self, rows: Sequence[TextSequence]) -> TrainerBatch:
        num_tokens = sum(len(row.input_ids) for row in rows)
        num_missing = self.context.num_tokens_per_batch - num_tokens
        if num_missing < 0:
            raise ValueError(
                f"{len(rows)} rows hold {num_tokens} tokens, more than the "
                f"{self.context.num_tokens_per_batch} of a microbatch. Give fewer or shorter rows."
            )
        padding = TextSequence(
            input_ids=np.zeros(num_missing, dtype=np.int64),
            labels=np.full(num_missing, IGNORE_LABEL, dtype=np.int64),
        )
        parts = [*rows, padding]
        inputs = _join([part.input_ids for part in parts])
        positions = _join([positions_of(part) for part in parts])
        labels = _join([part.labels for part in parts])
        return {"input": inputs, "positions": positions}, labels


def _join(arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False))
