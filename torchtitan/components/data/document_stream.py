"""Read documents of a stream in blocks, shuffle within a block, make tokens of them.

The block is the unit of everything: of shuffling, of work for a worker process, and of a resume,
which reads the block in hand again and nothing before it. The one fact to know: the same blocks come
whatever the number of ranks and workers; a rank reads all of the stream and takes its share of rows.

    StreamingDataSource -> blocks of records -> shuffled -> DocumentMaker -> Block -> packing
                                                (stripes of blocks: workers.py)
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from torchtitan.components.data.sources import SourceConfig, StreamingDataSource
from torchtitan.components.data.tokenize import DocumentMaker, nothing_found
from torchtitan.components.data.types import DatasetIterationPolicy, StreamPoint, TextSequence
from torchtitan.components.data.workers import pickled, Stripes

# Unshuffled, a block only has to be worth a message from a worker.
_UNSHUFFLED_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Block:
    """Some documents of a stream, and the place where they begin."""

    epoch: int
    number: int
    source: dict[str, Any] | None
    """Where the source stands before the block; None is its beginning."""
    documents: list[TextSequence]

    def point(self, document: int) -> StreamPoint:
        """The place before document number ``document`` of this block."""
        return stream_point(self.epoch, self.number, self.source, document)


def stream_point(
    epoch: int, block: int, source: dict[str, Any] | None, document: int
) -> StreamPoint:
    """A place between two documents. Packing adds where in the document or row it stands."""
    return {"epoch": epoch, "block": block, "source": source, "document": document, "offset": 0}


@dataclass(frozen=True, slots=True)
class _BlockReader:
    """Makes the blocks from a point on; picklable, so that a worker process can do it."""

    source: SourceConfig
    maker: DocumentMaker
    policy: DatasetIterationPolicy

    def __call__(self, point: StreamPoint, stripe: int, num_stripes: int) -> Iterator[Block]:
        """Blocks number ``stripe``, ``stripe + num_stripes``, ... counted from ``point``."""
        source: StreamingDataSource = self.source.build(dataset_iteration_policy=self.policy)
        block_size = _block_size(self.policy)
        epoch, number, state = point["epoch"], point["block"], point["source"]
        count = 0
        while True:
            cursor = source.open(state)
            while records := list(islice(cursor, block_size)):
                documents: list[TextSequence] = []
                if count % num_stripes == stripe:
                    order = _order(self.policy, epoch, number, len(records))
                    shuffled = [records[index] for index in order]
                    made = self.maker.make(shuffled, number * block_size)
                    documents = [document for document in made if document is not None]
                    yield Block(epoch, number, state, documents)
                state = cursor.state()
                number += 1
                count += 1
            if number == 0:
                raise ValueError(
                    f"the stream {source.describe()} is empty. Name one that holds rows."
                )
            if not self.policy.repeat:
                return
            epoch, number, state = epoch + 1, 0, None


def _block_size(policy: DatasetIterationPolicy) -> int:
    return policy.streaming_shuffle_buffer_size if policy.shuffle else _UNSHUFFLED_BLOCK


def _order(policy: DatasetIterationPolicy, epoch: int, block: int, length: int) -> list[int]:
    if not policy.shuffle:
        return list(range(length))
    return np.random.default_rng((policy.seed, epoch, block)).permutation(length).tolist()


class DocumentStream:
    """The documents of a streaming source in one order, from any place that was reached before."""

    def __init__(
        self, source: SourceConfig, maker: DocumentMaker, policy: DatasetIterationPolicy
    ) -> None:
        self.policy = policy
        # One rank or many, one worker or many: none of these changes a block.
        self._read = _BlockReader(source, maker, replace(policy, num_workers=0))
        if policy.num_workers > 0:
            pickled(self._read)  # Now rather than in the first step.
        self.description = source.build(dataset_iteration_policy=policy).describe()
        self.processing = maker.describe(maker.processor.context)
        self.tokenizer_digest = maker.processor.context.tokenizer.fingerprint()
        self._stripes: Stripes[Block] | None = None

    def describe_order(self) -> str:
        if not self.policy.shuffle:
            return "in the order of the stream"
        return f"shuffled with seed {self.policy.seed} within {_block_size(self.policy)} documents"

    def start(self) -> StreamPoint:
        return stream_point(0, 0, None, 0)

    def blocks_from(self, point: StreamPoint) -> Iterator[Block]:
        """The block that ``point`` lies in and all that follow.

        Raises ValueError when an epoch holds no document at all.
        """
        self._stripes = Stripes(partial(self._read, point), self.policy.num_workers)
        epoch, num_documents = point["epoch"], 1 if point["block"] else 0
        with closing(self._stripes) as blocks:
            for block in blocks:
                if block.epoch != epoch and num_documents == 0:
                    break
                if block.epoch != epoch:
                    epoch, num_documents = block.epoch, 0
                num_documents += len(block.documents)
                yield block
        if num_documents == 0:
            raise ValueError(nothing_found())

    def interrupt(self) -> None:
        """End the worker processes, so that whoever waits for them waits no more."""
        if self._stripes is not None:
            self._stripes.close()
