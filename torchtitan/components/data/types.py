"""The words that the parts of the data pipeline share.

The one fact to know: rows are numbered globally. A position counts rows from the start of training
over all epochs and all ranks; which rank reads a row, and in which batch, is arithmetic on it.

    files, huggingface -> sources -> processors -> token_cache -> packing -> order -> RowDataset
                                  -> document_stream -----------> packing ---------> RowStream
    RowDataset, RowStream -> mix -> feed (share of a rank) -> collators -> loader -> trainer
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.components.data.engine import read_in_turn, ReadOptions
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import Configurable

TrainerBatch: TypeAlias = tuple[dict[str, Any], torch.Tensor]
"""``({"input", "positions"}, labels)``: 1-D int64 tensors of the tokens of one microbatch."""

IGNORE_LABEL = -100
"""A label that counts in no loss."""


class DataloaderExhaustedError(Exception):
    """The data ended before the training did.

    Not a StopIteration: a generator would turn that into a RuntimeError.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSequence:
    """A stretch of tokens: ``labels[i]`` is what follows ``input_ids[i]``.

    All arrays are 1-D, of one length. ``positions`` restart at 0 at each document; ``None`` means
    one document.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetBuildContext:
    """What the run gives to every part that it builds."""

    tokenizer: BaseTokenizer
    max_context_length: int
    num_tokens_per_batch: int
    read_options: ReadOptions = field(default_factory=read_in_turn)
    """How rows that have numbers are read."""
    cache_dir: str = ""
    """Folder of the token cache; empty stands for the user's cache folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetIterationPolicy:
    """In which order the rows come, and which of them this rank takes."""

    seed: int
    shuffle: bool
    repeat: bool
    dp_rank: int
    dp_world_size: int
    streaming_shuffle_buffer_size: int = 1000
    """Documents of a stream that are shuffled among each other."""
    num_workers: int = 0
    """Processes that make documents of a stream into tokens; 0 does it in this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFingerprint:
    """What a saved position depends on: with any of these changed it points elsewhere."""

    corpus: str
    tokenizer: str
    packing: str


class RowDataset(ABC):
    """Rows of exactly ``max_context_length`` tokens in one global, endless order."""

    fingerprint: DataFingerprint

    @abstractmethod
    def __len__(self) -> int:
        """Rows of one epoch."""

    @abstractmethod
    def row_at(self, position: int) -> TextSequence:
        """The row at a global position; ``position // len(self)`` is its epoch."""

    @abstractmethod
    def summary(self) -> str:
        """One line for the log: what was found and how many rows it makes."""


StreamPoint: TypeAlias = dict[str, Any]
"""A place between two rows of a stream, in JSON types."""


class RowStream(ABC):
    """Rows of exactly ``max_context_length`` tokens in one global order that is only read forward."""

    fingerprint: DataFingerprint

    @abstractmethod
    def start(self) -> StreamPoint:
        """The place before the first row."""

    @abstractmethod
    def rows_from(self, point: StreamPoint) -> Iterator[tuple[TextSequence, StreamPoint]]:
        """Each row after ``point``, with the place behind it; ends only without repeat."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make a ``rows_from`` that waits, on another thread, end with an error soon."""

    @abstractmethod
    def summary(self) -> str:
        """One line for the log: what is read and how."""


class BaseDataLoader(Stateful, ABC, Configurable):
    """An iterator over the microbatches of one rank that can say and restore where it stands."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        def check(
            self,
            *,
            max_context_length: int,
            num_tokens_per_batch: int,
            tokenizer: BaseTokenizer | None = None,
        ) -> list[str]:
            """What would keep the loader from running, one message each; reads, changes nothing.

            Without ``tokenizer`` what depends on it is left out.
            """
            return []

    @abstractmethod
    def __iter__(self) -> Iterator[TrainerBatch]:
        """The one iterator of this loader, at its present position."""

    def close(self) -> None:
        """End the threads that read ahead."""
